"""Pictures of what happens one after the other: actors as columns, messages as arrows.

They are made of text here, and kept as SVG on a white ground, so that they can be read on dark
pages, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

TOP, STEP, WIDTH = 62, 44, 640
INK, LINE, DEAD = "#212121", "#37474f", "#b71c1c"
BOX: Final = ("#eceff1", "#c5cae9", "#b2dfdb", "#ffe0b2")


@dataclass(frozen=True)
class Arrow:
    """A message from some columns to some others."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Note:
    """What happens in some columns at the same time. `ends`: they end there."""

    columns: tuple[int, ...]
    text: str
    ends: bool = False


@dataclass(frozen=True)
class Sequence:
    """A picture: the names of the columns, and what happens, from top to bottom."""

    columns: tuple[str, ...]
    events: tuple[Arrow | Note, ...]


PICTURES: dict[str, Sequence] = {
    "version": Sequence(
        ("trainer", "coordinator", "server, host A", "server, host B"),
        (
            Note((0,), "publish(params, version=7)"),
            Arrow((0,), (1,), "there is version 7"),
            Arrow((1,), (2, 3), "the newest is 7"),
            Arrow((0,), (2,), "chunk 1, chunk 2, …"),
            Arrow((2,), (3,), "each chunk at once"),
            Note((2, 3), "checksums are right"),
            Note((2, 3), "latest(): (7, tree)"),
            Note((0,), "publish 8, then 9"),
            Note((0,), "7 is dropped (keep=2)"),
            Note((2, 3), "memory is used again"),
        ),
    ),
    "lost_rank": Sequence(
        ("coordinator", "rank 0", "rank 1", "rank 2"),
        (
            Note((1, 2), "all_reduce(x)"),
            Note((3,), "the process dies", ends=True),
            Arrow((3,), (0,), "the connection ends, or the lease"),
            Arrow((0,), (1, 2), "rank 2 is lost"),
            Note((1, 2), "PeerLostError([2])"),
            Note((1, 2), "group.shrink()"),
            Arrow((1, 2), (0,), "both vote"),
            Arrow((0,), (1, 2), "epoch 2 has two ranks"),
            Note((1, 2), "all_reduce(x) works"),
        ),
    ),
}
"""By the name of the file."""


def files(root: Path) -> Iterator[tuple[Path, str]]:
    """Each picture, and where it is kept."""
    for name, sequence in PICTURES.items():
        yield root / "docs" / "images" / f"{name}.svg", drawn(sequence)


def drawn(sequence: Sequence) -> str:
    """The SVG of a picture."""
    count = len(sequence.columns)
    height = TOP + STEP * len(sequence.events) + 16
    x = [WIDTH * (2 * column + 1) / (2 * count) for column in range(count)]
    parts = [f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#fff" stroke="#cfd8dc"/>']
    ends = {
        column: TOP + STEP * at
        for at, event in enumerate(sequence.events)
        if isinstance(event, Note) and event.ends
        for column in event.columns
    }
    for column, name in enumerate(sequence.columns):
        parts.append(
            f'<rect x="{x[column] - 66:g}" y="12" width="132" height="30" rx="6"'
            f' fill="{BOX[column]}"/>'
        )
        parts.append(_text(x[column], 32, name, INK))
        bottom = ends.get(column, height - 14)
        parts.append(f'<path d="M{x[column]:g} 42 V{bottom}" stroke="#90a4ae"/>')
    for at, event in enumerate(sequence.events):
        y = TOP + STEP * at + 14
        if isinstance(event, Arrow):
            starts, tips = [x[one] for one in event.start], [x[one] for one in event.end]
            parts += _arrow(starts, tips, y, event.text)
        else:
            for one in event.columns:
                parts += _note(x[one], y, event)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
    size = f'width="{WIDTH}" height="{height}" role="img" '
    style = f'font-family="sans-serif" font-size="13" fill="{INK}">'
    return "\n".join([head + size + style, *parts, "</svg>", ""])


def _arrow(starts: list[float], ends: list[float], y: float, text: str) -> Iterator[str]:
    goes_right = ends[0] > starts[0]
    start, end = (min(starts), max(ends)) if goes_right else (max(starts), min(ends))
    back = -7 if goes_right else 7
    for tip in ends:
        line = f"M{tip + back:g} {y - 5:g} l{-back} 5 l{back} 5"
        yield f'<path d="{line}" fill="none" stroke="{LINE}" stroke-width="1.5"/>'
    yield f'<path d="M{start:g} {y:g} H{end:g}" stroke="{LINE}" stroke-width="1.5"/>'
    for one in starts:
        yield f'<circle cx="{one:g}" cy="{y:g}" r="3" fill="{LINE}"/>'
    yield from _label((start + end) / 2, y - 10, text, LINE)


def _note(x: float, y: float, note: Note) -> Iterator[str]:
    color = DEAD if note.ends else INK
    if note.ends:
        top = y - 14
        cross = f"M{x - 7:g} {top - 7:g} l14 14 m0 -14 l-14 14"
        yield f'<path d="{cross}" stroke="{DEAD}" stroke-width="2"/>'
    yield from _label(x, y + 4, note.text, color)


def _label(x: float, y: float, text: str, color: str) -> Iterator[str]:
    """A text on a white ground, so that no line goes through it, and within the picture."""
    width = 7.1 * len(text) + 8
    x = min(max(x, width / 2 + 4), WIDTH - width / 2 - 4)
    yield f'<rect x="{x - width / 2:g}" y="{y - 13:g}" width="{width:g}" height="18" fill="#fff"/>'
    yield _text(x, y, text, color)


def _text(x: float, y: float, text: str, color: str) -> str:
    middle = 'text-anchor="middle"'
    return f'<text x="{x:g}" y="{y:g}" {middle} fill="{color}">{escape(text)}</text>'
