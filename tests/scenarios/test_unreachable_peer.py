"""A peer whose address leads nowhere: an error that names it, at once."""

from __future__ import annotations

import asyncio

import pytest

import aiodist
from aiodist.transports.tcp import TcpTransport


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("no address")])
def test_a_peer_that_cannot_be_dialled(run, monkeypatch, error):
    async def dial(self, address, receiver):
        raise error

    monkeypatch.setattr(TcpTransport, "dial", dial)

    async def main():
        async with aiodist.local(2, transports=("tcp",)) as ranks:
            works = [group.barrier() for group in ranks]
            await asyncio.wait(works)
            for rank, work in enumerate(works):
                failure = work.exception()
                assert isinstance(failure, aiodist.PeerLostError)
                assert failure.ranks == (1 - rank,)
                assert str(error) in str(failure)

    run(main())
