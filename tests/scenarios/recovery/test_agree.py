"""One verdict for all, whoever dies meanwhile."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from idle_time import on_idle_time

import aiodist
from aiodist.rank.recovery import MAX_SENT
from aiodist.wire.recovery import MAX_BALLOTS


@pytest.mark.parametrize(
    ("flags", "verdict"),
    [([True, True, True], True), ([True, False, True], False), ([False] * 3, False)],
)
def test_the_and_of_all_flags(run, stage, flags, verdict):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            verdicts = await asyncio.gather(
                *[group.agree(flag) for group, flag in zip(ranks, flags, strict=True)]
            )
            assert verdicts == [verdict] * 3

    run(main())


def test_the_dead_have_no_say(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(4)
            voted = asyncio.ensure_future(ranks[0].agree(False))
            others = [asyncio.ensure_future(group.agree(True)) for group in ranks[1:3]]
            await asyncio.sleep(0)
            voted.cancel()  # of a process that is killed, nothing more is heard
            ranks[0]._actor.control.tell = lambda message: None
            await cast.kill(ranks[0])
            for _ in iter(lambda: list(cast.coordinator.status()["groups"][0]["lost"]), ["0"]):
                await asyncio.sleep(0)
            await cast.kill(ranks[3])
            assert await asyncio.gather(*others) == [True, True]

    run(main())


def test_after_losses_and_after_a_revoke(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            await cast.kill(ranks.pop())
            assert await everyone(ranks, lambda group: group.agree(True)) == [True, True]
            ranks[1].revoke()
            assert await everyone(ranks, lambda group: group.agree(False)) == [False, False]

    run(main())


def test_groups_made_of_a_group_agree_by_themselves(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            pair = await everyone(ranks[1:], lambda group: group.subgroup([2, 1]))
            pair_verdicts = everyone(pair, lambda group: group.agree(group.rank == 0))
            verdicts = everyone(ranks, lambda group: group.agree(True))
            assert await asyncio.gather(pair_verdicts, verdicts) == [[False] * 2, [True] * 3]

    run(main())


@on_idle_time
def test_out_of_time_on_one_is_so_for_all(run, stage):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            patient = asyncio.ensure_future(ranks[1].agree(True))
            for call in (ranks[0].agree(True, timeout=0.05), patient):
                with pytest.raises(aiodist.CollectiveTimeoutError, match="rank 2") as late:
                    await call
                assert late.value.missing == (2,)
            with pytest.raises(aiodist.CollectiveTimeoutError):
                await ranks[2].agree(True)

    run(main())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("turns", "first"), [(0, 0), (1, MAX_SENT)])
def test_more_votes_at_once_than_the_coordinator_takes(run, stage, size, turns, first):
    """They wait in line. Those that are cancelled before they are sent vote False."""

    async def main():
        async with stage() as cast:
            ranks = await cast.start(size)
            count = MAX_BALLOTS + 44
            works = [ranks[0].agree(True) for _ in range(count)]
            for _ in range(turns):
                await asyncio.sleep(0)
            given_up = range(first, count, 3)
            for number in given_up:
                works[number].cancel()
            await asyncio.wait([works[number] for number in given_up])
            expected = [number % 2 == 0 and number not in given_up for number in range(count)]
            others = [group.agree(n % 2 == 0) for group in ranks[1:] for n in range(count)]
            assert await asyncio.gather(*others) == expected * (size - 1)
            for number, work in enumerate(works):
                if number in given_up:
                    assert work.cancelled()
                else:
                    assert await work is expected[number]

    run(main())


def test_votes_in_two_groups_that_are_called_in_different_orders(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(2)
            copies = await everyone(ranks, lambda group: group.dup())
            orders = [(ranks[0], copies[0]), (copies[1], ranks[1])]
            votes = [
                group.agree(True)
                for order in orders
                for group in order
                for _ in range(MAX_BALLOTS + 1)
            ]
            assert all(await asyncio.gather(*votes))

    run(main())


@on_idle_time
def test_votes_in_line_end_at_their_deadlines(run, stage):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            count = MAX_SENT + 2
            late = [ranks[0].agree(True, timeout=0.05) for _ in range(count)]
            patient = [ranks[1].agree(True) for _ in range(count)]
            for error in await asyncio.gather(*late, *patient, return_exceptions=True):
                assert isinstance(error, aiodist.CollectiveTimeoutError)
                assert 2 in error.missing
                assert "within 0.05 s" in str(error)

    run(main())


def test_a_shrink_that_is_cancelled_in_line(run, stage):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(2)
            votes = [ranks[0].agree(True) for _ in range(MAX_SENT)]
            ranks[0].shrink().cancel()
            votes += [ranks[1].agree(True) for _ in range(MAX_SENT)]
            with pytest.raises(aiodist.CollectiveAbortedError, match="rank 0"):
                await ranks[1].shrink()
            assert await asyncio.gather(*votes) == [True] * len(votes)

    run(main())


def test_ranks_that_call_different_things(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(2)
            calls = [ranks[0].shrink(), ranks[1].rendezvous(min_size=2)]
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, aiodist.MismatchError)
                assert error.calls == {
                    0: "shrink()",
                    1: "rendezvous(min_size=2, max_size=None)",
                }
                assert "  rank 0  shrink()\n" in str(error)

    run(main())


@pytest.mark.parametrize("late", ["agree", "goes on"])
@pytest.mark.parametrize("first", ["agree", "goes on"])
@pytest.mark.parametrize("call", ["shrink", "rendezvous"])
@pytest.mark.sample(13)
def test_agree_ends_if_another_rank_goes_on(run, stage, everyone, call, first, late):
    """Its ranks come, too, and count their votes as the others do."""

    def go_on(group):
        return asyncio.ensure_future(getattr(group, call)())

    async def refuses(group):
        for error in await everyone([group] * 2, lambda group: group.agree(True)):
            assert isinstance(error, aiodist.GroupRevokedError)
            assert f"rank 1 has called {call}(" in str(error)

    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            going = [go_on(ranks[1])] if first == "goes on" else []
            agreeing = asyncio.ensure_future(refuses(ranks[0]))
            await asyncio.sleep(0)
            going = going or [go_on(ranks[1])]
            await agreeing
            if late == "agree":
                await refuses(ranks[2])
            going += [go_on(ranks[0]), go_on(ranks[2])]
            assert (
                await everyone(await asyncio.gather(*going), lambda group: group.all_reduce(1))
                == [3] * 3
            )

    run(main())


@pytest.mark.parametrize("call", ["shrink", "rendezvous"])
@pytest.mark.parametrize("how", ["late", "refused"])
def test_what_follows_an_agree_that_was_given_up(run, stage, everyone, call, how):
    """Ranks that had not called it hear of it when they go on, and go on."""

    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            if how == "late":
                with pytest.raises(aiodist.CollectiveTimeoutError):
                    await ranks[0].agree(True, timeout=0.01)
            else:
                with pytest.raises(TypeError, match="flag is a bool"):
                    await ranks[0].agree(3)
            others = [asyncio.ensure_future(getattr(group, call)()) for group in ranks[1:]]
            groups = await asyncio.gather(getattr(ranks[0], call)(), *others)
            assert await everyone(groups, lambda group: group.all_reduce(1)) == [3] * 3

    run(main())


def test_without_a_coordinator(run, stage, everyone):
    async def main():
        async with stage(returns=False) as cast:
            ranks = await cast.start(2)
            await cast.coordinator.stop()
            for error in await everyone(ranks, lambda group: group.agree(True)):
                assert isinstance(error, aiodist.CoordinatorLostError)
                assert (error.epoch, error.op, error.seq) == (1, "agree", 0)
                assert "start all ranks again" in str(error)
            assert await everyone(ranks, lambda group: group.all_reduce(1)) == [2, 2]

    run(main())


def test_arguments(run, stage):
    async def main():
        async with stage() as cast:
            [group] = await cast.start(1)
            with pytest.raises(TypeError, match="flag is a bool"):
                await group.agree(1)
            with pytest.raises(ValueError, match="more than 0"):
                await group.agree(True, timeout=0)
            assert await group.agree() is True
            assert await group.agree(np.True_) is True
            assert await group.agree(np.False_) is False

    run(main())


def test_closing_ends_a_vote_that_waits(run, stage):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(2)
            waiting = asyncio.gather(ranks[0].agree(True))
            await asyncio.sleep(0)
            await ranks[0].close()
            with pytest.raises(aiodist.GroupClosedError):
                await waiting

    run(main())
