"""Several connections as one stream: order, ends, breaks, and what the peer's system has."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Iterator

import pytest

from aiodist.errors import ProtocolError
from aiodist.transports.bundle import CHUNK, EVENTS, IN_A_ROW, Bundle, Losses

HEAD = struct.Struct(">QI")
COUNT = 4


def tcp_pair(listening: socket.socket) -> tuple[socket.socket, socket.socket]:
    one = socket.create_connection(listening.getsockname())
    other, _ = listening.accept()
    one.setblocking(False)
    other.setblocking(False)
    return one, other


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        made = [tcp_pair(listening) for _ in range(COUNT)]
    yield made
    for pair in made:
        for sock in pair:
            sock.close()


Pairs = list[tuple[socket.socket, socket.socket]]


def receiving(pairs: Pairs) -> Bundle:
    return Bundle(asyncio.get_running_loop(), [there for _, there in pairs])


def taken(bundle: Bundle, size: int = 1 << 20) -> bytes | None:
    """What is there; None: nothing."""
    try:
        return bundle.recv(size)
    except BlockingIOError:
        return None


async def all_of(bundle: Bundle, size: int) -> bytes:
    """The next `size` bytes, read as the loop says that there are some."""
    data = bytearray()
    ready = asyncio.Event()
    bundle.watch(ready.set)
    async with asyncio.timeout(20):
        while len(data) < size:
            found = taken(bundle, size - len(data))
            if found is None:
                await ready.wait()
                ready.clear()
            else:
                assert found
                data += found
    bundle.unwatch()
    return bytes(data)


@pytest.mark.parametrize("seed", range(8))
async def test_chunks_come_in_order_whatever_overtakes_what(pairs: Pairs, seed: int) -> None:
    """Chunks of all sizes, on any connection, in any pieces."""
    chance = random.Random(seed)
    data = chance.randbytes(300_000)
    streams = [bytearray() for _ in pairs]
    at = 0
    while at < len(data):
        size = min(chance.choice([1, 7, 500, 20_000, CHUNK]), len(data) - at)
        chance.choice(streams).extend(HEAD.pack(at, size) + data[at : at + size])
        at += size
    bundle = receiving(pairs)
    got = asyncio.ensure_future(all_of(bundle, len(data)))
    loop = asyncio.get_running_loop()
    while any(streams):
        index = chance.choice([index for index, stream in enumerate(streams) if stream])
        size = chance.choice([1, 5, 3000, 90_000])
        await loop.sock_sendall(pairs[index][0], bytes(streams[index][:size]))
        del streams[index][:size]
    assert await got == data


@pytest.mark.parametrize("seed", range(4))
async def test_a_stream_there_and_back(pairs: Pairs, seed: int) -> None:
    """Between two bundles, in writes of all sizes, of several buffers."""
    chance = random.Random(seed)
    loop = asyncio.get_running_loop()
    sender = Bundle(loop, [here for here, _ in pairs])
    sender._use_all()
    data = chance.randbytes(5_000_000)
    got = asyncio.ensure_future(all_of(receiving(pairs), len(data)))
    room = asyncio.Event()
    at = 0
    while at < len(data):
        sizes = [chance.choice([0, 1, 100, 70_000, 300_000]) for _ in range(3)]
        views, stop = [], at
        for size in sizes:
            views.append(memoryview(data)[stop : stop + size])
            stop += size
        try:
            at += sender.sendmsg(views)
        except BlockingIOError:
            room.clear()
            sender.arm(room.set)
            await room.wait()
            sender.disarm()
    assert await got == data
    assert not sender.has_rest
    for _ in range(100_000):
        if not sender.unacknowledged():
            break
        await asyncio.sleep(0)
    assert sender.unacknowledged() == 0
    sender.forget()


async def test_who_is_ahead_is_left_to_the_system(pairs: Pairs) -> None:
    """Of a chunk whose turn has not come nothing but the position is read."""
    bundle = receiving(pairs)
    pairs[1][0].send(HEAD.pack(5, 4) + b"late")
    await asyncio.get_running_loop().sock_sendall(pairs[2][0], HEAD.pack(9, 2))
    for _ in range(100_000):
        assert taken(bundle) is None
        if len(bundle._ahead) == 2:
            break
        await asyncio.sleep(0)
    assert pairs[1][1].recv(100, socket.MSG_PEEK) == b"late"
    pairs[0][0].send(HEAD.pack(0, 5) + b"first")
    assert await all_of(bundle, 9) == b"firstlate"


async def test_the_loop_is_not_woken_by_what_has_to_wait(pairs: Pairs) -> None:
    """A part brings a later chunk while another is amid the one whose turn it is."""
    bundle = receiving(pairs)
    pairs[0][0].send(HEAD.pack(0, 10) + b"begun")
    assert await all_of(bundle, 5) == b"begun"
    calls: list[bytes | None] = []
    called = asyncio.Event()

    def read() -> None:
        calls.append(taken(bundle))
        called.set()

    bundle.watch(read)
    pairs[1][0].send(HEAD.pack(10, 5) + b"later")
    async with asyncio.timeout(20):
        await called.wait()
    for _ in range(100):
        await asyncio.sleep(0)
    assert calls == [None]
    pairs[0][0].send(b", end")
    async with asyncio.timeout(20):
        while b"".join(data or b"" for data in calls) != b", endlater":
            called.clear()
            await called.wait()
    bundle.forget()


async def test_it_ends_where_all_end(pairs: Pairs) -> None:
    bundle = receiving(pairs)
    pairs[0][0].send(HEAD.pack(0, 3) + b"end")
    for here, _ in pairs[1:]:
        here.shutdown(socket.SHUT_WR)
    assert await all_of(bundle, 3) == b"end"
    assert taken(bundle) is None
    ready = asyncio.Event()
    bundle.watch(ready.set)
    pairs[0][0].shutdown(socket.SHUT_WR)
    await ready.wait()
    assert taken(bundle) == b""
    bundle.forget()


async def test_an_end_behind_what_was_read_is_told(pairs: Pairs) -> None:
    """The loop calls again, though the connections have nothing more to say."""
    bundle = receiving(pairs)
    pairs[0][0].send(HEAD.pack(0, 3) + b"end")
    for here, _ in pairs:
        here.shutdown(socket.SHUT_WR)
    found: list[bytes | None] = []
    over = asyncio.Event()

    def read() -> None:
        found.append(taken(bundle))
        if found[-1] == b"":
            over.set()

    bundle.watch(read)
    async with asyncio.timeout(20):
        await over.wait()
    assert b"".join(data or b"" for data in found) == b"end"
    bundle.forget()


async def to_the_end(bundle: Bundle) -> bytes:
    """What comes before it ends. Raises OSError where it is broken."""
    ready, data = asyncio.Event(), b""
    bundle.watch(ready.set)
    try:
        async with asyncio.timeout(20):
            while (found := taken(bundle)) != b"":
                data += found or b""
                if found is None:
                    await ready.wait()
                    ready.clear()
        return data
    finally:
        bundle.forget()


async def test_a_part_that_breaks_breaks_all_but_what_was_there(pairs: Pairs) -> None:
    bundle = receiving(pairs)
    pairs[0][0].send(HEAD.pack(0, 5) + b"there")
    pairs[1][0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    pairs[1][0].close()
    data = await all_of(bundle, 5)
    assert data == b"there"
    with pytest.raises(ConnectionResetError):
        await to_the_end(bundle)


async def test_what_was_begun_over_a_part_that_breaks_is_missed_at_once(pairs: Pairs) -> None:
    """Though the others take what is sent next, and though nothing is sent after that."""
    sender = Bundle(asyncio.get_running_loop(), [here for here, _ in pairs])
    told: asyncio.Future[OSError] = asyncio.get_running_loop().create_future()
    sender.tell(lambda: None, told.set_result)
    while not sender.has_rest:
        sender.send(bytes(CHUNK))
    sender._use_all()
    sender._turn = 1
    there = pairs[0][1]
    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    there.close()
    assert sender.send(bytes(CHUNK * COUNT)) == CHUNK * COUNT
    async with asyncio.timeout(20):
        assert isinstance(await told, OSError)
    sender.forget()


async def test_a_part_that_ends_alone_ends_all_after_a_while(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody between the two has closed it: what is sent over it would be waited for for ever.
    Not while the others bring something."""
    monkeypatch.setattr("aiodist.transports.bundle.PATIENCE", 0.0)
    bundle = receiving(pairs)
    looked: list[int] = []
    look = bundle._look

    def counted(position: int, chances: int) -> None:
        looked.append(chances)
        if len(looked) == 3:
            pairs[0][0].send(HEAD.pack(0, 4) + b"more")
            assert bundle.recv(100) == b"more"
        look(position, chances)

    monkeypatch.setattr(bundle, "_look", counted)
    pairs[1][0].shutdown(socket.SHUT_WR)
    assert await to_the_end(bundle) == b""
    assert looked == [3, 2, 1, 3, 2, 1, 0]


