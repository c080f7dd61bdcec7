"""The parts of pages that are made of the code: each stands between two marks in its page, but for
pictures, which are files.

`check.py` compares them with what the code gives now, and `check.py --write` writes them anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import choices
import diagrams
import file_map
import message_table
import rooms
import sequences

Render = Callable[[Path], Iterator[str]]

PARTS: Mapping[tuple[str, str], Render] = {
    ("docs/architecture.md", "rooms"): rooms.render,
    ("docs/architecture.md", "messages"): message_table.render,
    ("docs/algorithms.md", "choices"): choices.render,
    ("docs/files.md", "map"): file_map.render,
}
"""By page and name of the part: what gives its text."""


def check(root: Path, *, write: bool) -> list[str]:
    """Compare the parts with the code, or bring them up to date: what is wrong with them."""
    problems = [*file_map.problems(root), *message_table.problems(root)]
    for (name, part), render in PARTS.items():
        page = root / name
        old = page.read_text()
        new = replaced(old, part, "".join(render(root)))
        if write:
            page.write_text(new)
        elif new != old:
            problems.append(f"{name}: the part {part!r} is old: docs/check.py --write")
    for picture, drawn in [*diagrams.files(root), *sequences.files(root)]:
        if write:
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_text(drawn)
        elif not picture.exists() or picture.read_text() != drawn:
            problems.append(f"{picture.relative_to(root)} is old: docs/check.py --write")
    return problems


def replaced(text: str, part: str, new: str) -> str:
    """The text of a page, with `new` between the marks of a part."""
    start, end = f"<!-- {part}: written by docs/check.py --write -->", f"<!-- end of {part} -->"
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    text, count = pattern.subn(lambda _: f"{start}\n\n{new}\n{end}", text)
    if count != 1:
        raise ValueError(f"a page has the part {part!r} once, between {start} and {end}")
    return text
