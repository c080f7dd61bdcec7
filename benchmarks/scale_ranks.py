"""What `make scale` runs in ranks: processor time, frames, connections, files and memory of each.

``python -m benchmarks.scale_ranks ORDER``: the order is JSON, and so is what is printed at the end.
With a number of ranks it has all of them in this one process; else the environment says which rank
of which group this process is, and rank 0 prints.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import aiodist
from aiodist.launching import spawn
from aiodist.transports.base import Link
from aiodist.transports.framed import FramedLink
from aiodist.transports.inproc import InprocLink
from aiodist.transports.stream import StreamLink
from benchmarks.small import KINDS, Start, slot

OPS: dict[str, Start] = {"all_reduce": lambda g, x: g.all_reduce(x)} | {
    name: KINDS[name]
    for name in ("broadcast", "all_gather", "reduce", "barrier", "reduce_scatter", "gather",
                 "scatter", "all_to_all")
}  # fmt: skip
"""By name. `x` is what a rank gives, and of reduce_scatter, scatter and all_to_all one slot."""

ROUNDS = 3
"""The least time of so many rounds counts: others use the machine as well."""
WARM = 3
"""Calls in which connections are made, and what is fast is prepared."""
OP_TIMEOUT = 300.0
DOORS = [
    (InprocLink, "send"),
    (FramedLink, "send"),
    (FramedLink, "post"),
    (StreamLink, "send_copy"),
]
"""The calls by which frames get into a link."""


class Order(TypedDict):
    """`cases`: operations, with bytes. `size`: how many ranks this process has, None for one of its
    own. `transports`: those between ranks of one process."""

    cases: list[tuple[str, int]]
    size: int | None
    transports: str


class Found(TypedDict):
    """What one process has found. `seconds`: processor time of a rank for one call, by case.
    `sent`: by case, the frames of one call: from, to, how many. `files`, `memory`: by how many open
    files, and how many bytes, the process has grown since before it joined, a rank."""

    seconds: list[float]
    sent: list[list[tuple[int, int, int]]]
    files: float
    memory: float


@contextmanager
def frames() -> Iterator[Counter[Link]]:
    """Counts the frames that get into each link of this process."""
    sent: Counter[Link] = Counter()

    def counting(call: Callable[..., bool | None]) -> Callable[..., bool | None]:
        def counted(link: Link, *args: Any, **options: Any) -> bool | None:
            answer = call(link, *args, **options)
            sent[link] += answer is not False  # as `post` says where it has sent nothing
            return answer

        return counted

    before = [(cls, name, getattr(cls, name)) for cls, name in DOORS]
    try:
        for cls, name, call in before:
            setattr(cls, name, counting(call))
        yield sent
    finally:
        for cls, name, call in before:
            setattr(cls, name, call)


def use() -> tuple[int, int]:
    """Open files, and bytes that are this process' own: of what it shares with others, its share.
    What is mapped from files (programs, libraries) does not count."""
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = {line.partition(":")[0]: line.split()[1] for line in rollup[1:]}
    files = len(os.listdir("/proc/self/fd"))
    return files, 1024 * (int(sizes["Pss_Anon"]) + int(sizes["Pss_Shmem"]))


async def measure(
    groups: Sequence[aiodist.Group], cases: Sequence[tuple[str, int]], before: tuple[int, int]
) -> Found:
    """All cases, by the ranks of this process."""
    seconds, sent = [], []
    for op, nbytes in cases:
        # An array of each rank, as in a program: nobody else has it in its cache.
        arrays = [slot(nbytes, group.size) for group in groups]
        seconds.append(await _time(groups, arrays, OPS[op]))
        # Where ranks share memory, those that sleep just then are woken by frames, and others not:
        # so it is the call with the fewest.
        sent.append(min([await _sent(groups, arrays, OPS[op]) for _ in range(2)], key=_total))
    files, memory = (b - a for a, b in zip(before, use(), strict=True))
    return Found(seconds=seconds, sent=sent, files=files / len(groups), memory=memory / len(groups))


async def _time(groups: Sequence[aiodist.Group], arrays: Sequence[Any], start: Start) -> float:
    """Seconds of processor time that one call takes a rank."""
    size = groups[0].size
    calls = max(1, 64 // size)
    best = math.inf
    for _ in range(WARM):
        await _once(groups, arrays, start)
    for _ in range(ROUNDS):
        begun = time.process_time()
        for _ in range(calls):
            await _once(groups, arrays, start)
        best = min(best, (time.process_time() - begun) / calls / len(groups))
    return best


async def _sent(
    groups: Sequence[aiodist.Group], arrays: Sequence[Any], start: Start
) -> list[tuple[int, int, int]]:
    """The frames of one call: from, to, how many."""
    with frames() as counted:
        await _once(groups, arrays, start)
    return [
        (group.rank, peer, counted[link])
        for group in groups
        for peer in range(group.size)
        if (link := group._context.link(peer)) is not None and link in counted
    ]


def _total(sent: Sequence[tuple[int, int, int]]) -> int:
    return sum(count for _, _, count in sent)


async def _once(groups: Sequence[aiodist.Group], arrays: Sequence[Any], start: Start) -> None:
    await asyncio.gather(*[start(*pair) for pair in zip(groups, arrays, strict=True)])


async def all_here(order: Order) -> list[Found] | None:
    """All ranks, in this process."""
    assert order["size"] is not None
    before = use()
    async with aiodist.local(
        order["size"], transports=order["transports"], op_timeout=OP_TIMEOUT, timeout=OP_TIMEOUT
    ) as groups:
        return [await measure(groups, order["cases"], before)]


async def one_here(order: Order) -> list[Found] | None:
    """One rank: what all have found, at rank 0."""
    before = use()
    async with aiodist.connect(op_timeout=OP_TIMEOUT, timeout=OP_TIMEOUT) as group:
        found: list[Any] | None = await group.gather(
            dict(await measure([group], order["cases"], before))
        )
        return found


def main(text: str) -> None:
    order: Order = json.loads(text)
    with asyncio.Runner(loop_factory=spawn.new_event_loop) as runner:
        found = runner.run(one_here(order) if order["size"] is None else all_here(order))
    if found is not None:
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
