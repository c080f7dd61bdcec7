"""The map of files in files.md: each module under its folder, with its docstring's start."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

CLIENTS = tuple(f"aiodist_{name}" for name in ("cli", "dask", "ray", "torch", "verl", "vllm"))
SOURCES = ("aiodist", "server/aiodist_server", *(f"clients/{name}" for name in CLIENTS))


CLAUSE = re.compile(
    r"(?<=[\w`)])(?:[:;] |, (?=(?:which|because|so|if|in|with|without|for|after|as|when|from)\b))"
)
"""Between the first clause of a sentence, which can stand alone, and the rest."""

LONG = 10
"""Words of a sentence whose first clause is enough for the map."""


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
            yield f"{gist(about)}\n\n"
        yield "| file | what it is |\n| --- | --- |\n"
        for path in sorted(folder.glob("*.py")):
            if path != about:
                yield f"| `{path.name}` | {gist(path)} |\n"


def gist(path: Path) -> str:
    """The start of a module's docstring: its first sentence, or the first clause of a long one."""
    sentence = re.split(r"(?<=[.!?]) ", summary(path))[0]
    end = CLAUSE.search(sentence)
    head = sentence[: end.start()] if end else sentence
    is_enough = len(sentence.split()) > LONG and len(head.split()) > 3
    return f"{head}." if end and is_enough and head.count("(") == head.count(")") else sentence


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = docstring.split("\n\n")[0].removesuffix("::")
    return re.sub(r"\s+", " ", first).replace("|", "\\|")
