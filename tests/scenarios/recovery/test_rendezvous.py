"""Joiners wait while others work, and are let in at a rendezvous."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from idle_time import on_idle_time

import aiodist


def rendezvous(group):
    return group.rendezvous()


async def later(cast, **options):
    """Someone who asks to join, and waits."""
    before = sum(len(one["waiting"]) for one in cast.coordinator.status()["groups"])
    joining = asyncio.ensure_future(cast.join(**options))
    await cast.waiting(before + 1)
    return joining


def test_an_elastic_group_grows(run, stage, everyone):
    async def main():
        elastic = {"min_size": 2, "max_size": 4, "join_window": 0.0}
        async with stage() as cast:
            ranks = await asyncio.gather(*[cast.join(**elastic) for _ in range(2)])
            ranks.sort(key=lambda group: group.rank)
            third = await later(cast, **elastic, name="third")
            fourth = await later(cast, **elastic, name="fourth")
            fifth = await later(cast, **elastic, name="fifth")
            # They go on working, and take in those who wait when they want to.
            for _ in range(3):
                assert await everyone(ranks, lambda group: group.all_reduce(1)) == [2, 2]
            ids = [member.id for member in ranks[0].members]
            grown = [*await everyone(ranks, rendezvous), await third, await fourth]
            assert [(g.rank, g.size, g.epoch) for g in grown] == [(r, 4, 2) for r in range(4)]
            assert [member.id for member in grown[3].members][:2] == ids
            assert [member.name for member in grown[0].members][2:] == ["third", "fourth"]
            states = await asyncio.gather(
                *[g.broadcast({"step": 3, "w": np.ones(5)} if g.rank == 0 else None) for g in grown]
            )
            assert [state["step"] for state in states] == [3] * 4
            assert await everyone(grown, lambda group: group.all_reduce(1)) == [4] * 4
            assert not fifth.done()
            await cast.kill(grown.pop())
            again = [*await everyone(grown, rendezvous), await fifth]
            assert [g.rank for g in again] == [0, 1, 2, 3]
            assert await everyone(again, lambda group: group.all_reduce(1)) == [4] * 4

    run(main())


def test_a_fixed_group_waits_for_a_replacement(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            with pytest.raises(aiodist.GroupCompleteError):
                await cast.join(size=3)
            await cast.kill(ranks.pop(0))
            meeting = asyncio.gather(*[group.rendezvous() for group in ranks])
            replacement = await cast.join(size=3)
            ranks = [*await meeting, replacement]
            assert [group.rank for group in ranks] == [0, 1, 2]
            assert await everyone(ranks, lambda group: group.all_reduce(1)) == [3, 3, 3]
            with pytest.raises(aiodist.GroupCompleteError):
                await cast.join(size=3)

    run(main())


def test_without_anybody_who_waits(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            await cast.kill(ranks.pop(0))
            pair = await everyone(ranks, lambda group: group.rendezvous(min_size=1))
            assert [(group.rank, group.size) for group in pair] == [(0, 2), (1, 2)]
            # Survivors are never turned away.
            pair = await everyone(pair, lambda group: group.rendezvous(min_size=1, max_size=1))
            assert [(group.size, group.epoch) for group in pair] == [(2, 3), (2, 3)]

    run(main())


@on_idle_time
def test_too_few_in_time(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(2)
            meeting = [
                asyncio.ensure_future(ranks[0].rendezvous(min_size=3, max_size=5, timeout=0.1)),
                asyncio.ensure_future(ranks[1].rendezvous(min_size=3, max_size=5)),
            ]
            for call in meeting:
                with pytest.raises(
                    aiodist.CollectiveTimeoutError,
                    match=r"2 of at least 3 ranks are here; start more, or call rendezvous\(min_s",
                ):
                    await call
            shrunk = await everyone(ranks, lambda group: group.shrink())
            assert await everyone(shrunk, lambda group: group.all_reduce(1)) == [2, 2]

    run(main())


def test_a_joiner_that_gives_up_is_not_counted(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(2, min_size=None)
            await cast.kill(ranks.pop())
            joining = await later(cast, size=2)
            joining.cancel()
            await asyncio.wait([joining])
            await cast.waiting(0)
            meeting = asyncio.ensure_future(ranks[0].rendezvous())
            replacement = await cast.join(size=2)
            assert await everyone([await meeting, replacement], lambda g: g.all_reduce(1)) == [2, 2]

    run(main())


def test_survivors_die_while_joiners_are_awaited(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            meeting = [
                asyncio.ensure_future(group.rendezvous(min_size=4, max_size=4)) for group in ranks
            ]
            await asyncio.sleep(0)
            meeting[1].cancel()
            ranks[1]._actor.control.tell = lambda message: None
            await cast.kill(ranks[1])
            joining = [await later(cast, size=3)]
            joining.append(asyncio.ensure_future(cast.join(size=3)))
            grown = await asyncio.gather(meeting[0], meeting[2], *joining)
            assert sorted(group.rank for group in grown) == [0, 1, 2, 3]
            assert await everyone(grown, lambda group: group.all_reduce(1)) == [4] * 4

    run(main())


def test_arguments(run, stage):
    async def main():
        async with stage() as cast:
            [group] = await cast.start(1)
            for wrong, kind, text in (
                ({"min_size": "2"}, TypeError, "min_size is an int"),
                ({"max_size": 0}, ValueError, "max_size is from 1"),
                ({"min_size": 3, "max_size": 2}, ValueError, "min_size=3 is over max_size=2"),
            ):
                with pytest.raises(kind, match=text):
                    await group.rendezvous(**wrong)
            assert await group.all_reduce(1) == 1

    run(main())


def test_views(run, stage, everyone):
    async def main():
        elastic = {"min_size": 2, "max_size": 3, "join_window": 0.0}
        async with stage() as cast:
            ranks = await asyncio.gather(*[cast.join(**elastic) for _ in range(2)])
            ranks.sort(key=lambda group: group.rank)
            views = ranks[0].views()
            first = await anext(views)
            assert (first.epoch, len(first.members), first.waiting) == (1, 2, 0)
            assert first.members == ranks[0].members
            joining = await later(cast, **elastic)
            view = await anext(views)
            assert (view.epoch, view.waiting) == (1, 1)
            ranks = [*await everyone(ranks, rendezvous), await joining]
            view = await anext(views)
            if view.waiting:  # seen between the two
                view = await anext(views)
            assert (view.epoch, len(view.members), view.waiting) == (2, 3, 0)
            await cast.kill(ranks[1])
            view = await anext(views)
            assert [member.rank for member in view.members] == [0, 2]
            assert list(view.lost) == [1]
            await ranks[2].close()
            cast.actors.remove(ranks[2]._actor)
            view = await anext(views)
            assert (view.left, len(view.members)) == ((2,), 1)
            last = asyncio.ensure_future(anext(views, "the end"))
            await ranks[0].close()
            assert await last == "the end"

    run(main())
