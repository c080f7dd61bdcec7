"""The map of files in files.md: each module under its folder, with its docstring's start."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

CLIENTS = tuple(f"aiodist_{name}" for name in ("cli", "dask", "ray", "torch", "verl", "vllm"))
SOURCES = ("aiodist", "server/aiodist_server", *(f"clients/{name}" for name in CLIENTS))


def problems(root: Path) -> list[str]:
    """The modules that do not say what they are for."""
    return [
        f"{path.relative_to(root)}: a module starts with a docstring that says what it is for"
        for folder in SOURCES
        for path in (root / folder).rglob("*.py")
        if not summary(path)
    ]


def render(root: Path) -> Iterator[str]:
    """A table for each folder, in the order of the tree."""
    folders = [
        folder
        for source in SOURCES
        for folder in sorted({path.parent for path in (root / source).rglob("*.py")})
    ]
    for number, folder in enumerate(folders):
        yield f"{'' if number == 0 else chr(10)}## `{folder.relative_to(root)}/`\n\n"
        about = folder / "__init__.py"
        if about.exists():
            yield f"{summary(about)}\n\n"
        yield "| file | what it is |\n| --- | --- |\n"
        for path in sorted(folder.glob("*.py")):
            if path != about:
                yield f"| `{path.name}` | {gist(path)} |\n"


def gist(path: Path) -> str:
    """The first sentence of a module's docstring, up to a colon if that is enough."""
    sentence = re.split(r"(?<=[.!?]) ", summary(path))[0]
    head, colon, _ = sentence.partition(": ")
    return f"{head}." if colon and len(head.split()) > 3 else sentence


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = docstring.split("\n\n")[0].removesuffix("::")
    return re.sub(r"\s+", " ", first).replace("|", "\\|")
