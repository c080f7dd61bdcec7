"""Services go on for months: an epoch that has ended keeps no file, no memory, no groups."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist.buffers.segment import unsupported_reason

SHM = {"transports": ("shm",), "op_timeout": 30.0}

pytestmark = pytest.mark.skipif(unsupported_reason() is not None, reason="needs shared memory")


def held() -> tuple[int, int]:
    """How many files are open, and how often shared memory is mapped."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return len(os.listdir("/proc/self/fd")), maps.count("/memfd:aiodist")


async def next_epoch(groups: list[aiodist.Group]) -> list[aiodist.Group]:
    return list(await asyncio.gather(*[group.rendezvous(min_size=3) for group in groups]))


async def test_an_epoch_that_ends_while_its_lane_is_set_up_leaves_nothing() -> None:
    """Wherever the set-up is: it takes some thirty turns of the loop."""
    async with aiodist.local(3, **SHM) as groups:
        await asyncio.gather(*[group.barrier(tag="links") for group in groups])
        groups = await next_epoch(list(groups))
        gc.collect()
        before = held()
        ended: list[weakref.ref[Any]] = []
        for turns in range(40):
            works = [group.barrier() for group in groups]
            for _ in range(turns):
                await asyncio.sleep(0)
            ended += [weakref.ref(part) for group in groups for part in (group, group._context)]
            groups = await next_epoch(groups)
            await asyncio.gather(*works, return_exceptions=True)
            del works
        gc.collect()
        assert not [part for part in ended if part() is not None]
        assert held() == before


CALLS: dict[str, Callable[[aiodist.Group, Any, Any], Any]] = {
    "all_reduce": lambda group, x, tag: group.all_reduce(x.copy(), tag=tag),
    "all_reduce to another": lambda group, x, tag: group.all_reduce(x, out=x.copy(), tag=tag),
    "all_reduce of a number": lambda group, x, tag: group.all_reduce(x.size, tag=tag),
    "reduce": lambda group, x, tag: group.reduce(x.copy(), 0, tag=tag),
    "reduce_scatter": lambda group, x, tag: group.reduce_scatter([x, x], tag=tag),
    "broadcast": lambda group, x, tag: group.broadcast(x if group.rank == 0 else None, 0, tag=tag),
    "broadcast of a tree": lambda group, x, tag: group.broadcast({"x": [x, 1]}, 0, tag=tag),
    "broadcast in place": lambda group, x, tag: group.broadcast(x, 0, tag=tag),
    "all_gather": lambda group, x, tag: group.all_gather(x, tag=tag),
    "all_to_all": lambda group, x, tag: group.all_to_all([x, x], tag=tag),
    "barrier": lambda group, x, tag: group.barrier(tag=tag),
}


@pytest.mark.parametrize("tag", [None, "a"])
@pytest.mark.parametrize("length", [4, 100_000, 500_000])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.sample(25)
async def test_a_group_that_ends_unmaps_its_memory_without_the_collector(
    call: Callable[[aiodist.Group, Any, Any], Any], length: int, tag: str | None
) -> None:
    """Programs may turn it off, and what is mapped is memory of all ranks."""

    async def use() -> None:
        async with aiodist.local(2, **SHM) as groups:
            while any(group._context.post_express is None for group in groups):
                await asyncio.gather(*[group.barrier() for group in groups])
            for _ in range(6):
                await asyncio.gather(*[call(group, np.ones(length), tag) for group in groups])

    gc.collect()
    before = held()
    gc.disable()
    try:
        await use()
        for _ in range(3):  # the loop lets go of what it has called last
            await asyncio.sleep(0)
        assert held() == before
    finally:
        gc.enable()


class Large:
    """What a caller has in hand."""


async def test_an_ended_group_keeps_nothing_of_those_who_call_it() -> None:
    """An error keeps the frames that it was raised through: it must not be the group's own."""
    async with aiodist.local(1) as (group,):
        pending = group.recv()
        with pytest.warns(RuntimeWarning, match="recv is pending while the group closes"):
            await group.close()
        kept: list[weakref.ref[Large]] = []

        async def awaits(work: aiodist.Work[Any]) -> None:
            large = Large()
            kept.append(weakref.ref(large))
            await work

        def calls() -> None:
            large = Large()
            kept.append(weakref.ref(large))
            group.barrier()

        with pytest.raises(aiodist.GroupClosedError):
            await awaits(pending)
        for _ in range(3):
            with pytest.raises(aiodist.GroupClosedError):
                calls()
        with pytest.raises(aiodist.GroupClosedError):
            await group.agree()
        ended = group._context.ended
        assert ended is not None
        assert ended.__traceback__ is None
        del pending
        gc.collect()
        assert not [large for large in kept if large() is not None]


async def test_leaving_reaches_the_newest_group_from_the_first() -> None:
    async with aiodist.local(2, transports=("shm",)) as groups:
        first = groups[0]
        latest = list(groups)
        for _ in range(3):
            latest = list(await asyncio.gather(*[group.shrink() for group in latest]))
        assert first._newest() is latest[0]
    assert all(group.closed for group in latest)
