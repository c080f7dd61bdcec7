"""The pictures of README.md, the parts of a group, and of docs/concepts.md: what each rank has
before an operation, and after it.

What stands behind the arrow is what the operation gave: it is run here, by three ranks. So a
picture cannot say what is not so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

import aiodist
from aiodist import Group

RANKS = 3
LETTERS = "ABC"
CELL, GAP, ROW = 38, 6, 52
COLORS = ("#c5cae9", "#b2dfdb", "#ffe0b2", "#eceff1")
"""Of what comes from rank 0, 1, 2, and from several."""

Operation = Callable[[Group, Any], Awaitable[Any]]


async def _sent(group: Group, x: Any) -> Any:
    """From rank 0 to rank 2."""
    if group.rank == 0:
        await group.send(x, 2)
    return await group.recv(src=0) if group.rank == 2 else x


PICTURES: dict[str, tuple[list[Any], Operation]] = {
    "broadcast": (["A", None, None], lambda group, x: group.broadcast(x)),
    "scatter": ([["A", "B", "C"], None, None], lambda group, x: group.scatter(x)),
    "gather": (["A", "B", "C"], lambda group, x: group.gather(x)),
    "all_gather": (["A", "B", "C"], lambda group, x: group.all_gather(x)),
    "all_to_all": (
        [[f"{letter}{n}" for n in range(RANKS)] for letter in LETTERS],
        lambda group, x: group.all_to_all(x),
    ),
    "reduce": ([1, 2, 3], lambda group, x: group.reduce(x)),
    "all_reduce": ([1, 2, 3], lambda group, x: group.all_reduce(x)),
    "reduce_scatter": (
        [[1, 2, 3], [10, 20, 30], [100, 200, 300]],
        lambda group, x: group.reduce_scatter(x),
    ),
    "scan": ([1, 2, 3], lambda group, x: group.scan(x)),
    "exscan": ([1, 2, 3], lambda group, x: group.exscan(x)),
    "send": (["A", None, None], _sent),
}
"""By name: what each rank gives, and what it calls."""


def files(root: Path) -> Iterator[tuple[Path, str]]:
    """Each picture, and where it is kept."""
    for name, (before, after) in asyncio.run(_results()).items():
        yield root / "docs" / "images" / "operations" / f"{name}.svg", _drawn(name, before, after)
    yield root / "docs" / "images" / "overview.svg", _overview()


async def _results() -> dict[str, tuple[list[Any], list[Any]]]:
    results = {}
    async with aiodist.local(RANKS) as groups:
        for name, (before, operation) in PICTURES.items():
            calls = (operation(group, x) for group, x in zip(groups, before, strict=True))
            results[name] = before, list(await asyncio.gather(*calls))
    return results


def _drawn(name: str, before: list[Any], after: list[Any]) -> str:
    left = 62
    middle = left + RANKS * (CELL + GAP) + 12
    right = middle + 118
    width, height = right + RANKS * (CELL + GAP) + 8, RANKS * ROW + 12
    origin = {}  # which rank a value comes from
    for rank, given in enumerate(before):
        origin |= dict.fromkeys(_cells(given), rank)
    parts = [f'<rect width="{width}" height="{height}" rx="8" fill="#fff" stroke="#cfd8dc"/>']
    for rank in range(RANKS):
        top = rank * ROW + 13
        parts.append(_text(8, top + 24, f"rank {rank}", "start"))
        parts += _row(left, top, before[rank], origin)
        parts += _row(right, top, after[rank], origin)
    center = height / 2
    parts.append(_text(middle + 50, center - 10, name))
    parts.append(
        f'<path d="M{middle} {center} h96 m-8 -6 l8 6 l-8 6" fill="none" stroke="#37474f"/>'
    )
    return _svg(width, height, parts)


def _overview() -> str:
    """Four ranks on two hosts, the links between them, and the coordinator."""
    width, height, side = 640, 290, 110
    parts = [f'<rect width="{width}" height="{height}" rx="8" fill="#fff" stroke="#cfd8dc"/>']
    places = []
    for host in range(2):
        left = 20 + host * 330
        parts.append(
            f'<rect x="{left}" y="112" width="270" height="164" rx="8" fill="none"'
            ' stroke="#90a4ae" stroke-dasharray="5 4"/>'
        )
        parts.append(_text(left + 12, 266, f"host {host}", "start"))
        places += [(left + 14, 2 * host), (left + 146, 2 * host + 1)]
    for left, _ in places:
        x = left + side / 2
        parts.append(f'<path d="M{x} 132 L{x + (320 - x) / 4} 66" stroke="#90a4ae"/>')
    parts.append('<rect x="110" y="14" width="420" height="52" rx="6" fill="#eceff1"/>')
    parts.append(_text(320, 36, "coordinator"))
    parts.append(_text(320, 55, "knows the members; no tensor passes through it"))
    links = (
        (144, 166, 195, "shared memory", 155),
        (474, 496, 195, "shared memory", 485),
        (276, 364, 195, "TCP", 320),
    )
    for start, end, y, words, middle in links:
        arrow = f"M{start} {y} h{end - start} m-5 -4 l5 4 l-5 4 M{start + 5} {y - 4} l-5 4 l5 4"
        parts.append(f'<path d="{arrow}" fill="none" stroke="#37474f"/>')
        parts.append(_text(middle, y + (52 if words == "shared memory" else -8), words))
    for left, rank in places:
        parts.append(
            f'<rect x="{left}" y="132" width="{side}" height="96" rx="6"'
            f' fill="{(*COLORS[:3], "#f8bbd0")[rank]}"/>'
        )
        for y, words in ((158, f"rank {rank}"), (182, "event loop"), (204, "your program")):
            parts.append(_text(left + side / 2, y, words))
    return _svg(width, height, parts)


def _svg(width: float, height: float, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    size = f'width="{width}" height="{height}" role="img" '
    style = 'font-family="sans-serif" font-size="14" fill="#212121">'
    return "\n".join([head + size + style, *parts, "</svg>", ""])


def _row(left: int, top: int, value: Any, origin: dict[Any, int]) -> Iterator[str]:
    for index, cell in enumerate(_cells(value)):
        x = left + index * (CELL + GAP)
        color = COLORS[origin.get(cell, RANKS)]
        yield f'<rect x="{x}" y="{top}" width="{CELL}" height="{CELL}" rx="4" fill="{color}"/>'
        yield _text(x + CELL / 2, top + 24, str(cell))


def _cells(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
