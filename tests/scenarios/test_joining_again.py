"""A coordinator that goes away while ranks wait to become a group."""

from __future__ import annotations

import asyncio

import pytest
from idle_time import on_idle_time

import aiodist


def test_a_join_goes_on_at_the_next_coordinator(run):
    async def main():
        first = aiodist.Coordinator("tcp://127.0.0.1:0")
        await first.start()
        address = first.address
        early = asyncio.ensure_future(_joined(aiodist.connect(address, rank=0, size=2)))
        # Turn by turn of the loop, until rank 0 waits there.
        for _ in iter(lambda: bool(first.status()["groups"]), True):
            await asyncio.sleep(0)
        await first.stop()
        async with aiodist.Coordinator(address):
            late = asyncio.ensure_future(_joined(aiodist.connect(address, rank=1, size=2)))
            ranks = await asyncio.gather(early, late)
            assert await asyncio.gather(*[g.all_reduce(1) for g in ranks]) == [2, 2]
            await asyncio.gather(*[g.close() for g in ranks])

    run(main())


@on_idle_time
def test_nobody_waits_longer_than_asked(run):
    async def main():
        async with aiodist.Coordinator() as coordinator:
            with pytest.raises(aiodist.JoinTimeoutError, match="1 of 2"):
                await aiodist.connect(coordinator.address, rank=0, size=2, timeout=0.1)

    run(main())


@on_idle_time
def test_all_ranks_are_told_which_rank_was_missing(run, monkeypatch):
    """Also those that would have waited for longer than the rank that serves the coordinator."""
    monkeypatch.setenv("AIODIST_ADDRESS", "inproc://missing-rank")

    async def main():
        first = aiodist.connect(rank=0, size=3, timeout=5)
        others = aiodist.connect(rank=1, size=3, timeout=50)
        for one in await asyncio.gather(_joined(first), _joined(others), return_exceptions=True):
            assert isinstance(one, aiodist.JoinTimeoutError)
            assert one.missing == (2,)
            assert "missing: rank 2" in str(one)

    run(main())


@on_idle_time
def test_a_coordinator_that_goes_at_the_last_moment(run):
    async def main():
        coordinator = aiodist.Coordinator("inproc://last-moment", returns=False)
        async with coordinator:
            late = asyncio.ensure_future(
                _joined(aiodist.connect(coordinator.address, rank=0, size=2, timeout=0.15))
            )
            for _ in iter(lambda: bool(coordinator.status()["groups"]), True):
                await asyncio.sleep(0)
        with pytest.raises(aiodist.JoinTimeoutError, match=r"after 0\.15 s: .* was shut down"):
            await late

    run(main())


async def _joined(connecting: aiodist.session.Connecting) -> aiodist.Group:
    return await connecting
