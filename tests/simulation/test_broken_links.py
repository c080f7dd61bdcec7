"""A connection breaks between two living ranks, at any byte: nothing is lost, nothing doubled."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from seeds import seeds

import aiodist
from aiodist.links.peer import Peer
from aiodist.testing import Conditions, Simulation
from aiodist.testing.wires import Node, Wires
from aiodist.transports import bundle, stream, unix
from aiodist.transports.base import Link, Receiver
from aiodist.transports.bundle import Bundle
from aiodist.transports.joining import PARTS
from aiodist.transports.tcp import TcpTransport
from aiodist.transports.unix import UnixTransport

SMALL, MIDDLE, LARGE = 5, 3_000, 120_000
"""Elements of float64: frames of 4 KiB are copied, 256 KiB are one frame, and more is lent."""
SIZES = (SMALL, MIDDLE, LARGE)
KEPT = (SMALL, MIDDLE, 8_000)
"""Of these a copy is kept until the peer itself says that they have come, see `kept.COPIED`."""


async def collectives(group: aiodist.Group, sizes: Sequence[int] = SIZES) -> list[Any]:
    """All kinds of operations, and what came of them."""
    found: list[Any] = []
    size, rank = group.size, group.rank
    for length in sizes:
        x = np.arange(length, dtype=np.float64) + rank
        await group.all_reduce(x)
        found.append(x)
        x[:] = -1.0  # the memory is ours again
        x[:] = np.arange(length) * (1 + (rank == 0))
        await group.broadcast(x, 0)
        found.append(x.copy())
        out = await group.all_gather(np.full(length, rank))
        found.append(np.concatenate(out))
        parts = await group.all_to_all([np.full(length, rank * size + to) for to in range(size)])
        found.append(np.concatenate(parts))
        x[:] = 0.0
    await group.barrier()
    return [(array.shape, float(array.sum())) for array in found]


async def messages(group: aiodist.Group, sizes: Sequence[int] = SIZES) -> list[Any]:
    """Every rank sends numbered messages to every other, of all sizes."""
    others = [rank for rank in range(group.size) if rank != group.rank]

    async def give(dst: int) -> None:
        for number in range(24):
            x = np.full(sizes[number % 3], float(number))
            await group.send(x, dst)
            x[:] = -1.0

    async def take(src: int) -> list[float]:
        return [float(np.unique(await group.recv(src=src)).item()) for _ in range(24)]

    outcomes = await asyncio.gather(*map(give, others), *map(take, others))
    return list(outcomes[len(others) :])


PROGRAMS: dict[str, Any] = {"collectives": collectives, "messages": messages}
BREAKS = 6
QUICK = Conditions(delay=(20e-6, 200e-6), loss=0.0)
BUNDLED = Conditions(delay=(3e-3, 5e-3), loss=0.0, control="cubic")


@cache
def unbroken(name: str, sizes: tuple[int, ...] = SIZES) -> list[Any]:
    """What two ranks find where nothing breaks."""
    program = partial(PROGRAMS[name], sizes=sizes)
    return outcome(program, 0, 0, arrived=False, size=2)[0]


def outcome(
    program: Any, seed: int, at: int, *, arrived: bool, size: int, conditions: Conditions = QUICK
) -> tuple[list[Any], int]:
    simulation = Simulation(size, seed=seed, conditions=conditions, lease=5.0, op_timeout=30.0)
    network = simulation.network
    if at:
        network.break_after(simulation.nodes[0], simulation.nodes[1], at, arrived=arrived)
    outcomes = simulation.run(program)
    for found in outcomes:
        if isinstance(found, BaseException):
            raise found
    return outcomes, network.broken


@pytest.mark.strength(2)
@pytest.mark.parametrize("arrived", [False, True], ids=["in flight", "arrived"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", seeds(1, 2))
@pytest.mark.sample(2)
def test_a_link_that_breaks_at_byte_k(name, arrived, size, seed):
    program = PROGRAMS[name]
    expected, _ = outcome(program, 0, 0, arrived=arrived, size=size)
    broken = 0
    ats = [*range(1, 1500, 197), *(int(1500 * 1.8**step) for step in range(13))][seed::2]
    for at in ats:
        found, breaks = outcome(program, seed, at, arrived=arrived, size=size)
        assert found == expected, f"broken at byte {at}"
        broken += breaks
    assert broken > len(ats) // 2


@pytest.mark.strength(2)
@pytest.mark.parametrize("arrived", [False, True], ids=["in flight", "arrived"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("alone", [True, False], ids=["one", "all"])
@pytest.mark.parametrize("part", [0, 3])
@pytest.mark.sample(2)
def test_a_link_of_several_connections_that_breaks_at_byte_k(name, arrived, alone, part):
    """One of them breaks, or all do."""

    def some(network: Wires, a: Node, b: Node) -> int:
        # Connections of the control plane are to another node.
        socks = [sock for sock in a.sockets if sock.outgoing and sock.outgoing.target.node is b]
        bundled.append(len(socks) >= PARTS)
        for sock in socks[part : part + 1] if alone else socks:
            sock.broken_by_peer()
            sock.outgoing.target.broken_by_peer()
            network.broken += 1
        return network.broken

    bundled: list[bool] = []
    broken = 0
    for seed, at in enumerate(int(200 * 2.2**step) for step in range(11)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Wires, "break_links", some)
            patch.setattr(bundle, "EVENTS", 0)  # all are used as soon as one is full
            found, breaks = outcome(
                PROGRAMS[name], seed, at, arrived=arrived, size=2, conditions=BUNDLED
            )
        assert found == unbroken(name), f"broken at byte {at}"
        broken += breaks
    assert broken > 5 and sum(bundled) > 5


@pytest.mark.parametrize("at", [1, 40, 100, 150])
def test_connections_that_break_again_before_they_are_up(at):
    simulation = Simulation(2, seed=at, conditions=QUICK, lease=5.0, op_timeout=30.0)
    network, (a, b) = simulation.network, simulation.nodes[:2]
    break_links = network.break_links

    def again(one: Node, other: Node) -> int:
        if network.broken < BREAKS - 1:
            network.break_after(one, other, at)
        return break_links(one, other)

    network.break_links = again
    network.break_after(a, b, at)
    expected, _ = outcome(messages, 0, 0, arrived=False, size=2)
    assert simulation.run(messages) == expected
    assert network.broken >= BREAKS


@pytest.mark.parametrize("which", [{0}, {1}, {0, 1}, {1, 3}, {0, 1, 2}], ids=str)
def test_connections_that_break_while_they_are_taken(monkeypatch, which):
    # What broke it may lie behind the answer to the greeting: then writing fails in `attach`.
    attach, count = Peer.attach, itertools.count()

    def attach_and_break(self: Peer, link: Any, *args: Any, **kwargs: Any) -> None:
        attach(self, link, *args, **kwargs)
        if next(count) in which:
            link.break_off(ConnectionResetError("behind the answer"))

    monkeypatch.setattr(Peer, "attach", attach_and_break)
    found, _ = outcome(messages, 0, 0, arrived=False, size=2)
    assert next(count) > max(which)
    monkeypatch.undo()
    assert found == unbroken("messages")


def test_what_somebody_else_acknowledged_and_lost(monkeypatch):
    # A proxy says that it has what it loses then, and the memory of a large operation is its
    # user's again: that cannot be sent once more. It is noticed, and nothing wrong is in its place.
    monkeypatch.setattr(stream, "unacknowledged", lambda fd: 0)
    roomy = replace(QUICK, room=(1 << 20, 1 << 20))
    losses: list[str] = []
    for seed, at in enumerate(range(1_000_000, 3_000_000, 200_000)):
        try:
            found, _ = outcome(messages, seed, at, arrived=False, size=2, conditions=roomy)
        except aiodist.PeerLostError as error:
            losses.append(str(error))
        else:
            assert found == unbroken("messages"), f"broken at byte {at}"
    assert any("it cannot go on where the link broke" in text for text in losses)


async def over(transport: Any, program: Any) -> list[Any]:
    """What two ranks find over real connections."""
    async with aiodist.local(2, transports=(transport.kind,), op_timeout=30) as ranks:
        found = await asyncio.gather(*map(program, ranks))
        assert not any(group._actor.endpoint.lost for group in ranks)
    return list(found)


@dataclass
class Countdown:
    """So many bytes are `left` until a connection breaks; 0: none does any more."""

    left: int
    breaks: int = 0


class BreakingSocket(socket.socket):
    """A socket in place of `sock`, of which nothing but its number was used. Its connection breaks,
    as connections of this system do, after so many bytes both ways together."""

    def __init__(self, sock: socket.socket, after: Countdown) -> None:
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.setblocking(False)
        self._after = after

    def _passes(self, count: int) -> None:
        after = self._after
        if after.left:
            after.left -= count
            if not after.left:
                # Nothing more is sent from here, and what comes here from now on is refused: so all
                # that was acknowledged is read, and what was not may be lost.
                self.shutdown(socket.SHUT_RDWR)
                after.breaks += 1

    def send(self, data: Any, flags: int = 0) -> int:
        sent = super().send(memoryview(data)[: self._after.left or None])
        self._passes(sent)
        return sent

    def sendmsg(self, buffers: Any, *args: Any) -> int:
        return self.send(b"".join(buffers))

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        count = super().recv_into(buffer, min(len(buffer), self._after.left or len(buffer)))
        self._passes(count)
        return count

    def recvmsg_into(self, buffers: Any, *args: Any) -> Any:
        return self.recv_into(buffers[0]), [], 0, None


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("at", [0, 20, 260, 700, 5_000, 40_000, 500_000, 5_000_000])
@pytest.mark.parametrize("transport", [TcpTransport, UnixTransport])
@pytest.mark.sample(27)
def test_real_connections_that_break(run, monkeypatch, transport, name, at):
    dial = transport.dial
    after = Countdown(at)

    async def breaking(self: Any, address: str, receiver: Receiver) -> Link:
        link = await dial(self, address, receiver)
        link._socket = BreakingSocket(link._socket, after)
        return link

    monkeypatch.setattr(transport, "dial", breaking)
    found = run(over(transport, PROGRAMS[name]))
    monkeypatch.undo()
    assert found == unbroken(name)
    assert after.breaks == (at > 0)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("at", [0, 260, 5_000, 40_000, 500_000, 5_000_000])
@pytest.mark.sample(11)
def test_one_of_several_real_connections_breaks(run, monkeypatch, name, at):
    dial = TcpTransport.dial
    after = Countdown(at)

    async def breaking(self: Any, address: str, receiver: Receiver) -> Link:
        link = await dial(self, address, receiver)
        assert isinstance(link._socket, Bundle)
        for part in link._socket._parts:
            part.sock = BreakingSocket(part.sock, after)
        return link

    monkeypatch.setattr(TcpTransport, "_is_far", lambda self, sock: True)
    monkeypatch.setattr(TcpTransport, "_wants_bundle", lambda self, sock: True)
    monkeypatch.setattr(TcpTransport, "dial", breaking)
    monkeypatch.setattr(bundle, "PATIENCE", 0.01)  # the others do not end
    monkeypatch.setattr(bundle, "EVENTS", 0)
    found = run(over(TcpTransport, PROGRAMS[name]))
    monkeypatch.undo()
    assert found == unbroken(name)
    assert after.breaks == (at > 0)


def _bound(beyond: str) -> tuple[socket.socket, str]:
    """A listening socket of the kind of the one at `beyond`, and its address."""
    if not beyond.startswith("tcp:"):
        return unix.bound_socket("aiodist-cutter", unix.SCHEME)
    sock = socket.create_server(("127.0.0.1", 0))
    return sock, f"tcp://127.0.0.1:{sock.getsockname()[1]}"


async def _connection(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    scheme, _, where = address.partition(":")
    if scheme == "tcp":
        host, _, port = where.removeprefix("//").rpartition(":")
        return await asyncio.open_connection(host, int(port))
    sock = await unix.connected_socket(address, unix.SCHEME)
    return await asyncio.open_unix_connection(sock=sock)


class Cutter:
    """What is between ranks on a real network: it passes bytes on, and breaks the first connection
    after so many of them, with what it has taken and not passed on."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.cuts = 0
        self._servers: list[asyncio.Future[asyncio.Server]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._passing: set[asyncio.Task[None]] = set()

    async def address(self, beyond: str) -> str:
        """Where to connect to get to the address `beyond`, of TCP or a Unix socket."""
        own, own_address = _bound(beyond)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._watch(asyncio.current_task())
            self._writers.append(writer)
            try:
                there = await _connection(beyond)
            except OSError:
                writer.close()
                return
            self._writers.append(there[1])
            for source, target, other in (
                (reader, there[1], writer),
                (there[0], writer, there[1]),
            ):
                self._watch(asyncio.ensure_future(self._pass(source, target, other)))

        # Who dials may be cancelled, and asyncio leaves a socket open then.
        start = asyncio.start_server if beyond.startswith("tcp:") else asyncio.start_unix_server
        making = asyncio.ensure_future(start(connected, sock=own))
        self._servers.append(making)
        await asyncio.shield(making)
        return own_address

    def _watch(self, task: asyncio.Task[None] | None) -> None:
        assert task is not None
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _pass(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, back: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if 0 < self.left <= len(data):
                    target.write(data[: self.left - 1])
                    self.cuts += 1
                    self.left = 0
                    await asyncio.sleep(0)
                    break
                self.left = max(0, self.left - len(data))
                target.write(data)
                await target.drain()
        for writer in (target, back):
            writer.transport.abort()

    async def close(self) -> None:
        for making in self._servers:
            (await making).close()
        while self._passing:
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.wait(self._passing, return_when=asyncio.FIRST_COMPLETED)


@pytest.mark.one_loop
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("at", [20, 260, 700, 5_000, 40_000, 400_000])
@pytest.mark.parametrize("transport", [TcpTransport, UnixTransport])
@pytest.mark.sample(11)
def test_real_connections_that_are_cut_by_who_is_between(run, monkeypatch, transport, name, at):
    # The cutter loses what it has acknowledged. That this does not matter is promised of what is
    # kept until the peer itself has said that it came, so the arrays are no larger than that: of
    # larger ones, see `test_what_somebody_else_acknowledged_and_lost`.
    dial = transport.dial
    program = partial(PROGRAMS[name], sizes=KEPT)

    async def main() -> list[list[Any]]:
        cutter = Cutter(at)

        async def through(self: Any, address: str, receiver: Receiver) -> Link:
            return await dial(self, await cutter.address(address), receiver)

        monkeypatch.setattr(transport, "dial", through)
        try:
            found = await over(transport, program)
        finally:
            await cutter.close()
        assert cutter.cuts == 1
        return found

    cut = run(main())
    monkeypatch.undo()
    assert cut == unbroken(name, KEPT)
