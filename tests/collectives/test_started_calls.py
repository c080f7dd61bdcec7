"""Calls of several steps start when they are called, as collectives do. A rank that cancels one
before the loop has turned has called it all the same, and the ranks stay in step."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aiodist
from aiodist import Work

CALLS = {
    "agree": lambda g: g.agree(True),
    "shrink": lambda g: g.shrink(),
    "rendezvous": lambda g: g.rendezvous(),
    "split": lambda g: g.split("color"),
    "dup": lambda g: g.dup(),
    "subgroup": lambda g: g.subgroup([2, 0, 1]),
    "expose": lambda g: g.expose(np.zeros(2)),
}
MADE = ["split", "dup", "subgroup", "expose"]


async def cancelled_at_once(call):
    """`call` by two ways that cancel it before the loop turns."""
    work = call()
    assert isinstance(work, Work)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work


async def out_of_time_at_once(call):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call(), 0)


@pytest.mark.parametrize("cancel", [cancelled_at_once, out_of_time_at_once])
@pytest.mark.parametrize("name", MADE)
@pytest.mark.sample(17)
def test_a_group_whose_call_was_cancelled_at_once(run, groups, everyone, name, cancel):
    async def main():
        async with groups(3) as ranks:
            await cancel(lambda: CALLS[name](ranks[0]))
            for rank in (1, 2):
                with pytest.raises(aiodist.CollectiveAbortedError, match="was cancelled"):
                    await CALLS[name](ranks[rank])
            made = await everyone(ranks, CALLS[name])
            if name == "expose":
                await asyncio.gather(*[window.fence() for window in made])
                await asyncio.gather(*[window.close() for window in made])
            else:
                assert await everyone(made, lambda g: g.all_reduce(1)) == [3] * 3

    run(main())


@pytest.mark.parametrize("cancel", [cancelled_at_once, out_of_time_at_once])
def test_an_agreement_that_was_cancelled_at_once(run, groups, everyone, cancel):
    """It votes False: no rank meets the flag of another step."""

    async def main():
        async with groups(3) as ranks:
            await cancel(lambda: ranks[0].agree(True))
            others = [group.agree(True) for group in ranks[1:]]
            assert await asyncio.gather(*others) == [False, False]
            others = [group.agree(True) for group in ranks[1:]]
            await asyncio.sleep(0)  # the others wait for this one
            await cancel(lambda: ranks[0].agree(True))
            assert await asyncio.gather(*others) == [False, False]
            assert await everyone(ranks, lambda g: g.agree(True)) == [True] * 3
            assert await everyone(ranks, lambda g: g.agree(g.rank != 1)) == [False] * 3

    run(main())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["shrink", "rendezvous"])
def test_going_on_that_was_cancelled_at_once(run, groups, everyone, name, late):
    """The call was counted: the next one of all ranks leads to the same epoch."""

    async def main():
        async with groups(3) as ranks:
            work = CALLS[name](ranks[0])
            others = [] if late else [CALLS[name](group) for group in ranks[1:]]
            work.cancel()
            await asyncio.wait([work])
            for other in others or [CALLS[name](group) for group in ranks[1:]]:
                await asyncio.wait([other])
                if other.exception() is None:
                    ranks[other.result().rank] = other.result()
            again = [group for group in ranks if group.epoch == ranks[0].epoch]
            made = await everyone(again, CALLS[name])
            ranks = [*made, *[group for group in ranks if group not in again]]
            assert await everyone(ranks, lambda g: g.all_reduce(1)) == [3] * 3
            await asyncio.gather(*[group.close() for group in ranks])

    run(main())


def test_their_order_is_that_of_the_calls(run, groups):
    """One rank calls all before it awaits any, the others one after the other."""

    async def main():
        async with groups(3) as ranks:

            async def at_once(group):
                works = [
                    group.agree(True),
                    group.split(group.rank % 2),
                    group.agree(False),
                    group.split("all", -group.rank),
                    group.dup(),
                    group.dup(),
                    group.agree(True),
                ]
                return await asyncio.gather(*works)

            async def in_turn(group):
                return [
                    await group.agree(True),
                    await group.split(group.rank % 2),
                    await group.agree(False),
                    await group.split("all", -group.rank),
                    await group.dup(),
                    await group.dup(),
                    await group.agree(True),
                ]

            found = await asyncio.gather(
                at_once(ranks[0]), at_once(ranks[1]), in_turn(ranks[2]), return_exceptions=False
            )
            for verdict, part, other, reverse, one, two, last in found:
                assert (verdict, other, last) == (True, False, True)
                assert (part.size, reverse.size, one.size, two.size) == (
                    (2, 3, 3, 3) if part.size == 2 else (1, 3, 3, 3)
                )
            for made in zip(*found, strict=True):
                if isinstance(made[0], aiodist.Group):
                    works = [group.all_gather(group.rank) for group in made]
                    sizes = {len(ranks) for ranks in await asyncio.gather(*works)}
                    assert sizes <= {made[0].size, made[1].size}

    run(main())


def test_fences_at_once_and_in_turn(run, groups, everyone):
    async def main():
        async with groups(2) as ranks:
            xs = [np.zeros(1), np.zeros(1)]
            windows = await everyone(ranks, lambda g: g.expose(xs[g.rank]))
            await cancelled_at_once(windows[0].fence)
            with pytest.raises(aiodist.CollectiveAbortedError):
                await windows[1].fence()
            windows[0].accumulate(1, 0, 1.0)
            both = [windows[0].fence(), windows[0].fence()]
            windows[1].accumulate(0, 0, 1.0)
            await windows[1].fence()
            assert xs[0][0] == xs[1][0] == 1.0
            await windows[1].fence()
            await asyncio.gather(*both)
            await asyncio.gather(*[window.close() for window in windows])

    run(main())


def test_the_store_is_asked_at_once(run, groups):
    """In the order of the calls, also if many writes are under way."""

    async def main():
        async with groups(2) as ranks:
            store, other = ranks[0].store, ranks[1].store
            await cancelled_at_once(lambda: store.set("cancelled", b"yes"))
            works = [store.add("n") for _ in range(100)]
            found = store.get("n")
            assert await found == b"100"
            assert await asyncio.gather(*works) == [*range(1, 101)]
            assert await other.get("cancelled") == b"yes"
            # A deadline is that of the call alone.
            with pytest.raises(aiodist.CollectiveTimeoutError):
                await store.wait("never", timeout=0.001)
            task = asyncio.current_task()
            assert task is not None
            assert not task.cancelling()

    run(main())


def test_what_is_wrong_is_raised_by_the_call(run, groups):
    async def main():
        async with groups(1) as [group]:
            wrong = [
                lambda: group.agree("yes"),
                lambda: group.split(1.5),
                lambda: group.dup(timeout=-1),
                lambda: group.subgroup([7]),
                lambda: group.expose(3),
                lambda: group.rendezvous(min_size=0),
                lambda: group.store.set("k", "text"),
                lambda: group.store.get("k", timeout=0),
            ]
            for call in wrong:
                with pytest.raises((TypeError, ValueError)):
                    call()
            await group.close()
            for name, call in CALLS.items():
                if name != "subgroup":  # of ranks that are not there
                    with pytest.raises(aiodist.GroupClosedError):
                        call(group)

    run(main())


def test_tasks_of_a_users_own(run, groups, everyone):
    """`create_task` takes a coroutine, so a program writes one, as for all operations."""

    async def main():
        async with groups(2) as ranks:

            async def agree(group):
                return await group.agree(True)

            tasks = [asyncio.create_task(agree(group)) for group in ranks]
            assert await asyncio.gather(*tasks) == [True, True]
            work = ranks[0].agree(True)
            with pytest.raises(TypeError):
                asyncio.create_task(work)  # noqa: RUF006
            assert await asyncio.gather(work, ranks[1].agree(True)) == [True, True]

    run(main())
