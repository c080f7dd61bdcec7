"""Simulated sockets and networks: what TCP does, and what happens to it."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from aiodist.testing import Conditions, LinkConformance, Network, VirtualLoop
from aiodist.testing.wires import IDLE_GIVES_UP
from aiodist.transports import bundle
from aiodist.transports.base import Transport
from aiodist.transports.tcp import TcpTransport


class _NodeLoop(VirtualLoop):
    """A loop all of whose code runs on one node of a network."""

    def __init__(self, conditions: Conditions) -> None:
        super().__init__()
        self._node = Network(self, conditions=conditions).node("127.0.0.1")

    def create_task(self, coro, *, context=None, **options):
        return super().create_task(coro, context=self._node.context.copy(), **options)


class TestTcpOnASimulatedNetwork(LinkConformance):
    """Whatever the tests of transports ask of TCP, simulated sockets give, in turns of the loop."""

    test_poll_alone_moves_frames = None
    test_poll_moves_a_bounded_amount = None
    test_poll_takes_a_bounded_number_of_frames = None
    test_a_landing_that_moves_to_other_memory = None
    test_a_landing_that_nobody_wants_any_more = None

    def transport(self) -> Transport:
        return TcpTransport()

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return _NodeLoop(Conditions(room=(1 << 15, 1 << 20), loss=0.001))


class TestBundledTcpOnASimulatedNetwork(TestTcpOnASimulatedNetwork):
    """The same where links have several connections."""

    @pytest.fixture(autouse=True)
    def _use_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bundle, "EVENTS", 0)  # once one is full, and not for what it loses

    def new_loop(self) -> asyncio.AbstractEventLoop:
        far = Conditions(delay=(3e-3, 7e-3), room=(1 << 15, 1 << 20), loss=0.001, control="cubic")
        return _NodeLoop(far)


class Pair:
    """Two nodes, a server on the first."""

    def __init__(self, **conditions) -> None:
        self.loop = VirtualLoop()
        self.network = Network(self.loop, conditions=Conditions(**{"loss": 0.0, **conditions}))
        self.a, self.b = self.network.node("10.0.0.1"), self.network.node("10.0.0.2")
        self.received = bytearray()
        self.ends: list[object] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self) -> None:
        async def on_connection(reader, writer):
            self.writers.append(writer)
            try:
                while data := await reader.read(1 << 16):
                    self.received += data
                self.ends.append("end")
            except OSError as error:
                self.ends.append(errno.errorcode[error.errno])
            finally:
                writer.close()

        sock = self.loop.new_socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.bind(("0.0.0.0", 7000))
        self.server = await asyncio.start_server(on_connection, sock=sock)

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = self.loop.new_socket(socket.AF_INET, socket.SOCK_STREAM)
        await self.loop.sock_connect(sock, ("10.0.0.1", 7000))
        return await asyncio.open_connection(sock=sock)

    def play(self, client) -> None:
        try:
            self.loop.run_until_complete(self.a.spawn(self.serve()))
            self.loop.run_until_complete(self.b.spawn(client(self)))
            self.loop.run_until_complete(asyncio.sleep(1))
        finally:
            self.loop.close()


MESSAGE = bytes(range(256)) * 400


async def _send_all(pair: Pair) -> None:
    _, writer = await pair.dial()
    writer.write(MESSAGE)
    await writer.drain()
    writer.close()
    await writer.wait_closed()


def test_bytes_arrive_whole_and_in_order():
    for room in ((300, 300), (1 << 16, 1 << 20)):
        pair = Pair(room=room)
        pair.play(_send_all)
        assert bytes(pair.received) == MESSAGE
        assert pair.ends == ["end"]


def test_losses_only_take_time():
    quick, slow = Pair(), Pair(loss=0.3)
    quick.play(_send_all)
    slow.play(_send_all)
    assert quick.received == slow.received == MESSAGE
    assert quick.loop.time() + 0.2 < slow.loop.time()


def test_a_cut_holds_back_until_it_heals():
    async def client(pair: Pair) -> None:
        _, writer = await pair.dial()
        one, other = (pair.network.partition([pair.a], [pair.b]) for _ in range(2))
        writer.write(b"held back")
        for heal in (one, other):
            await asyncio.sleep(5)
            assert not pair.received
            heal()
        await asyncio.sleep(1)
        assert pair.received == b"held back"
        writer.close()

    Pair().play(client)


def test_a_cut_ends_an_idle_connection():
    """Earlier cuts that have healed do not count."""

    async def client(pair: Pair) -> None:
        reader, writer = await pair.dial()
        heal = pair.network.partition([pair.a], [pair.b])
        await asyncio.sleep(1)
        heal()
        await asyncio.sleep(IDLE_GIVES_UP - 5)
        pair.network.partition([pair.a], [pair.b])
        begun = pair.loop.time()
        with pytest.raises(TimeoutError):
            await reader.read()
        assert pair.loop.time() == pytest.approx(begun + IDLE_GIVES_UP)
        writer.close()

    pair = Pair()
    pair.play(client)
    assert pair.ends == ["ETIMEDOUT"]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("how", ["bytes", "eof"])
def test_what_comes_to_an_end_that_has_given_up_is_answered_by_a_reset(how, turned):
    async def client(pair: Pair) -> None:
        reader, writer = await pair.dial()
        pair.network.later_by(30, pair.network.partition([pair.a], [pair.b]))
        if how == "bytes":
            writer.write(b"held back")
        else:
            writer.write_eof()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        assert pair.loop.time() > 30
        writer.close()

    pair = Pair(loss=0.0, short=0.0)
    if turned:  # the ends give up in the order of the nodes
        pair.network.nodes = dict(reversed(pair.network.nodes.items()))
    pair.play(client)
    assert pair.ends == ["ETIMEDOUT"] and not pair.received


def test_connecting_waits_for_a_cut_to_heal():
    async def client(pair: Pair) -> None:
        pair.network.partition([pair.a], [pair.b])
        pair.network.later_by(5, pair.network.heal)
        _, writer = await pair.dial()
        assert pair.loop.time() > 5
        writer.close()

    Pair().play(client)


def test_nobody_listens():
    async def client(pair: Pair) -> None:
        pair.server.close()
        with pytest.raises(ConnectionRefusedError):
            await pair.dial()

    Pair().play(client)


@pytest.mark.parametrize(
    ("how", "seen"), [("reset", "ECONNRESET"), ("close", "end"), ("silent", None)]
)
def test_killing_a_node(how, seen):
    async def client(pair: Pair) -> None:
        _, writer = await pair.dial()
        writer.write(b"last words")
        await writer.drain()
        pair.network.later_by(0.5, pair.b.kill, how)
        await asyncio.sleep(100)
        raise AssertionError("the dead do not go on")

    pair = Pair()
    pair.loop.run_until_complete(pair.a.spawn(pair.serve()))
    task = pair.b.spawn(client(pair))
    pair.loop.run_until_complete(asyncio.sleep(2))
    assert not task.done()
    assert pair.ends == ([] if seen is None else [seen])
    pair.loop.close()


def test_a_node_is_killed_amid_what_it_sends():
    async def client(pair: Pair) -> None:
        _, writer = await pair.dial()
        pair.b.kill_after(5000, "close")
        writer.write(MESSAGE)
        await asyncio.sleep(100)

    pair = Pair(room=(1000, 1000))
    pair.loop.run_until_complete(pair.a.spawn(pair.serve()))
    pair.b.spawn(client(pair))
    pair.loop.run_until_complete(asyncio.sleep(2))
    assert 4000 <= len(pair.received) <= 6000
    assert MESSAGE.startswith(pair.received)
    pair.loop.close()
