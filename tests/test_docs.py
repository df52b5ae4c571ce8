"""Links of README.md and docs/ lead somewhere: files of the repository, headings of pages. The site has them all."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl.config import load_config
from verl.config.aliases import canonical
from verl.config.keys import free_dict_of, leaves, sections, using
from verl.config.schema_supervised import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def prose(page: Path) -> str:
    """The page without blocks and spans of code, in which brackets are no links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", lambda span: span[0] if span[0].count("](") == 0 else "", text)


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in anchors(target))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One: two\n[a](#one-two) [b](#three) [c](none.md) [d](page.md#one-two) [e](https://x.y/#z)\n")
    assert broken(page) == ["#three", "none.md"]


def test_every_page_can_be_reached() -> None:
    """From README.md, by links."""
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in seen and page in PAGES:
            seen.add(page)
            links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
            waiting += [(page.parent / link).resolve() for link in links]
    assert set(PAGES) == seen


def pages_in(navigation: Any) -> list[str]:
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for part in parts for page in pages_in(part)]


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    navigation = pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    ours = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]}
    brought = {"index.md", "contributing.md", "changelog.md", "reporting.md"}  # by docs/site_hooks.py
    assert sorted(navigation) == sorted(ours | brought)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "api").glob("*.md")), ids=lambda page: page.name)
def test_what_the_python_pages_document_exists(page: Path) -> None:
    names = re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert names or page.name == "index.md"
    for name in names:
        assert pkgutil.resolve_name(name).__doc__, name


NOT_OURS = ("configuration.md", "coming-from-", "sft.md")  # these name keys of others, too


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if not page.name.startswith(NOT_OURS)],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_every_key_that_a_page_names_exists(page: Path) -> None:
    known = {*leaves(), *sections()}
    for schema in COMMANDS.values():
        with using(schema):
            known |= {*leaves(), *sections()}
    named = re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:=[^`]*)?`", page.read_text(encoding="utf-8"))
    ours = {key for key in named if key.split(".")[0] in known and not key.endswith((".py", ".json", ".gz"))}
    assert sorted(key for key in ours if canonical(key) not in known and free_dict_of(key) is None) == []


def test_the_worked_example_of_concepts() -> None:
    sizes = ["data.train_batch_size=64", "rollout.n=8", "actor.ppo_mini_batch_size=16"]
    loaded = load_config(ROOT / "examples" / "quickstart.yaml", [*sizes, "actor.ppo_micro_batch_size_per_gpu=8"])
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    assert "GBS 64, n 8, MBS 16, μBS 8 and two ranks" in text
    assert f"K = 128 / (8 x 2) = {loaded.config.actor_batch(2).accumulation} backward passes" in text
