"""Ranks that go on without those that are lost: on every transport, in one loop."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aiodist

TRANSPORTS = ["inproc", "shm", "unix", "tcp"]


async def lose(ranks, rank):
    """`rank` is gone without a word."""
    group = ranks.pop(rank)
    group._seat.control.abort()
    group._seat.endpoint.closing = True
    for peer in group._seat.endpoint._peers.values():
        if peer.link is not None:
            peer.link.close(ConnectionAbortedError("gone"))
    group._context.ended = aiodist.GroupClosedError("gone")
    await group._seat.endpoint.finish(0)
    group._seat._close_listeners()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_survivors_go_on(run, transport):
    async def main():
        async with aiodist.Coordinator() as coordinator:
            ranks = await asyncio.gather(
                *[joined(coordinator.address, rank, 4, (transport,)) for rank in range(4)]
            )
            await asyncio.gather(*[group.all_reduce(np.ones(10)) for group in ranks])
            await lose(ranks, 1)
            failed = await asyncio.gather(
                *[group.all_reduce(np.ones(10)) for group in ranks], return_exceptions=True
            )
            assert [type(error) for error in failed] == [aiodist.PeerLostError] * 3
            shrunk = await asyncio.gather(*[group.shrink() for group in ranks])
            assert [group.rank for group in shrunk] == [0, 1, 2]
            assert {group.epoch for group in shrunk} == {2}
            for group in ranks:
                with pytest.raises(aiodist.GroupRevokedError):
                    group.barrier()
            for _ in range(3):
                sums = await asyncio.gather(*[group.all_reduce(group.rank) for group in shrunk])
                assert sums == [3, 3, 3]
            assert [len(group._seat.people) for group in shrunk] == [3, 3, 3]
            await asyncio.gather(*[group.close() for group in shrunk])

    run(main())


async def joined(address, rank, size, transports=None, **options):
    return await aiodist.connect(address, rank=rank, size=size, transports=transports, **options)
