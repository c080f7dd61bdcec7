"""What a rank counts, and measures."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from idle_time import idle_time

import aiodist
from aiodist.rank.counting import Counting
from aiodist.wire.counts import SECONDS, Times


def times(counting: Counting) -> dict[tuple[str, int], Times]:
    return {(one.op, one.size): one for one in counting.now().times}


async def test_operations_by_name_and_size() -> None:
    async with aiodist.local(2) as groups:
        counting = Counting(groups[0]._actor)
        await asyncio.gather(*(group.barrier() for group in groups))
        counting.measure()
        counting.measure()  # once
        for size in (1, 128, 129, 8192, 8193):  # of 8 bytes
            await asyncio.gather(*(group.all_reduce(np.ones(size)) for group in groups))
        await asyncio.gather(groups[0].send(np.ones(1), 1), groups[1].recv())
        # Of groups that were there before, and of those that are made now.
        others = await asyncio.gather(*(group.dup() for group in groups))
        await asyncio.gather(*(group.barrier() for group in others))
        found = times(counting)
    assert {key: sum(one.counts) for key, one in found.items()} == {
        ("all_reduce", 0): 2, ("all_reduce", 1): 2, ("all_reduce", 2): 1,
        ("send", 0): 1, ("barrier", 0): 1, ("dup", 0): 1,
    }  # fmt: skip
    for one in found.values():
        assert len(one.counts) == len(SECONDS) + 1
        assert one.seconds > 0


@idle_time
@pytest.mark.parametrize("op", ["broadcast", "scatter"])
async def test_who_only_receives_has_no_bytes(op: str) -> None:
    """Neither in an ordinary call nor in prepared ones."""
    async with aiodist.local(2) as groups:
        counting = Counting(groups[1]._actor)
        counting.measure()
        for _ in range(4):
            given = [np.ones(1000)] * 2 if op == "scatter" else np.ones(1000)
            works = [getattr(groups[0], op)(given), getattr(groups[1], op)(None)]
            await asyncio.gather(*works)
            assert [work.nbytes > 0 for work in works] == [True, False]
        assert [key for key in times(counting) if key[0] == op] == [(op, 0)]


async def test_how_long_one_took_that_had_to_wait() -> None:
    async with aiodist.local(2) as groups:
        counting = Counting(groups[0]._actor)
        counting.measure()
        work = groups[0].barrier()
        work._started -= 3.0
        await asyncio.gather(work, groups[1].barrier())
        (one,) = counting.now().times
    assert one.counts[10] == 1  # from 2.6 to 10.5 s
    assert one.seconds == pytest.approx(3.0, abs=1.0)


async def test_failures_by_their_kind() -> None:
    async with aiodist.local(2) as groups:
        counting = Counting(groups[0]._actor)
        with pytest.raises(aiodist.CollectiveTimeoutError):
            await groups[0].barrier(timeout=0.01)
        with pytest.raises(aiodist.CollectiveTimeoutError):
            await groups[1].barrier()
        groups[0].barrier().cancel()
        with pytest.raises(aiodist.CollectiveAbortedError):
            await groups[1].barrier()
        for x in (1, 2):
            results = await asyncio.gather(
                groups[0].all_reduce(np.ones(1)),
                groups[1].all_reduce(np.ones(1 + x)),
                return_exceptions=True,
            )
            assert all(isinstance(one, aiodist.MismatchError) for one in results)
        groups[1].abort("enough")
        with pytest.raises(aiodist.PeerLostError):
            await groups[0].barrier()
        counting.measure()
        assert counting.now().failures == (1, 1, 0, 2)
        assert counting.now().times == ()  # of those that were done


async def test_bytes_by_transport() -> None:
    async with aiodist.local(2) as groups:
        await asyncio.gather(*(group.all_reduce(np.ones(4)) for group in groups))
        moved = {one.transport: one for one in Counting(groups[0]._actor).now().payload}
        assert moved["inproc"].sent == moved["inproc"].received >= 32
        endpoint = groups[0]._actor.endpoint
        before = endpoint.traffic.payload
        assert before == (moved["inproc"].sent, moved["inproc"].received)
