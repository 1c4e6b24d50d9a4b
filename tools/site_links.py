"""A hook of MkDocs that adds repository files to the site if pages link to them.

In the repository, a link such as `../../llmtrain/train/loop.py` leads to the file. The site is built from `docs/`
alone, so each linked file outside of it is added under `source/`: Markdown as a page, pictures unchanged, other text as
a listing. Links to folders become plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
UNCHANGED = {".md", ".svg", ".png"}
LANGUAGES = {".py": "python", ".json": "json", ".sh": "sh", ".sbatch": "sh", ".toml": "toml", "": "sh"}


def on_files(files: Files, config: Any) -> Files:
    """Adds the files outside `docs/` that pages link to, and the files that these link to in turn."""
    waiting = [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        for match in LINK.finditer(page.read_text(encoding="utf-8")):
            target = (page.parent / match[3]).resolve()
            name = _name(target)
            if not target.is_file() or files.get_file_from_path(name):
                continue
            own = {"abs_src_path": str(target)} if target.suffix in UNCHANGED else {"content": _listing(target)}
            files.append(File.generated(config, name, **own))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points links to the pages that `on_files` added."""
    if not page.file.abs_src_path:  # a listing has no links
        return markdown

    real = Path(page.file.abs_src_path)

    def found(match: re.Match[str]) -> str:
        target = (real.parent / match[3]).resolve()
        if target.is_dir():
            return match[2]
        if not target.is_file():
            return match[0]  # MkDocs reports the broken link
        link = os.path.relpath(_name(target), Path(page.file.src_uri).parent)
        return f"{match[1]}[{match[2]}]({link}{match[4] or ''})"

    return LINK.sub(found, markdown)


def _name(file: Path) -> str:
    """Returns the path of a repository file in the site."""
    path = file.relative_to(ROOT)
    if path.parts[:1] == ("docs",):
        return Path(*path.parts[1:]).as_posix()
    return f"source/{path.as_posix()}" + ("" if file.suffix in UNCHANGED else ".md")


def _listing(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    language = LANGUAGES.get(file.suffix, "text")
    head = "---\nsearch: {exclude: true}\n---\n"
    return f"{head}# `{file.relative_to(ROOT).as_posix()}`\n\n~~~~{language}\n{text}\n~~~~\n"
