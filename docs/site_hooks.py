"""Hooks of mkdocs.yml: files outside docs/ that pages link to are part of the site, README.md as its front page."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
}
SOURCES = {page: name for name, page in PAGES.items()}


def on_files(files: Any, config: Any) -> Any:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    for path in sorted((ROOT / "examples").rglob("*.*")):
        if path.suffix in {".yaml", ".jsonl", ".py"}:
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links are written for the repository; here they lead to the same file's place in the site."""
    here = page.file.src_uri
    source = ROOT / SOURCES.get(here, f"docs/{here}")

    def moved(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        if target.startswith("#") or re.match(r"\w+:", target):
            return link[0]
        name, hash_mark, anchor = target.partition("#")
        path = (source.parent / name).resolve()
        if path.is_dir():  # the site has no pages for folders
            return text
        place = path.relative_to(ROOT).as_posix()
        place = PAGES.get(place, place.removeprefix("docs/"))
        return f"[{text}]({os.path.relpath(place, Path(here).parent)}{hash_mark}{anchor})"

    return re.sub(r"\[((?:[^\[\]]|`[^`]*`)*)\]\(([^)\s]+)\)", moved, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name objects as Sphinx does; of ``:class:`X` `` the name is left."""
    return re.sub(r":(?:class|func|meth|mod):(?=<code>)", "", html)
