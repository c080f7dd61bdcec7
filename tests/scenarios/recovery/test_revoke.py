"""A group that one rank revokes is over for all."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aiodist


def test_pending_and_later_operations_fail_everywhere(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            for _ in range(3):
                await everyone(ranks, lambda group: group.all_reduce(1))
            x = np.zeros(100_000)
            pending = [
                ranks[0].all_reduce(x),
                ranks[0].recv(),
                ranks[0].probe(src=1),
                ranks[0].send(np.ones(10_000_000), 2),
                ranks[1].barrier(tag="b"),
                ranks[2].barrier(tag="c"),
            ]
            await asyncio.sleep(0)
            ranks[1].revoke()
            for work in pending:
                with pytest.raises(aiodist.GroupRevokedError, match="revoked the group"):
                    await work
            for group in ranks:
                assert group.closed
                for call in (
                    lambda group=group: group.all_reduce(1),
                    lambda group=group: group.send(1, 0),
                    lambda group=group: group.recv(),
                    group.barrier,
                ):
                    with pytest.raises(aiodist.GroupRevokedError, match="revoked the group"):
                        call()
                group.revoke()  # idempotent

    run(main())


def test_a_rank_that_does_nothing_hears_it_later(run, stage):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(2)
            ranks[0].revoke()
            with pytest.raises(aiodist.GroupRevokedError, match="rank 0 revoked"):
                await ranks[1].recv()

    run(main())


def test_the_word_is_passed_on_where_the_revoker_dies(run, stage):
    """Rank 0 tells rank 1 alone before it dies."""

    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            waiting = ranks[2].recv(src=1)
            await ranks[0].send("a link", 1)
            await ranks[1].recv()
            context = ranks[0]._context
            say = context.say
            context.say = lambda dst, *word: say(dst, *word) if dst == 1 else None
            ranks[0].revoke()
            for _ in iter(lambda: ranks[1].closed, True):
                await asyncio.sleep(0)
            await cast.kill(ranks[0])
            with pytest.raises(aiodist.GroupRevokedError, match="rank 0 revoked"):
                await waiting

    run(main())


def test_groups_made_of_it_and_the_one_it_was_made_of_go_on(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            pair = await everyone(ranks[:2], lambda group: group.subgroup([0, 1]))
            trio = await everyone(ranks, lambda group: group.dup())
            pair[0].revoke()
            with pytest.raises(aiodist.GroupRevokedError):
                await pair[1].recv()
            ranks[0].revoke()
            with pytest.raises(aiodist.GroupRevokedError):
                await ranks[2].recv()
            assert await everyone(trio, lambda group: group.all_reduce(1)) == [3, 3, 3]

    run(main())


def test_the_word_comes_in_the_middle_of_a_call(run, stage, everyone):
    """It lies in the socket when the call looks for what the other rank contributes."""

    async def main():
        async with stage(op_timeout=30.0) as cast:
            ranks = await cast.start(2)
            for _ in range(5):
                await everyone(ranks, lambda group: group.all_reduce(np.ones(10)))
            ranks[1].revoke()
            with pytest.raises(aiodist.GroupRevokedError):
                await ranks[0].all_reduce(np.ones(10))
            shrunk = await everyone(ranks, lambda group: group.shrink())
            assert await everyone(shrunk, lambda group: group.all_reduce(1)) == [2, 2]

    run(main())


def test_a_closed_group_says_that_it_is_closed(run, stage):
    """It cannot go on by `shrink`, although it was revoked before."""

    async def main():
        async with stage() as cast:
            ranks = await cast.start(2)
            ranks[0].revoke()
            await ranks[0].close()
            assert ranks[0].revoked
            for call in (ranks[0].barrier, ranks[0].recv, ranks[0].shrink, ranks[0].blocking):
                with pytest.raises(aiodist.GroupClosedError, match="the group was closed"):
                    call()

    run(main())
