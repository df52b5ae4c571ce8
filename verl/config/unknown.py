"""What to say about a key that nobody knows."""

from __future__ import annotations

from verl.config.aliases import MISNOMERS, alias_sections, canonical
from verl.config.foreign import exact_names, foreign_sections, no_meaning, not_yet
from verl.config.keys import free_dicts, leaves, sections
from verl.config.names import nearest

_CUTOFF = 0.5


def unknown(spelled: str, key: str) -> tuple[str, str]:
    """The part of the key that does not exist, as it was spelled, and what to do about it.

    A misspelled section is named alone, so that all settings in it are one problem.

    Args:
        spelled: the key as the user wrote it.
        key: its canonical name.
    """
    if no_meaning(key) or not_yet(key):
        return spelled, f"it is a key of verl's: verl config explain {spelled} says more"
    parts = key.split(".")
    known_sections = sections().keys() | alias_sections() | foreign_sections()
    ends = range(1, len(parts) + 1)
    depth = next((end for end in ends if ".".join(parts[:end]) not in known_sections), len(parts))
    wrong, rest = ".".join(parts[:depth]), len(parts) - depth
    # A key below a leaf (actor.clip_ratio.low) is wrong as a whole: the leaf itself exists.
    if wrong in leaves():
        wrong, rest = key, 0
    shown = ".".join(spelled.split(".")[: -rest or None])
    groups = [*sections(), *alias_sections(), *free_dicts()]
    misnomers = {name: key for name, key in MISNOMERS.items() if key in leaves()}
    found = nearest(wrong, groups if rest else [*leaves(), *sections(), *misnomers, *exact_names()], _CUTOFF)
    if rest and (whole := canonical(".".join([found or "", *parts[depth:]]))) in leaves() | sections():
        found = whole
    if found is None:
        return shown, "remove it, or look for its name: verl config explain lists the sections and their keys"
    foreign = " (which has no meaning here)" if found in exact_names() else ""
    return shown, f"did you mean {MISNOMERS.get(found, found)}?{foreign}"