@pytest.mark.parametrize("said", [HEAD.pack(0, 50) + b"amid", HEAD.pack(0, 5)[:7]])
async def test_a_part_that_ends_amid_a_chunk(pairs: Pairs, said: bytes) -> None:
    bundle = receiving(pairs)
    pairs[1][0].send(said)
    pairs[1][0].shutdown(socket.SHUT_WR)
    assert await to_the_end(bundle) == said[HEAD.size :]


async def test_ends_with_a_chunk_missing(pairs: Pairs) -> None:
    """One part has a chunk that is ahead, and nobody can bring the one before."""
    bundle = receiving(pairs)
    pairs[0][0].send(HEAD.pack(9, 3) + b"end")
    for here, _ in pairs[1:]:
        here.shutdown(socket.SHUT_WR)
    assert await to_the_end(bundle) == b""


@pytest.mark.parametrize(
    ("position", "size"), [(0, 0), (0, CHUNK + 1), (1, 5)], ids=["empty", "large", "again"]
)
async def test_chunks_that_make_no_sense(pairs: Pairs, position: int, size: int) -> None:
    bundle = receiving(pairs)
    pairs[0][0].send(HEAD.pack(0, 2) + b"ok")
    assert await all_of(bundle, 2) == b"ok"
    ready = asyncio.Event()
    bundle.watch(ready.set)
    pairs[1][0].send(HEAD.pack(position + 2 * (position == 0), size))
    await ready.wait()
    with pytest.raises(ProtocolError, match="makes no sense"):
        taken(bundle)
    bundle.forget()


