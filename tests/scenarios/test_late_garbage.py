"""Garbage of a member that shows as such only after its link has moved on: frames of collectives
that were not called yet, the payload of which is not what the call says. Who sends it is lost; no
call raises for it, hangs, or has a wrong result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist.collectives import values
from aiodist.links.peer import Peer
from aiodist.rank import deriving
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields, unpack_fields

Ranks = list[aiodist.Group]
Call = Callable[[aiodist.Group], aiodist.Work[Any]]


def few(count: int = 6) -> np.ndarray:
    return np.ones(count, np.float32)


def many(count: int = 300_000) -> np.ndarray:
    return np.ones(count, np.float32)


CALLS: dict[str, Call] = {
    "all_reduce of few": lambda g: g.all_reduce(few()),
    "all_reduce of few with a tag": lambda g: g.all_reduce(few(), tag="t"),
    "all_reduce of many": lambda g: g.all_reduce(many()),
    "all_reduce of a value": lambda g: g.all_reduce(1),
    "reduce": lambda g: g.reduce(few(), dst=0),
    "reduce_scatter": lambda g: g.reduce_scatter(many()),
    "broadcast": lambda g: g.broadcast(few(), src=1),
    "broadcast of many": lambda g: g.broadcast(many(), src=1),
    "broadcast of a value": lambda g: g.broadcast({"a": 1} if g.rank == 1 else None, src=1),
    "all_gather": lambda g: g.all_gather(few()),
    "all_gather of many": lambda g: g.all_gather(many()),
    "all_gather of values": lambda g: g.all_gather({"rank": g.rank}),
    "gather": lambda g: g.gather(few(), dst=0),
    "scatter": lambda g: g.scatter([few()] * 3 if g.rank == 1 else None, src=1),
    "all_to_all": lambda g: g.all_to_all([few()] * 3),
    "barrier": lambda g: g.barrier(),
}

SENDERS = {call: (1,) for call in CALLS if "broadcast" in call or call == "scatter"}
"""Which ranks send anything that counts, where not all do."""

Payload = Sequence[memoryview]
WRONG: dict[str, Callable[[bytes], bytes]] = {
    "longer": lambda data: data + b"\0",
    "shorter": lambda data: data[:-1],
}


def corrupt(group: aiodist.Group, wrong: Callable[[bytes], bytes]) -> list[int]:
    """Whatever `group` sends for collectives is wrong from here on: a list that says to whom."""
    context = group._context
    context.express = None  # it has a way of its own
    to: list[int] = []

    class Wrong:
        """A way to a peer on which things change."""

        link = None

        def __init__(self, rank: int, peer: Peer) -> None:
            self._rank = rank
            self._peer = peer

        def send(self, header: bytes, payload: Payload = (), **options: Any) -> None:
            if unpack_fields(header)[0] == kinds.MESSAGE:
                data = b"".join(payload)
                sent = wrong(data)
                if sent != data:
                    to.append(self._rank)
                payload = [memoryview(sent)]
            self._peer.send(header, payload, **options)

        def discard(self, token: object) -> None:
            self._peer.discard(token)

    ways: Any = [Wrong(rank, peer) for rank, peer in enumerate(context.peers)]
    context.peers = ways
    return to


async def settled(ranks: Ranks, rank: int) -> None:
    """Rank 0 has taken in all that `rank` has sent so far, or lost it."""
    if ranks[rank]._context.ended is not None:
        return  # the coordinator has ruled so
    received = ranks[0].recv(src=rank, tag="settled")
    sent = ranks[rank].send(None, 0, tag="settled")
    await asyncio.wait([received, sent])
    for work in (received, sent):
        if not work.cancelled():
            work.exception()


@pytest.mark.long
@pytest.mark.strength(2)
@pytest.mark.parametrize("order", ["before", "between", "after"])
@pytest.mark.parametrize("hostile", [1, 2])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("call", CALLS)
def test_who_sends_it_is_lost(run: Any, call: str, wrong: str, hostile: int, order: str) -> None:
    """`order`: when the hostile rank calls, among the other two."""
    other = 3 - hostile
    turns = {
        "before": (hostile, 0, other),
        "between": (0, hostile, other),
        "after": (0, other, hostile),
    }

    async def main() -> None:
        async with aiodist.local(3, transports=("tcp",)) as ranks:
            await asyncio.gather(*[group.barrier() for group in ranks])
            to = corrupt(ranks[hostile], WRONG[wrong])
            works: dict[int, aiodist.Work[Any]] = {}
            for rank in turns[order]:
                works[rank] = CALLS[call](ranks[rank])
                await settled(ranks, hostile)
                sent = 0 in to
                await settled(ranks, hostile)
                if sent and 0 in works:
                    assert works[0].done()  # whatever the others do
            ends = await asyncio.gather(*works.values(), return_exceptions=True)
            end = dict(zip(works, ends, strict=True))[0]
            if to:  # others than rank 0 pass it on
                assert isinstance(end, aiodist.PeerLostError)
                assert hostile in end.ranks
            else:
                assert hostile not in SENDERS.get(call, (1, 2))
                assert not isinstance(end, BaseException)
            assert not ranks[0]._context.calls.ops
            greeting = ranks[other].send("hello", 0)
            assert await ranks[0].recv(src=other) == "hello"
            await greeting

    run(main())


@pytest.mark.usefixtures("no_ruling")
def test_garbage_for_a_group_that_is_not_made_yet(run: Any) -> None:
    """Making that group does not raise it, but says who is lost."""

    async def main() -> None:
        async with aiodist.local(3, transports=("tcp",)) as ranks:
            await asyncio.gather(*[group.barrier() for group in ranks])
            number = deriving._id_of(ranks[1]._context, "dup", [0, 1, 2])
            link = ranks[1]._actor.endpoint.peer(0).link
            assert link is not None
            link.send(pack_fields(kinds.MESSAGE, number, 1.5))
            await settled(ranks, 1)
            with pytest.raises(aiodist.PeerLostError, match="rank 1") as caught:
                await ranks[0].dup()
            assert caught.value.ranks == (1,)

    run(main())


@pytest.mark.usefixtures("no_ruling")
def test_garbage_for_colors(run: Any) -> None:
    async def main() -> None:
        async with aiodist.local(3, transports=("tcp",)) as ranks:
            hostile = ranks[1]._context
            call = values.all_gather(hostile, {"color": 1}, None)
            works = [ranks[0].split(1), ranks[2].split(1)]
            works.append(hostile.calls.launch("split", "split()", call.start, tag=b"split 1"))
            ends = await asyncio.gather(*works, return_exceptions=True)
            for end in ends[:2]:
                assert isinstance(end, aiodist.ProtocolError)
                assert "rank 1 sent a malformed value to split" in str(end)

    run(main())
