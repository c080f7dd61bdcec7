"""Services go on for months: an epoch that has ended keeps no file, no memory, no groups."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest

import aiodist
from aiodist.buffers.segment import supported

SHM = {"transports": ("shm",), "op_timeout": 30.0}

pytestmark = pytest.mark.skipif(not supported(), reason="needs shared memory")


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


class Large:
    """What a caller has in hand."""


async def test_an_ended_group_keeps_nothing_of_those_who_call_it() -> None:
    """An error keeps the frames that it was raised through: it must not be the group's own."""
    async with aiodist.local(1) as (group,):
        pending = group.recv()
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
