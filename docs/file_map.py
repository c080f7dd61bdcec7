"""The map of files in architecture.md: each module under its folder, with its docstring's start."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCES = ("aiodist", "server/aiodist_server", "clients/aiodist_cli")
START, END = "<!-- map: written by docs/check.py --write -->", "<!-- end of map -->"


def check(root: Path, *, write: bool) -> list[str]:
    """Compare the map with the files, or bring it up to date: what is wrong with it."""
    page = root / "docs" / "architecture.md"
    text = page.read_text()
    before, rest = text.split(START)
    _, after = rest.split(END)
    new = f"{before}{START}\n\n{''.join(render(root))}{END}{after}"
    problems = [
        f"{path.relative_to(root)}: a module starts with a docstring that says what it is for"
        for folder in SOURCES
        for path in (root / folder).rglob("*.py")
        if not summary(path)
    ]
    if write:
        page.write_text(new)
    elif new != text:
        problems.append("docs/architecture.md: the map of files is old: docs/check.py --write")
    return problems


def render(root: Path) -> Iterator[str]:
    """A table for each folder, in the order of the tree."""
    for source in SOURCES:
        folders = {path.parent for path in (root / source).rglob("*.py")}
        for folder in sorted(folders):
            yield f"### `{folder.relative_to(root)}/`\n\n"
            about = folder / "__init__.py"
            if about.exists():
                yield f"{summary(about)}\n\n"
            yield "| file | what it is |\n| --- | --- |\n"
            for path in sorted(folder.glob("*.py")):
                if path != about:
                    yield f"| `{path.name}` | {summary(path)} |\n"
            yield "\n"


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = docstring.split("\n\n")[0].removesuffix("::")
    return re.sub(r"\s+", " ", first).replace("|", "\\|")
