"""The nearest known name to a misspelled one; for every error that can say "did you mean"."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from pathlib import Path


def nearest(name: str, choices: Iterable[str], cutoff: float = 0.0) -> str | None:
    """The choice most like ``name``, case aside (the first of equals), or None where none reaches the cutoff. Dotted
    names are compared as a whole and by their last part. ``cutoff``: from 0 (anything) to 1 (equal)."""

    def likeness(choice: str) -> float:
        # The last part counts as much as the whole, so that a key in the wrong section is found too.
        pairs = [(name.lower(), choice.lower()), (name.lower().rpartition(".")[2], choice.lower().rpartition(".")[2])]
        return sum(SequenceMatcher(None, *pair).ratio() for pair in pairs) / 2

    found = max(choices, key=likeness, default=None)
    return found if found is not None and likeness(found) >= cutoff else None


def did_you_mean(name: str, choices: Iterable[str], cutoff: float = 0.5) -> str:
    """``"did you mean X? "`` where a choice is near enough, else an empty string."""
    found = nearest(name, choices, cutoff)
    return f"did you mean {found}? " if found else ""


def matches(pattern: str, data_source: str) -> bool:
    """Whether a data source has that name; a trailing ``*`` stands for any ending."""
    return data_source == pattern or (pattern.endswith("*") and data_source.startswith(pattern[:-1]))


def nearest_path(missing: Path, cutoff: float = 0.6) -> Path | None:
    """An existing path like ``missing``: each part that does not exist is replaced by the nearest name beside it,
    whatever its ending, which says little about which file was meant."""
    found = Path(missing.anchor)
    for part in missing.parts[bool(missing.anchor) :]:
        if not (found / part).exists():
            try:
                names = sorted(path.name for path in found.iterdir())
            except OSError:
                return None
            stems = {Path(name).stem: name for name in reversed(names)}
            close = nearest(Path(part).stem, stems, cutoff)
            if close is None:
                return None
            part = stems[close]
        found /= part
    return found
