"""Names of code in pages: ``aiodist/work.py: Work.fail`` in backticks is a function of that file,
and ``aiodist/work.py`` is a file or folder that exists.

A name may also be a class, or a constant of a module or class. What a class inherits stands in
another file, so it is no name of this one.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

PLACE = re.compile(r"`((?:aiodist|benchmarks|clients|docs|examples|server|tests)/[\w/.]*)`")
PAIR = re.compile(r"`([\w/.]+\.py):\s+([A-Za-z_][\w.]*)`")


def check(root: Path, page: Path) -> Iterator[str]:
    """What the text of a page names that is not there."""
    text = page.read_text()
    for place in PLACE.findall(text):
        if not (root / place).exists():
            yield f"{page.relative_to(root)}: there is no {place}"
    for match in PAIR.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        where = f"{page.relative_to(root)}:{line}"
        if not (root / match[1]).is_file():
            yield f"{where}: there is no file {match[1]}"
        elif match[2] not in names_in(root / match[1]):
            yield f"{where}: there is no {match[2]} in {match[1]}"


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """All functions, classes and constants of a module, with the classes that they are in."""
    return frozenset(_names(ast.parse(path.read_text()).body, ""))


def _names(body: Iterable[ast.stmt], before: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield before + node.name
        elif isinstance(node, ast.ClassDef):
            yield before + node.name
            yield from _names(node.body, f"{before}{node.name}.")
        elif isinstance(node, ast.Assign):
            yield from (before + one.id for one in node.targets if isinstance(one, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield before + node.target.id


STEP = re.compile(r"^(\d+)\. ", re.MULTILINE)
LIFE = re.compile(r"^#+ (The life of [^\n]+)\n(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)
MOST_STEPS = 10


def check_lives(root: Path, page: Path) -> Iterator[str]:
    """What is wrong with the sequences of a page that are called "The life of …": each has ten
    steps at most, and each step names a function."""
    for title, text in LIFE.findall(page.read_text()):
        where = f"{page.relative_to(root)}: {title}"
        starts = [match.start() for match in STEP.finditer(text)]
        if not 1 <= len(starts) <= MOST_STEPS:
            yield f"{where}: it has {len(starts)} steps, not 1 to {MOST_STEPS}"
        for number, (start, stop) in enumerate(zip(starts, [*starts[1:], None], strict=True), 1):
            if not PAIR.search(text[start:stop]):
                yield f"{where}: step {number} names no function"
