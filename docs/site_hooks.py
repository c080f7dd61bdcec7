"""What `make site` does to the pages on their way to HTML: hooks of mkdocs.

A page is written to be read where it is, also without the site: it links to files of the
repository, and says behind the language of a code block how `make docs` runs it. For the site,
those files become pages of their own, in ``source/``, and only the language is left of a block's
first line. The first page of the site is README.md, so that there is one text for both.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FRONT = ROOT / "README.md"

FENCE = re.compile(r"^(```\w+)[^\n`]*$", re.MULTILINE)
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
OUTSIDE = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//')
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash"}


def on_files(files: Files, *, config: Any) -> Files:
    """Add the first page, and a page for each file of the repository that a page links to, and for
    what these link to."""
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    waiting.append(FRONT)
    files.append(File.generated(config, _page_of(FRONT), content=_text(FRONT)))
    seen = {FRONT}
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            if target not in seen and not target.is_relative_to(DOCS):
                seen.add(target)
                waiting.append(target)
                text = _text(target)
                files.append(File.generated(config, _page_of(target), content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The links of a page lead to pages of the site."""
    here = page.file.src_uri
    if page.file.generated_by is None:
        markdown = _linked(markdown, DOCS / here, here)
    return FENCE.sub(r"\1", markdown)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Nothing of a page is loaded from elsewhere: it is read where there is no network, too."""
    found = OUTSIDE.search(output)
    if found is not None:
        raise PluginError(f"{page.file.src_uri} loads from elsewhere: {found[0]}")
    return output


def _targets(page: Path) -> Iterator[Path]:
    """The files of the repository that a page, or a folder, leads to."""
    if page.is_dir():
        yield from _entries(page)
    elif page.suffix == ".md":
        for link in LINK.findall(BLOCK.sub("", page.read_text())):
            target = (page.parent / link).resolve()
            if "://" not in link and target.exists() and target.is_relative_to(ROOT):
                yield target


def _entries(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if not path.name.startswith(("_", "."))]


def _page_of(target: Path) -> str:
    """Where the page about a file of the repository is in the site."""
    if target == FRONT:
        return "index.md"
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    name = target.relative_to(ROOT).as_posix()
    return f"source/{name}" if target.suffix == ".md" else f"source/{name}.md"


def _text(target: Path) -> str:
    """A file of the repository as a page."""
    here, name = _page_of(target), target.relative_to(ROOT).as_posix()
    if target.suffix == ".md":
        return _linked(target.read_text(), target, here)
    if target.is_dir():
        links = [f"- [{path.name}]({_way(here, _page_of(path))})\n" for path in _entries(target)]
        return f"# `{name}`\n\n{''.join(links)}"
    if target.suffix == ".ipynb":
        return "".join(_cells(json.loads(target.read_text())))
    language = LANGUAGES.get(target.suffix, "text")
    return f"# `{name}`\n\n````{language}\n{target.read_text()}\n````\n"


def _cells(notebook: Any) -> Iterator[str]:
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        yield f"{text}\n\n" if cell["cell_type"] == "markdown" else f"```python\n{text}\n```\n\n"
        for output in cell.get("outputs", []):
            yield f"```text\n{''.join(output.get('text', []))}```\n\n"


def _linked(markdown: str, file: Path, here: str) -> str:
    """The text of `file`, which is the page `here`, with links to the pages of what it links to."""

    def lead(match: re.Match[str]) -> str:
        link = match[1]
        target = (file.parent / link).resolve()
        if "://" in link or not target.exists():
            return link
        return _way(here, _page_of(target))

    # What stands in code is no link.
    parts, last = [], 0
    for block in BLOCK.finditer(markdown):
        parts += [LINK.sub(lead, markdown[last : block.start()]), block[0]]
        last = block.end()
    return "".join([*parts, LINK.sub(lead, markdown[last:])])


def _way(here: str, there: str) -> str:
    return posixpath.relpath(there, posixpath.dirname(here) or ".")
