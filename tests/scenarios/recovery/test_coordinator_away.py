"""Votes while the coordinator is away, and the epochs that it comes back to."""

from __future__ import annotations

import asyncio
import re

import pytest
from idle_time import on_idle_time
from over_links import until

import aiodist


@pytest.fixture(params=["state", "no state"])
def state(request, tmp_path):
    return tmp_path / "state" if request.param == "state" else None


@pytest.mark.strength(2)
def test_votes_wait_for_it(run, stage, everyone, state):
    async def main():
        async with stage(state=state) as cast:
            ranks = await cast.start(3)
            await cast.stop_coordinator()
            assert await everyone(ranks, lambda group: group.all_reduce(1)) == [3, 3, 3]
            agreeing = asyncio.ensure_future(
                everyone(ranks, lambda group: group.agree(group.rank != 1))
            )
            shrinking = asyncio.ensure_future(everyone(ranks, lambda group: group.shrink()))
            for _ in range(3):  # what does not need it goes on meanwhile
                await everyone(ranks, lambda group: group.all_reduce(1))
            assert not agreeing.done()
            assert not shrinking.done()
            await cast.start_coordinator()
            assert await agreeing == [False, False, False]
            shrunk = await shrinking
            assert [(group.rank, group.size, group.epoch) for group in shrunk] == [
                (0, 3, 2), (1, 3, 2), (2, 3, 2),
            ]  # fmt: skip
            assert await everyone(shrunk, lambda group: group.all_reduce(1)) == [3, 3, 3]

    run(main())


