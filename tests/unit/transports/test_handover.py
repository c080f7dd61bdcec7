"""Memory that is handed over to those who have the key."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest

from aiodist.buffers.segment import Segment, unsupported_reason
from aiodist.transports import handover as module
from aiodist.transports import processes
from aiodist.transports.handover import KEY_BYTES, SegmentOffer, SegmentOffers, take, take_segment
from aiodist.transports.unix import SCHEME, bound_socket

pytestmark = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))

TIMEOUT = 30.0


SIZE = 5


@contextmanager
def offered() -> Iterator[SegmentOffer]:
    """Memory of five bytes, offered."""
    offer = SegmentOffer(asyncio.get_running_loop(), SIZE, "handed over")
    offer.segment.memory[:] = b"hello"
    try:
        yield offer
    finally:
        offer.close()


def got(offer: SegmentOffer) -> Coroutine[Any, Any, memoryview]:
    return asyncio.wait_for(take(offer.words, SIZE), TIMEOUT)


async def ended(sock: socket.socket) -> bytes:
    """What comes until the other side closes."""
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    came = b""
    async with asyncio.timeout(TIMEOUT):
        while True:
            try:
                part = await loop.sock_recv(sock, 100)
            except ConnectionResetError:  # it closed with bytes of ours unread
                return came
            if not part:
                return came
            came += part


def connect(offer: SegmentOffer) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect("\0" + offer.address.removeprefix(SCHEME))
    return sock


def test_everyone_with_the_words_gets_it(run: Any) -> None:
    async def main() -> None:
        with offered() as offer:
            assert offer.address.startswith("unix-abstract:aiodist-mem-")
            views = await asyncio.gather(*(got(offer) for _ in range(5)))
            mine = offer.segment.memory
        for view in views:
            assert view.readonly
            assert view == b"hello"
        mine[0] = ord("j")
        assert {bytes(view) for view in views} == {b"jello"}

    run(main())


def test_who_got_it_may_offer_it_again(run: Any) -> None:
    async def main() -> None:
        with offered() as offer:
            segment = await take_segment(offer.words, SIZE, keep=True)
        again = SegmentOffer(asyncio.get_running_loop(), SIZE, "handed on", segment)
        try:
            assert await got(again) == b"hello"
        finally:
            again.close()
        assert segment.fd == -1

    run(main())


async def test_a_wrong_key_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with offered() as offer:
        address, right = offer.words
        for key in (bytes(KEY_BYTES), right[::-1], right[:-1] + b"?"):
            with pytest.raises(ConnectionError, match="wrong key"):
                await take((address, key), SIZE)
        assert f"process {os.getpid()} showed a wrong key" in caplog.text
        assert await got(offer) == b"hello"


async def test_segments_of_one_socket(caplog: pytest.LogCaptureFixture) -> None:
    """Each has its words. If it was dropped before it was fetched, the log has no warning."""
    before = open_files()
    offers = SegmentOffers(asyncio.get_running_loop())
    segments = [Segment.create(SIZE) for _ in range(3)]
    for segment, data in zip(segments, (b"hello", b"there", b"world"), strict=True):
        segment.memory[:] = data
    first, second, third = (offers.add(number, each) for number, each in enumerate(segments))
    assert len({first[0], second[0], third[0]}) == 1
    assert await take(third, SIZE) == b"world"
    assert await take(first, SIZE) == b"hello"
    for _ in range(2):
        offers.drop(1)
    with pytest.raises(ConnectionError):
        await take(second, SIZE)
    assert await take(first, SIZE) == b"hello"
    assert not caplog.records
    offers.close()
    assert open_files() == before


async def test_the_key_may_come_in_pieces() -> None:
    with offered() as offer, connect(offer) as sock:
        _, key = offer.words
        for at in range(KEY_BYTES):
            sock.send(key[at : at + 1])
            for _ in range(3):
                await asyncio.sleep(0)
        sock.setblocking(False)
        async with asyncio.timeout(TIMEOUT):
            segment = await module.received(asyncio.get_running_loop(), sock, SIZE)
        assert segment.memory == b"hello"


async def test_who_says_nothing_is_dropped_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    with offered() as offer:
        with connect(offer) as mute, connect(offer) as half:
            half.send(offer.words[1][:-1])
            assert await ended(mute) == b""
            assert await ended(half) == b""
        monkeypatch.undo()
        with connect(offer) as gone:
            gone.send(b"x")
        assert await got(offer) == b"hello"
        assert not offer._callers


async def test_who_has_spoken_is_heard_though_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop was busy for long, and looks at the time before it looks at sockets."""
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    with offered() as offer, connect(offer) as sock:
        sock.send(offer.words[1])
        offer._ready()
        (caller,) = offer._callers
        loop.remove_reader(caller.sock.fileno())
        sock.setblocking(False)
        async with asyncio.timeout(TIMEOUT):
            segment = await module.received(loop, sock, SIZE)
        assert segment.memory == b"hello"


async def test_a_caller_that_leaves_before_the_answer() -> None:
    with offered() as offer:
        with connect(offer) as sock:
            sock.send(offer.words[1])
        assert await got(offer) == b"hello"


async def test_closing_drops_who_waits() -> None:
    with offered() as offer:
        with connect(offer) as mute:
            offer._ready()
            offer.close()
            offer.close()
            assert await ended(mute) == b""
        with pytest.raises(OSError, match="passed no memory on"):
            await got(offer)