async def test_what_was_begun_is_sent_though_its_memory_changes(pairs: Pairs) -> None:
    """A connection takes a part of a chunk: the rest is copied."""
    sender = Bundle(asyncio.get_running_loop(), [here for here, _ in pairs])
    sent = bytearray()
    while not sender.has_rest:
        memory = bytearray([len(sent) % 251]) * CHUNK
        sent += memory[: sender.send(memoryview(memory))]
        memory[:] = b"\xff" * CHUNK
    assert await all_of(receiving(pairs), len(sent)) == sent
    sender.forget()


async def test_what_the_peers_system_may_not_have(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All from the oldest chunk on of which something is not acknowledged."""
    underway = dict.fromkeys([here.fileno() for here, _ in pairs], 0)
    monkeypatch.setattr("aiodist.transports.bundle.unacknowledged", underway.get)
    sender = Bundle(asyncio.get_running_loop(), [here for here, _ in pairs])
    sender._use_all()
    for number in range(3):  # one chunk to each of three parts
        for fd in underway:
            underway[fd] = 1 << 30  # nothing is acknowledged
        assert sender.send(bytes(CHUNK)) == CHUNK, number
    assert sender.unacknowledged() == 3 * CHUNK
    first, second, third, _ = underway
    underway[first] = underway[third] = 0
    assert sender.unacknowledged() == 2 * CHUNK
    underway[second] = 1
    assert sender.unacknowledged() == 2 * CHUNK
    underway[second] = 0
    assert sender.unacknowledged() == 0
    sender.send(b"small")
    underway.update(dict.fromkeys(underway, 1))
    assert sender.unacknowledged() == 5
    underway.clear()  # the system does not say
    assert sender.unacknowledged() is None


@pytest.mark.parametrize("trip", [0.01, 0.1])
def test_who_goes_on_losing(trip: float) -> None:
    """Losses that are apart, and follow one another."""
    losses = Losses(trip)
    apart = max(0.1, 4 * trip)
    assert [losses.look(number * apart, number) for number in range(EVENTS + 1)] == [
        *[False] * EVENTS,
        True,
    ]
    assert losses.look(1e9, EVENTS), "it does not stop again"


def test_who_loses_once_or_seldom() -> None:
    """The end of a slow start, and of what the queues on the way take."""
    losses = Losses(0.1)
    assert not any(losses.look(1.0 + at / 1000, at) for at in range(1, 400))
    assert not any(losses.look(100 * at, 400 + at) for at in range(1, 50))
    assert not any(losses.look(1e6 + at, 450) for at in range(50))
    seldom = Losses(0.1)
    assert not any(seldom.look(1.0 + at * IN_A_ROW * 0.4, at) for at in range(1, 50))


async def test_one_connection_is_used_until_it_goes_on_losing(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    sender = Bundle(loop, [here for here, _ in pairs])
    lost = 0
    monkeypatch.setattr("aiodist.transports.bundle.sent_again", lambda sock: lost)
    monkeypatch.setattr(loop, "time", lambda: 1000.0 + lost / 2)
    with pytest.raises(BlockingIOError):
        while True:
            sender.send(bytes(CHUNK))
    first, *others = sender._parts
    assert first.written and not any(part.written for part in others)
    assert sender.has_rest  # of a chunk that is begun, so there is no room for sure
    room = asyncio.Event()
    sender.arm(room.set)
    for lost in range(EVENTS + 1):
        before = [part.written for part in sender._parts]
        try:
            taken = sender.send(bytes(CHUNK * COUNT))
        except BlockingIOError:
            taken = 0
        assert (taken > 0) is (lost == EVENTS)
    assert [part.written > then for part, then in zip(sender._parts, before, strict=True)] == [
        False,
        *[True] * (COUNT - 1),
    ]
    async with asyncio.timeout(20):
        await room.wait()  # who has room calls, also of those that were not used before
    sender.forget()
