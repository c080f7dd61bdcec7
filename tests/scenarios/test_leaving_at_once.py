"""A rank that sends and leaves at once: what it sent arrives."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aiodist


@pytest.mark.parametrize("transport", ["inproc", "unix", "tcp", "shm"])
async def test_a_message_outlives_its_sender(transport: str) -> None:
    """The send is done before there is a link, for the message is small."""
    async with aiodist.local(2, transports=(transport,), op_timeout=20.0) as (sender, receiver):
        work = receiver.recv(src=0)
        await sender.send(np.arange(3), 1)
        async with asyncio.timeout(20):
            await sender.close()
            assert (await work == np.arange(3)).all()