def test_a_vote_that_runs_out_of_time_while_it_is_away(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(2)
            await cast.stop_coordinator()
            control = ranks[0]._actor.control
            await until(lambda: "no coordinator answers at" in control.absence)
            with pytest.raises(aiodist.CollectiveTimeoutError, match=re.escape(control.absence)):
                await ranks[0].agree(True, timeout=0.01)
            await cast.start_coordinator()
            # It votes False. Which of vote and withdrawal counts is a matter of which comes first.
            [outcome] = await everyone(ranks[1:], lambda group: group.agree(True))
            assert outcome is False or isinstance(outcome, aiodist.CollectiveTimeoutError)
            assert await everyone(ranks, lambda group: group.agree(True)) == [True, True]

    run(main())


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_rank_that_cancels_votes_no_whichever_coordinator_counts(run, stage, everyone, when):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            control = ranks[0]._actor.control
            others = [asyncio.ensure_future(ranks[1].agree(True))]
            voted = ranks[0].agree(True)
            await until(lambda: control.older_than(0.0))
            if when == "before":
                voted.cancel()
                await asyncio.wait([voted])
            await cast.stop_coordinator()
            others.append(asyncio.ensure_future(ranks[2].agree(True)))
            if when == "meanwhile":
                await until(lambda: control.is_away)
                voted.cancel()
                await asyncio.wait([voted])
            await cast.start_coordinator()
            assert await asyncio.gather(*others) == [False, False]
            assert await everyone(ranks, lambda group: group.agree(True)) == [True] * 3
            assert not control._requests._requests

    run(main())


def test_a_call_does_not_fail_with_the_timeout_of_an_earlier_one(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(2)
            await cast.stop_coordinator()
            for error in await everyone(ranks, lambda group: group.shrink(timeout=0.01)):
                assert isinstance(error, aiodist.CollectiveTimeoutError)
            # These calls go on with the votes of the first ones, which the withdrawals make void.
            shrinking = asyncio.ensure_future(everyone(ranks, lambda group: group.shrink()))
            await cast.start_coordinator()
            shrunk = await shrinking
            assert [(group.rank, group.size, group.epoch) for group in shrunk] == [
                (0, 2, 2), (1, 2, 2),
            ]  # fmt: skip
            assert await everyone(shrunk, lambda group: group.all_reduce(1)) == [2, 2]

    run(main())


def test_a_loop_that_ends_looks_for_it_no_more(run, stage):
    """It cancels all tasks."""

    async def main():
        async with stage() as cast:
            [group] = await cast.start(1)
            await cast.stop_coordinator()
            control = group._actor.control
            await until(lambda: control.is_away)
            looking = control._coming_back
            looking.cancel()
            await asyncio.wait([looking])
            await asyncio.sleep(0)
            assert control._coming_back is None
            with pytest.raises(aiodist.CoordinatorLostError, match="was cancelled"):
                await group.store.set("k", b"")  # if the loop goes on
            await cast.kill(group)
            await cast.start_coordinator()

    run(main())


def test_views_do_not_wait_for_one_that_goes_before_it_answers(run, stage):
    async def main():
        async with stage() as cast:
            [group] = await cast.start(1)
            first = asyncio.ensure_future(anext(group.views()))
            await asyncio.sleep(0)  # it has asked how many ranks wait
            await cast.stop_coordinator()
            assert (await first).members == group.members
            await cast.start_coordinator()

    run(main())


def test_views_end_if_it_is_gone_for_good(run, stage):
    async def main():
        async with stage(returns=False) as cast:
            [group] = await cast.start(1)
            views = group.views()
            await anext(views)
            following = asyncio.ensure_future(anext(views))
            await cast.stop_coordinator()
            with pytest.raises(aiodist.CoordinatorLostError, match="is gone"):
                await following
            assert await group.all_reduce(1) == 1

    run(main())


@pytest.mark.strength(2)
@on_idle_time
def test_a_rank_that_dies_while_it_is_away(run, stage, everyone, state):
    async def main():
        async with stage(state=state, lease=0.5) as cast:
            ranks = await cast.start(3)
            await everyone(ranks, lambda group: group.barrier())
            await cast.stop_coordinator()
            await cast.kill(ranks[1])
            left = [ranks[0], ranks[2]]
            for error in await everyone(left, lambda group: group.all_reduce(1)):
                assert isinstance(error, aiodist.PeerLostError)
            shrinking = asyncio.ensure_future(everyone(left, lambda group: group.shrink()))
            await cast.start_coordinator()
            shrunk = await shrinking
            assert [(group.rank, group.size) for group in shrunk] == [(0, 2), (1, 2)]
            assert await everyone(shrunk, lambda group: group.all_reduce(1)) == [2, 2]

    run(main())


@pytest.mark.strength(2)
def test_later_epochs_outlive_it(run, stage, everyone, state):
    async def main():
        async with stage(state=state) as cast:
            ranks = await cast.start(3)
            await cast.kill(ranks[0])
            ranks = await everyone(ranks[1:], lambda group: group.shrink())
            for _ in range(2):
                await cast.stop_coordinator()
                await cast.start_coordinator()
                ranks = await everyone(ranks, lambda group: group.shrink())
                assert await everyone(ranks, lambda group: group.all_reduce(1)) == [2, 2]
            assert [group.epoch for group in ranks] == [4, 4]
            joining = asyncio.ensure_future(cast.join(size=3))
            await cast.waiting(1)
            met = await everyone(ranks, lambda group: group.rendezvous())
            met.append(await joining)
            assert [(group.rank, group.epoch) for group in met] == [(0, 5), (1, 5), (2, 5)]
            await cast.stop_coordinator()
            await cast.start_coordinator()
            assert await everyone(met, lambda group: group.agree(True)) == [True] * 3
            assert await everyone(met, lambda group: group.all_reduce(1)) == [3, 3, 3]

    run(main())


@pytest.mark.strength(2)
@pytest.mark.parametrize("deaf", [(), (0,), (0, 1)])
def test_one_verdict_and_one_view_also_for_who_missed_them(run, stage, everyone, state, deaf):
    """The coordinator dies when it has decided, and some hear of it only from the next one."""

    async def main():
        async with stage(state=state) as cast:
            ranks = await cast.start(3)
            carry_out = cast.coordinator._carry_out
            silent = {ranks[rank].members[rank].id for rank in deaf}

            def carried_out(effects):
                group = next(iter(cast.coordinator._machine._groups.values()))
                conns = [conn for conn, one in group.members.items() if one.id in silent]
                carry_out([one for one in effects if getattr(one, "conn", None) not in conns])

            cast.coordinator._carry_out = carried_out
            if cast.coordinator._journal is not None:
                cast.coordinator._journal._carry_out = carried_out
            first = [asyncio.ensure_future(group.agree(group.rank != 2)) for group in ranks]
            second = [asyncio.ensure_future(group.shrink()) for group in ranks]
            heard = [rank for rank in range(3) if rank not in deaf]
            await asyncio.gather(*[first[rank] for rank in heard])
            await asyncio.gather(*[second[rank] for rank in heard])
            await cast.stop_coordinator()
            assert not any(first[rank].done() or second[rank].done() for rank in deaf)
            await cast.start_coordinator()
            verdicts = await asyncio.gather(*first)
            assert verdicts == [False] * 3
            groups = await asyncio.gather(*second)
            assert [(group.rank, group.epoch) for group in groups] == [(0, 2), (1, 2), (2, 2)]
            assert await everyone(groups, lambda group: group.all_reduce(1)) == [3, 3, 3]
            assert await everyone(groups, lambda group: group.agree(True)) == [True] * 3

    run(main())
