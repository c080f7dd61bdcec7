"""Survivors go on without those that are lost."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from over_links import until

import aiodist


def shrink(group):
    return group.shrink()


def test_survivors_go_on(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(4)
            for _ in range(3):  # long enough for shared memory to be in use
                await everyone(ranks, lambda group: group.all_reduce(np.ones(10)))
            pending = [group.all_reduce(np.ones(10)) for group in (ranks[0], ranks[3])]
            await cast.kill(ranks.pop(1))
            for work in pending:
                with pytest.raises(aiodist.PeerLostError) as lost:
                    await work
                assert lost.value.ranks == (1,)
            shrunk = await everyone(ranks, shrink)
            assert [(group.rank, group.size, group.epoch) for group in shrunk] == [
                (0, 3, 2), (1, 3, 2), (2, 3, 2),
            ]  # fmt: skip
            assert [member.id for member in shrunk[0].members] == [
                ranks[0].members[old].id for old in (0, 2, 3)
            ]
            for group in ranks:
                for call in (group.barrier, group.dup, group.expose):
                    with pytest.raises(aiodist.GroupRevokedError):
                        await call()
            for _ in range(3):
                assert await everyone(shrunk, lambda group: group.all_reduce(group.rank)) == [3] * 3
            # Nothing is kept of those who are gone.
            assert [len(group._actor.people) for group in shrunk] == [3, 3, 3]

    run(main())


def test_the_old_groups_know_who_was_lost_after_they_were_revoked(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(4)
            others = await everyone(ranks, lambda group: group.dup())
            for group in [*ranks, *others]:
                group.revoke()
            for rank in (3, 1):
                del others[rank]
                await cast.kill(ranks.pop(rank))
            await everyone(others, shrink)
            await everyone(ranks, shrink)
            for group in [*ranks, *others]:
                assert sorted(group.lost) == [1, 3]
                assert "began without it" not in str(group.lost)

    run(main())


@pytest.mark.parametrize("comes", ["first", "last"])
@pytest.mark.parametrize(
    ("call", "wrong", "right", "said"),
    [
        ("agree", {"flag": 1}, {}, "TypeError: flag is a bool, not 1"),
        ("shrink", {"timeout": 0}, {}, "ValueError: timeout is more than 0 seconds, not 0"),
        ("rendezvous", {"min_size": 0}, {"min_size": 2}, "ValueError: min_size is from 1"),
    ],
)
def test_wrong_arguments_on_one_rank_fail_the_call_of_all(
    run, stage, everyone, call, wrong, right, said, comes
):
    """Their next calls match."""

    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            with pytest.raises((TypeError, ValueError)):
                if comes == "last":
                    works = [getattr(group, call)(**right) for group in ranks[1:]]
                    await asyncio.sleep(0)
                getattr(ranks[0], call)(**wrong)
            if comes == "first":
                works = [getattr(group, call)(**right) for group in ranks[1:]]
            for error in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(error, aiodist.CollectiveAbortedError)
                assert error.rank == 0
                assert error.reason.startswith(said)
            groups = await everyone(ranks, shrink)
            assert await everyone(groups, lambda group: group.all_reduce(1)) == [3] * 3

    run(main())


def test_again_and_again_down_to_one(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(4)
            while len(ranks) > 1:
                await everyone(ranks, lambda group: group.all_reduce(1))
                await cast.kill(ranks.pop(0))
                ranks = await everyone(ranks, shrink)
            assert (ranks[0].epoch, ranks[0].rank, ranks[0].size) == (4, 0, 1)
            assert await ranks[0].all_reduce(7) == 7

    run(main())


def test_a_healthy_group_has_its_next_epoch_too(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            shrunk = await everyone(ranks, shrink)
            assert [group.epoch for group in shrunk] == [2, 2, 2]
            assert await everyone(shrunk, lambda group: group.all_reduce(1)) == [3, 3, 3]

    run(main())


def test_the_first_call_revokes_the_group_for_all(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            receiving = ranks[2].recv()
            first = asyncio.ensure_future(ranks[0].shrink())
            with pytest.raises(aiodist.GroupRevokedError, match="rank 0 revoked the group"):
                await receiving
            shrunk = [*await everyone(ranks[1:], shrink), await first]
            assert {group.size for group in shrunk} == {3}

    run(main())


def test_who_dies_while_others_wait_for_it_is_left_out(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(4)
            waiting = [asyncio.ensure_future(group.shrink()) for group in ranks[1:]]
            await cast.kill(ranks[0])
            shrunk = await asyncio.gather(*waiting)
            assert [group.rank for group in shrunk] == [0, 1, 2]
            assert await everyone(shrunk, lambda group: group.all_reduce(1)) == [3, 3, 3]

    run(main())


def test_groups_made_of_a_group_go_on_and_shrink_by_themselves(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(4)
            low = await everyone(ranks[:2], lambda group: group.subgroup([0, 1]))
            high = await everyone(ranks[1:], lambda group: group.subgroup([3, 2, 1]))
            await cast.kill(ranks[2])
            alive = [ranks[0], ranks[1], ranks[3]]
            await everyone(alive, shrink)
            # Not touched by what happened to the one it was made of.
            assert await everyone(low, lambda group: group.all_reduce(1)) == [2, 2]
            shrunk = await everyone([high[2], high[0]], shrink)
            assert [(group.rank, group.size, group.epoch) for group in shrunk] == [
                (0, 2, 3), (1, 2, 3),
            ]  # fmt: skip
            assert [member.id for member in shrunk[0].members] == [
                ranks[3].members[3].id, ranks[1].members[1].id,
            ]  # fmt: skip
            assert await everyone(shrunk, lambda group: group.all_reduce(group.rank)) == [1, 1]
            duplicates = await everyone(shrunk, lambda group: group.dup())
            assert await everyone(duplicates, lambda group: group.all_reduce(1)) == [2, 2]
            with pytest.raises(RuntimeError, match="was made of it"):
                await shrunk[0].rendezvous()

    run(main())


def test_no_message_crosses_an_epoch(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(2)
            sent = ranks[0].send("of epoch 1", 1)
            shrunk = await everyone(ranks, shrink)
            await asyncio.wait([sent])
            await shrunk[0].send("of epoch 2", 1)
            assert await shrunk[1].recv() == "of epoch 2"
            assert shrunk[1].iprobe() is None

    run(main())


def test_used_with_connect_as_a_block(run, stage):
    async def main():
        async with stage() as cast:

            async def rank(number):
                connecting = aiodist.connect(
                    cast.coordinator.address, rank=number, size=2, **cast.options
                )
                async with connecting as group:
                    group = await group.shrink()
                    assert await group.all_reduce(1) == 2

            await asyncio.gather(rank(0), rank(1))
            assert cast.coordinator.status()["groups"] == []

    run(main())


def test_a_call_that_came_too_late_to_be_cancelled(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(2)
            first = asyncio.ensure_future(ranks[0].shrink())
            other = asyncio.ensure_future(ranks[1].shrink())
            for _ in iter(lambda: cast.coordinator.status()["groups"][0]["epoch"], 2):
                await asyncio.sleep(0)
            if not first.done():
                first.cancel()
            await asyncio.wait([first])
            group = first.result() if not first.cancelled() else await ranks[0].shrink()
            assert await everyone([group, await other], lambda one: one.all_reduce(1)) == [2, 2]

    run(main())


def test_a_cancelled_call_ends_that_of_the_others(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            waiting = [asyncio.ensure_future(group.shrink()) for group in ranks[:2]]
            await asyncio.sleep(0)
            waiting[0].cancel()
            with pytest.raises(aiodist.CollectiveAbortedError) as aborted:
                await waiting[1]
            assert (aborted.value.rank, aborted.value.op) == (0, "shrink")
            # The one that comes late hears of it, and all can try again.
            with pytest.raises(aiodist.CollectiveAbortedError):
                await ranks[2].shrink()
            shrunk = await everyone(ranks, shrink)
            assert [group.size for group in shrunk] == [3, 3, 3]

    run(main())


def test_a_call_leaves_the_others_alone_if_the_coordinator_is_gone_for_good(run, stage, everyone):
    """It can only fail, and what needs no coordinator works."""

    async def main():
        async with stage(returns=False) as cast:
            ranks = await cast.start(3)
            others = await everyone(ranks, lambda group: group.dup())
            await cast.coordinator.stop()
            await until(lambda: not ranks[0]._actor.control.is_open)
            for call in (ranks[0].shrink, ranks[0].rendezvous, others[0].shrink):
                with pytest.raises(aiodist.CoordinatorLostError, match="start all ranks again"):
                    await call()
            for groups in (ranks, others):
                assert await everyone(groups, lambda group: group.all_reduce(1)) == [3, 3, 3]

    run(main())
