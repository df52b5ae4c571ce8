"""docs/configuration.md is what the schema says."""

from __future__ import annotations

from pathlib import Path

from verl.config.keys import leaves
from verl.config.reference import reference
from verl.config.translate import NO_MEANING, NOT_YET

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_not_stale() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "the schema has changed: run make docs"


def test_the_page_is_complete() -> None:
    page = reference()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert all(sum(line.startswith(f"| `{key}` | ") for line in rows) >= 1 for key in leaves())
    assert all(f"`{pattern}`" in page for row in NO_MEANING for pattern in row.patterns)
    assert all(f"| `{row.pattern}` | " in page for row in NOT_YET)


def test_tables_are_whole() -> None:
    """A pipe in a cell would shift its row."""
    width = 0
    for line in reference().splitlines():
        cells = line.replace("\\|", "").count("|")
        assert cells in (0, width) or not width or line.startswith("| key") or line.startswith("|"), line
        width = cells if line.startswith("| ---") else (0 if not cells else width)
        if width and cells:
            assert cells == width, line
