"""A link between two ranks that both live is gone for good: the coordinator rules who of them is
lost. (One that merely breaks is made again: see tests/simulation/test_broken_links.py.)"""

from __future__ import annotations

import pytest
from over_links import until

import aiodist
from aiodist.wire.recovery import Unreachable


def test_one_of_the_two_is_lost_to_all(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            for _ in range(3):
                await everyone(ranks, lambda group: group.all_gather(group.rank))
            sent = ranks[0].send("a link", 1)
            await ranks[1].recv(src=0)
            await sent
            waiting = ranks[2].recv(src=1)
            theirs = ranks[1].recv(src=0)
            ranks[0]._actor.endpoint.peer(1).link.close(ConnectionResetError("cut"))
            with pytest.raises(aiodist.PeerLostError) as lost:
                await ranks[0].recv(src=1)
            assert lost.value.ranks == (1,)
            # It may hear from the coordinator first.
            with pytest.raises((aiodist.PeerLostError, aiodist.GroupClosedError)):
                await theirs
            with pytest.raises(aiodist.PeerLostError) as lost:
                await waiting
            assert lost.value.ranks == (1,)
            shrunk = await everyone([ranks[0], ranks[2]], lambda group: group.shrink())
            assert [(group.rank, group.size) for group in shrunk] == [(0, 2), (1, 2)]
            assert await everyone(shrunk, lambda group: group.all_reduce(1)) == [2, 2]
            with pytest.raises(aiodist.GroupClosedError, match="no link between it and rank 0"):
                await ranks[1].recv()
            with pytest.raises(aiodist.GroupClosedError):
                await ranks[1].shrink()

    run(main())


def test_a_shrink_decides_at_once(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            sent = ranks[1].send("a link", 2)
            await ranks[2].recv(src=1)
            await sent
            ranks[1]._actor.endpoint.peer(2).link.close(ConnectionResetError("cut"))
            with pytest.raises(aiodist.PeerLostError):
                await ranks[1].recv(src=2)
            *shrunk, evicted = await everyone(ranks, lambda group: group.shrink())
            assert [group.size for group in shrunk] == [2, 2]
            assert isinstance(evicted, aiodist.GroupClosedError)
            assert await everyone(shrunk, lambda group: group.all_reduce(1)) == [2, 2]

    run(main())


def test_a_report_that_is_lost_with_the_coordinator_is_made_again(run, stage, everyone):
    async def main():
        async with stage() as cast:
            ranks = await cast.start(3)
            await everyone(ranks, lambda group: group.all_to_all([1, 2, 3]))
            controls = [group._actor.control for group in ranks]
            for control in controls:
                control.tell = lambda message: None
            ranks[1]._actor.endpoint.peer(2).link.close(ConnectionResetError("cut"))
            for group, other in ((ranks[1], 2), (ranks[2], 1)):
                await until(lambda lost=group._actor.endpoint.lost, root=other: root in lost)
            for control in controls:
                del control.tell
            await cast.stop_coordinator()
            await until(lambda: all(control.is_away for control in controls))
            await cast.start_coordinator()
            await until(lambda: not any(control.is_away for control in controls))
            *shrunk, evicted = await everyone(ranks, lambda group: group.shrink())
            assert [group.size for group in shrunk] == [2, 2]
            assert isinstance(evicted, aiodist.GroupClosedError)
            assert await everyone(shrunk, lambda group: group.all_reduce(1)) == [2, 2]

    run(main())


def test_who_left_is_not_reported_to_a_coordinator_that_is_back(run, stage):
    """It may not have heard of the leave yet, and would rule one of two healthy ranks lost."""

    async def main():
        async with stage() as cast:
            ranks = await cast.start(2)
            actor, told = ranks[1]._actor, []
            await cast.stop_coordinator()
            await until(lambda: actor.control.is_away)
            actor.endpoint.lose(0, "it left the group")
            actor.control.tell = told.append
            await cast.start_coordinator()
            await until(lambda: not actor.control.is_away)
            del actor.control.tell
            assert not [message for message in told if isinstance(message, Unreachable)]

    run(main())
