"""A peer whose system takes the connection, and whose loop does not turn: it is waited for.

The clock of these loops is moved on by hand: what has a deadline is over at once. (What a rank
that is busy means for all of a group is in tests/simulation/test_busy_ranks.py.)
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import aiodist
from aiodist.transports.shm_link import ShmLink
from aiodist.transports.sockets import Acceptor
from aiodist.transports.stream import StreamLink

A_DAY = 86_400.0
TURNS = 50
COUNT = 100


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time can be moved on."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


@contextmanager
def busy(group: aiodist.Group) -> Iterator[None]:
    """Nobody answers who connects to this rank meanwhile."""
    loop = asyncio.get_running_loop()
    acceptors = [one for one in group._actor._listeners if isinstance(one, Acceptor)]
    for acceptor in acceptors:
        loop.remove_reader(acceptor._socket.fileno())
    yield
    for acceptor in acceptors:
        loop.add_reader(acceptor._socket.fileno(), acceptor._ready)


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def waits_for_a_day(transport: str, **options: object) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Clock)
    async with aiodist.local(
        2, transports=(transport,), lease=10 * A_DAY, op_timeout=math.inf, **options
    ) as groups:
        with busy(groups[1]):
            large = groups[0].send(np.zeros(1 << 20), 1)  # it leaves when it is received
            await turns()
            loop.ahead += A_DAY
            await turns()
            assert not large.done()
            assert not groups[0]._actor.endpoint.lost
        assert (await groups[1].recv(src=0)).size == 1 << 20
        await large
        assert await asyncio.gather(*(group.all_reduce(1) for group in groups)) == [2, 2]


@pytest.mark.parametrize("transport", ["unix", "tcp", "shm"])
def test_it_is_waited_for(transport: str) -> None:
    with asyncio.Runner(loop_factory=Clock) as runner:
        runner.run(waits_for_a_day(transport))


@contextmanager
def deaf(group: aiodist.Group, to: int) -> Iterator[None]:
    """This rank takes in nothing of rank `to` meanwhile."""
    link = group._actor.endpoint.peer(to).link
    assert isinstance(link, (StreamLink, ShmLink))
    link._receive = lambda: False
    yield
    del link._receive
    link.poll()


async def leaves_for_good(transport: str, count: int) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Clock)
    unhandled: list[object] = []
    loop.set_exception_handler(lambda _, what: unhandled.append(what))
    async with aiodist.local(
        2, transports=(transport,), lease=10 * A_DAY, op_timeout=math.inf
    ) as groups:
        await asyncio.gather(*(group.barrier() for group in groups))
        with deaf(groups[1], 0):
            x = np.zeros(30_000, np.uint8)
            for k in range(count):
                await groups[0].send(x, 1, tag=k % 20)
            closing = asyncio.ensure_future(groups[0].close())
            for _ in range(3):  # whatever has a deadline one after the other
                await turns()
                loop.ahead += A_DAY
            await turns()
        for k in range(count):
            assert (await groups[1].recv(src=0, tag=k % 20)).size == x.size
        await closing
    gc.collect()  # what nobody has looked at says so when it goes
    assert not unhandled


@pytest.mark.parametrize(
    ("transport", "count"),
    [("unix", COUNT), ("tcp", COUNT), ("shm", COUNT), ("unix", 1), ("tcp", 1)],
)
def test_what_was_sent_arrives_though_its_sender_leaves(transport: str, count: int) -> None:
    """One message is with the receiver's system, which says so, though the receiver does not; many
    are not."""
    with asyncio.Runner(loop_factory=Clock) as runner:
        runner.run(leaves_for_good(transport, count))
