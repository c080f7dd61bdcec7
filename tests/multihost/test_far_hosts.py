"""Hosts on long lines: what their kernels see, and what the ranks there make of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from aiodist.testing.long_links import FarHost, LongLine, Switch, far_hosts

pytestmark = pytest.mark.multihost

DELAY = 0.02

PROGRAM = """
import asyncio, json, aiodist
import numpy as np

async def main():
    async with aiodist.connect(timeout=30, op_timeout=60) as group:
        x = np.full(1_000_000, group.rank + 1.0)
        await group.all_reduce(x)
        assert (x == 3).all()
        link = group._actor.endpoint.peer(1 - group.rank).link
        print(json.dumps([group._context.costs.trip, link.kind]), flush=True)
        await group.barrier()
asyncio.run(main())
"""


@contextmanager
def far(line: LongLine) -> Iterator[tuple[list[FarHost], Switch]]:
    """Two hosts with such a line; the test is skipped where they cannot be made."""
    with ExitStack() as made:
        try:
            hosts = made.enter_context(far_hosts(2, line))
        except OSError as error:
            pytest.skip(f"far hosts cannot be made here: {error}")
        yield hosts


def printed(hosts: list[FarHost], program: str) -> list[str]:
    """What the program prints that each of two ranks runs, each in its host."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AIODIST_", "MASTER_"))}
    ranks = [
        subprocess.Popen(
            [*host.prefix, sys.executable, "-c", program],
            env=clean
            | {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
            | {"RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        found = []
        for process in ranks:
            out, err = process.communicate(timeout=50)
            assert process.returncode == 0, err
            found.append(out)
        return found
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_ranks_that_are_far_know_it() -> None:
    with far(LongLine(rate=50e6, delay=DELAY)) as (hosts, switch):
        for out in printed(hosts, PROGRAM):
            trip, kind = json.loads(out)
            # The coordinator is with rank 0. How long packets wait for a core comes on top.
            assert trip >= 2 * DELAY and kind == "tcp"
        # An all_reduce of two ranks takes the array across, each way.
        assert all(port.carried > 8_000_000 for port in (*switch.up, *switch.down))


BUNDLED = """
import asyncio, aiodist, socket
import numpy as np
from aiodist.transports import bundle, tcp
from aiodist.transports.bundled import BundledLink

def choose(sock, *, near):  # as where BBR is not allowed
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")

tcp._choose_congestion_control = choose
begin = bundle.Bundle.__init__

def use_all(self, *args):  # from the beginning: whether losses are noticed in time is chance
    begin(self, *args)
    self._use_all()

bundle.Bundle.__init__ = use_all

async def main():
    async with aiodist.connect(timeout=30, op_timeout=60) as group:
        for count in (1, 100_000, 500_000):
            x = np.arange(count, dtype=np.int64) * (group.rank + 1)
            await group.all_reduce(x)
            assert (x == 3 * np.arange(count)).all()
        other = 1 - group.rank
        sent = [group.send(np.full(number * 1000, number), other) for number in range(20)]
        for number in range(20):
            assert (await group.recv(src=other) == np.full(number * 1000, number)).all()
        await asyncio.gather(*sent)
        link = group._actor.endpoint.peer(other).link
        assert type(link) is BundledLink and link._socket._used == 8
        await group.barrier()
asyncio.run(main())
"""


def test_a_bundle_on_a_line_that_loses_packets() -> None:
    """All comes as it was sent, over several connections, where BBR is not allowed."""
    with far(LongLine(rate=50e6, delay=0.01, loss=0.01)) as (hosts, switch):
        printed(hosts, BUNDLED)
        assert switch.lost


def packet(to: int, size: int = 100, version: int = 4) -> bytes:
    head = bytearray(size)
    head[0] = version << 4
    head[16:20] = socket.inet_aton(f"10.231.9.{to}")
    return bytes(head)


def test_a_packet_comes_when_the_line_would_bring_it() -> None:
    """After it has left, the delay, and its coming in, behind others."""
    ends = [socket.socketpair(type=socket.SOCK_DGRAM) for _ in "abc"]
    try:
        for _, there in ends:
            there.setblocking(False)
        switch = Switch(LongLine(rate=1000.0, delay=2.0), [own.fileno() for own, _ in ends])
        for src, to in ((0, 3), (1, 3), (0, 9), (0, 0)):
            switch.send(src, packet(to), now=0.0)
        switch.send(0, packet(3, version=6), now=0.0)
        assert switch.due() == pytest.approx(2.1)
        switch.turn(2.15)  # both have come to the host, which one line leads to
        assert switch.due() == pytest.approx(2.2)
        switch.turn(2.25)
        assert ends[2][1].recv(1000) == packet(3)
        with pytest.raises(BlockingIOError):
            ends[2][1].recv(1000)
        switch.turn(2.35)
        assert ends[2][1].recv(1000) == packet(3)
        assert switch.due() is None
        assert switch.down[2].carried == 200 and switch.up[0].carried == 100
    finally:
        for own, there in ends:
            own.close()
            there.close()


def lost(seed: int, others: int = 0) -> list[int]:
    """Which of 300 packets of the first host a line loses that loses one of ten."""
    switch = Switch(LongLine(1e9, 1.0, loss=0.1, seed=seed), [-1, -1])
    gone = []
    for number in range(300):
        for _ in range(others):
            switch.send(1, packet(1), now=0.0)
        before = switch.lost
        switch.send(0, packet(2), now=0.0)
        gone += [number] * (switch.lost - before)
    return gone


def test_a_line_loses_the_same_packets_in_every_run() -> None:
    first = lost(seed=1)
    assert 15 <= len(first) <= 45
    assert lost(seed=1) == lost(seed=1, others=2) == first != lost(seed=2)


def test_queues_are_of_the_size_of_the_line() -> None:
    assert LongLine(50e6, 0.05).room == 5_000_000
    assert LongLine(1e6, 0.01).room == 1 << 20
    assert LongLine(50e6, 0.05, queue=10).room == 10