async def test_nothing_is_open_once_all_have_it() -> None:
    before = open_files()
    with offered() as offer:
        view = await got(offer)
    assert view == b"hello"
    assert open_files() == before


async def test_other_users_get_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uid = os.getuid() + 1
    with offered() as offer:
        monkeypatch.setattr(processes, "_CREDENTIALS", CredentialsOf(uid))
        with connect(offer) as sock:
            assert await ended(sock) == b""
        assert "refused a connection" in caplog.text
        for _ in range(20):
            with connect(offer) as sock:
                assert await ended(sock) == b""
        assert caplog.text.count("refused a connection") == 10
        with pytest.raises(ConnectionError, match=f"runs as user {uid}"):
            await got(offer)


class CredentialsOf:
    """Credentials of user `uid`, whatever the kernel says."""

    size = 12

    def __init__(self, uid: int) -> None:
        self.uid = uid

    def unpack(self, raw: bytes) -> tuple[int, int, int]:
        return 1, self.uid, 0


@asynccontextmanager
async def impostor(answer: Callable[[socket.socket], None]) -> AsyncIterator[str]:
    """Listens like a `SegmentOffer`, and answers the first caller's key as it likes."""
    loop = asyncio.get_running_loop()
    listening, address = bound_socket("aiodist-mem", SCHEME)

    async def serve() -> None:
        sock, _ = await loop.sock_accept(listening)
        with sock:
            await loop.sock_recv(sock, KEY_BYTES)
            answer(sock)

    task = asyncio.ensure_future(serve())
    try:
        yield address
    finally:
        task.cancel()
        await asyncio.wait([task])
        listening.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(SIZE)
    yield made
    made.close()


HELLO = module.greeting(SIZE)


@pytest.mark.parametrize(
    ("data", "count", "complaint"),
    [
        (HELLO, 0, "got 0 descriptors"),
        (HELLO[:-1], 1, "got 1 descriptors"),
        (module.greeting(SIZE + 1), 1, "got 1 descriptors"),
        (b"", 0, "it ended the set-up"),
    ],
    ids=["no file", "short", "another size", "nothing"],
)
async def test_answers_that_make_no_sense(
    segment: Segment, data: bytes, count: int, complaint: str
) -> None:
    before = open_files()
    async with impostor(lambda sock: send(sock, data, [segment.fd] * count)) as address:
        with pytest.raises(ConnectionError, match=f"passed no memory on: .*{complaint}"):
            await take((address, bytes(KEY_BYTES)), SIZE)
    assert open_files() == before


async def test_a_file_of_another_size_is_refused() -> None:
    before = open_files()
    small = Segment.create(SIZE - 1)
    async with impostor(lambda sock: send(sock, HELLO, [small.fd])) as address:
        with pytest.raises(ConnectionError, match=f"of {SIZE - 1} bytes: expected {SIZE}"):
            await take((address, bytes(KEY_BYTES)), SIZE)
    small.close()
    assert open_files() == before


async def test_a_flood_of_descriptors_is_not_taken(segment: Segment) -> None:
    before = open_files()
    async with impostor(lambda sock: send(sock, HELLO, [segment.fd] * 200)) as address:
        view = await take((address, bytes(KEY_BYTES)), SIZE)
    assert view.nbytes == SIZE
    assert open_files() == before


def send(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    if data:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        sock.sendmsg([data], [rights] if fds else [])


async def test_who_waits_no_longer_leaves_nothing() -> None:
    before = open_files()
    asked = asyncio.Event()
    async with impostor(lambda sock: asked.set()) as address:
        waiting = asyncio.ensure_future(take((address, bytes(KEY_BYTES)), SIZE))
        await asked.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
    assert open_files() == before


async def test_nobody_there() -> None:
    key = bytes(KEY_BYTES)
    with pytest.raises(OSError, match=r"aiodist-mem-0 passed no memory on: .*refused"):
        await take((f"{SCHEME}aiodist-mem-0", key), SIZE)
    with pytest.raises(OSError, match="unix-abstract:"):
        await take(("tcp://127.0.0.1:1", key), SIZE)


@pytest.mark.parametrize(
    ("words", "nbytes"),
    [
        (None, SIZE),
        (("a",), SIZE),
        (("a", "b"), SIZE),
        *((("a", b"b"), nbytes) for nbytes in ("many", -1, 0, 1 << 63)),
    ],
)
async def test_words_that_make_no_sense(words: object, nbytes: object) -> None:
    with pytest.raises(OSError, match="malformed words about memory"):
        await take(words, nbytes)


async def test_a_full_table_of_descriptors_frees_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: Any) -> Any:
        raise OSError(24, "Too many open files")

    before = open_files()
    monkeypatch.setattr(module, "bound_socket", full)
    with pytest.raises(OSError, match="Too many open files"):
        SegmentOffer(asyncio.get_running_loop(), SIZE, "handed over")
    assert open_files() == before


def open_in_child(fds: list[int]) -> bool:
    """Whether a child of fork has one of these files."""
    child = os.fork()
    if not child:
        for fd in fds:
            with suppress(OSError):
                os.fstat(fd)
                os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


async def test_a_forked_child_closes_its_copies_of_what_is_offered() -> None:
    with offered() as offer:
        assert not open_in_child([offer.segment.fd, offer._socket.fileno()])
        assert bytes(await got(offer)) == b"hello"
