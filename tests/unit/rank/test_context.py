"""One end of a group: which ranks it knows to be gone, whenever it was made."""

from __future__ import annotations

import asyncio

import pytest

import aiodist
from aiodist.errors import GroupClosedError, GroupRevokedError
from aiodist.links.peer import CLOSED
from aiodist.rank.context import Context
from aiodist.rank.deriving import another
from aiodist.wire import kinds


def end_of(group: aiodist.Group) -> Context:
    """This rank's end of a group of the same ranks, which others may make later."""
    context = group._context
    layout = group._actor.layout(context.ranks)
    return another(
        context, id=b"a group!", group="other", epoch=1, ranks=context.ranks, layout=layout
    )


async def test_a_rank_that_makes_its_end_late_hears_that_another_has_closed_its_own() -> None:
    async with aiodist.local(2) as groups:
        await asyncio.gather(*(group.barrier() for group in groups))
        await asyncio.gather(groups[0].send(1, 1), groups[1].recv(src=0))
        end_of(groups[0]).close(GroupClosedError("closed"))
        await asyncio.gather(groups[0].send(1, 1), groups[1].recv(src=0))  # behind the farewell
        late = end_of(groups[1])
        for work in (late.p2p.recv(0), late.p2p.probe(0)):
            assert work.done()
            with pytest.raises(aiodist.PeerLostError, match="rank 0 is lost: it closed the group"):
                await work
        late.close(GroupClosedError("closed"))


async def test_who_leaves_a_group_that_was_revoked_is_not_lost() -> None:
    async with aiodist.local(2) as groups:
        end = end_of(groups[1])
        end.close(GroupRevokedError("revoked"))
        end.frame(0, [kinds.FAREWELL, end.id, str(CLOSED)], 0)
        assert not end.gone
