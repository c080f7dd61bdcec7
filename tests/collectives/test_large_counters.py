"""Groups that have lived long: their counters have grown beyond 32 bits, and nothing changes."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest

import aiodist

pytestmark = pytest.mark.strength(2)

BITS = pytest.mark.parametrize("bits", [31, 32, 53])
BEFORE = 6
"""So many calls before the counter has one more bit."""


@pytest.fixture
def groups(request):
    """Three ranks over a transport. Those that can share memory have not begun to."""
    name = request.param
    if name == "hosts":
        return request.getfixturevalue("on_hosts")("aab", wait=False)
    return aiodist.local(3, op_timeout=30.0, transports=(name,))


over_all = pytest.mark.parametrize("groups", ["inproc", "shm", "tcp", "hosts"], indirect=True)


def everyone(ranks, start):
    return asyncio.gather(*[start(group) for group in ranks])


@over_all
@BITS
@pytest.mark.parametrize("tag", [None, "some"])
async def test_collectives(groups, bits, tag):
    if tag is None:
        bits = min(bits, 38)  # a stamp in shared memory has 39 bits for the number of a call
    async with groups as ranks:
        for _ in range(2):  # the second time, calls are prepared
            for group in ranks:
                numbers = group._context.calls.tags.numbers
                numbers[tag] = max((1 << bits) - BEFORE, numbers.get(tag, 0))
            for number in range(BEFORE):
                for length in (3, 50_000):
                    x = np.full(length, number)
                    for found in await everyone(ranks, lambda g, x=x: g.all_reduce(x * 1, tag=tag)):
                        assert (found == 3 * number).all()
                found = await everyone(ranks, lambda g: g.all_gather({"a": g.rank}, tag=tag))
                assert found == [[{"a": rank} for rank in range(3)]] * 3
                found = await everyone(ranks, lambda g, n=number: g.all_reduce(n, tag=tag))
                assert found == [3 * number] * 3
                await everyone(ranks, lambda g: g.barrier(tag=tag))
            if tag is not None:
                for group in ranks:
                    group._context.calls.tags.numbers[tag] = (1 << bits) - BEFORE


@over_all
@BITS
async def test_messages(groups, bits):
    async with groups as ranks:

        async def around(length):
            works = [
                group.sendrecv(np.full(length, group.rank), (group.rank + 1) % 3, tag="some")
                for group in ranks
            ]
            for rank, found in enumerate(await asyncio.gather(*works)):
                assert len(found) == length
                assert (found == (rank + 2) % 3).all()

        lengths = 3, 1_000, 8_000, 50_000
        for length in lengths:
            await around(length)
        for group in ranks:
            sides = group._context.p2p.sender, group._context.p2p.receiver
            for side in sides:
                side._number += 1 << bits
            for each in (*sides[0]._peers, *sides[1]._origins):
                each.sid += (1 << bits) - BEFORE
        for length in lengths * 4:
            await around(length)


@over_all
@BITS
async def test_windows(groups, bits):
    async with groups as ranks:
        windows = await everyone(ranks, lambda g: g.expose(np.zeros(3)))
        for window in windows:
            window._number = window._fences = (1 << bits) - BEFORE
        for number in range(2 * BEFORE):
            await windows[0].put(1, 0, float(number))
            assert await windows[2].get(1, 0) == number
            await asyncio.gather(*[window.fence() for window in windows])
        await asyncio.gather(*[window.close() for window in windows])


@BITS
async def test_requests_to_the_coordinator(bits, tmp_path):
    """It also writes the numbers of writes down, in case that they are repeated."""
    async with aiodist.Coordinator(state=tmp_path / "state") as coordinator:
        address = coordinator.address
        ranks = await asyncio.gather(
            *[aiodist.connect(address, rank=rank, size=2) for rank in range(2)]
        )
        first, _ = ranks
        requests = first._actor.control._requests
        requests._numbers = itertools.count((1 << bits) - BEFORE)
        for number in range(2 * BEFORE):
            assert await first.store.add("sum", 1) == number + 1
            assert await first.store.get("sum") == str(number + 1).encode()
        assert await everyone(ranks, lambda g: g.agree(True)) == [True, True]
        await everyone(ranks, lambda g: g.close())
