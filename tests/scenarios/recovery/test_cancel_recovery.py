"""Calls that are cancelled at every turn of the loop, and made again."""

from __future__ import annotations

import asyncio

import pytest

import aiodist

TURNS = 40
"""Most turns; a call is done long before."""


async def insist(start):
    """Call again for as long as another rank gives up."""
    while True:
        try:
            return await start()
        except aiodist.CollectiveAbortedError:
            pass


async def after_turns(turns, start):
    """Whether the call was cancelled after so many turns; and its outcome."""
    task = asyncio.ensure_future(start())
    for _ in range(turns):
        await asyncio.sleep(0)
    if task.done():
        return task
    task.cancel()
    await asyncio.wait([task])
    return task


@pytest.mark.timeout(120)
@pytest.mark.parametrize("call", ["shrink", "rendezvous"])
def test_going_on(run, stage, everyone, call):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            for turn in range(TURNS):
                others = [
                    asyncio.ensure_future(insist(getattr(group, call))) for group in ranks[1:]
                ]
                task = await after_turns(turn, getattr(ranks[0], call))
                if task.cancelled() or task.exception() is not None:
                    first = await insist(getattr(ranks[0], call))
                else:
                    first = task.result()
                ranks = [first, *await asyncio.gather(*others)]
                assert len({group.epoch for group in ranks}) == 1
                assert await everyone(ranks, lambda group: group.all_reduce(1)) == [3] * 3

    run(main())


@pytest.mark.timeout(120)
def test_agreeing(run, stage):
    """Nobody hears another outcome than the others do, though some may hear none."""

    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            for turn in range(1, TURNS):  # after none, the call has not even begun
                others = [asyncio.ensure_future(group.agree(turn % 2 == 0)) for group in ranks[1:]]
                task = await after_turns(turn, lambda: ranks[0].agree(True))
                outcomes = await asyncio.gather(*others, return_exceptions=True)
                assert (
                    outcomes[0] is outcomes[1]
                    or [type(one) for one in outcomes] == [aiodist.CollectiveAbortedError] * 2
                )
                if not task.cancelled():
                    assert task.result() is outcomes[0] is (turn % 2 == 0)

    run(main())
