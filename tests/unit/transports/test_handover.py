"""Passing a file descriptor on to those who have the key."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiodist.transports import handover as module
from aiodist.transports import processes
from aiodist.transports.handover import KEY_BYTES, Handover, fetch, receive_fds
from aiodist.transports.unix import SCHEME, bound_socket

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only")

TIMEOUT = 30.0


@pytest.fixture
def fd() -> Any:
    """A file of five bytes."""
    fd = os.memfd_create("handed over", os.MFD_CLOEXEC)
    os.write(fd, b"hello")
    yield fd
    os.close(fd)


def content(fd: int) -> bytes:
    return os.pread(fd, 100, 0)


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


def connect(handover: Handover) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect("\0" + handover.address.removeprefix(SCHEME))
    return sock


def test_everyone_with_the_key_gets_it(run: Any, fd: int) -> None:
    async def main() -> None:
        handover = await Handover.open(fd)
        assert handover.address.startswith("unix-abstract:aiodist-mem-")
        got = await asyncio.gather(
            *(fetch(handover.address, handover.key, TIMEOUT) for _ in range(5))
        )
        handover.close()
        for other, nbytes in got:
            assert nbytes == 5
            assert content(other) == b"hello"
            assert not os.get_inheritable(other)
            os.close(other)

    run(main())


async def test_the_offered_descriptor_may_be_closed(fd: int) -> None:
    copy = os.dup(fd)
    handover = await Handover.open(copy)
    os.close(copy)
    other, _nbytes = await fetch(handover.address, handover.key, TIMEOUT)
    assert content(other) == b"hello"
    os.close(other)
    handover.close()


async def test_a_wrong_key_gets_nothing(fd: int, caplog: pytest.LogCaptureFixture) -> None:
    handover = await Handover.open(fd)
    for key in (bytes(KEY_BYTES), handover.key[::-1], handover.key[:-1] + b"?"):
        with pytest.raises(ConnectionError, match="wrong key"):
            await fetch(handover.address, key, TIMEOUT)
    assert f"process {os.getpid()} showed a wrong key" in caplog.text
    other, _nbytes = await fetch(handover.address, handover.key, TIMEOUT)
    os.close(other)
    handover.close()


async def test_the_key_may_come_in_pieces(fd: int) -> None:
    handover = await Handover.open(fd)
    with connect(handover) as sock:
        for at in range(KEY_BYTES):
            sock.send(handover.key[at : at + 1])
            for _ in range(3):
                await asyncio.sleep(0)
        sock.setblocking(False)
        async with asyncio.timeout(TIMEOUT):
            await module.readable(asyncio.get_running_loop(), sock)
        data, fds = receive_fds(sock, 8, 1)
    assert int.from_bytes(data, "big") == 5
    os.close(fds[0])
    handover.close()


async def test_who_says_nothing_is_dropped_after_a_while(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    handover = await Handover.open(fd)
    with connect(handover) as mute, connect(handover) as half:
        half.send(handover.key[:-1])
        assert await ended(mute) == b""
        assert await ended(half) == b""
    monkeypatch.undo()
    with connect(handover) as gone:
        gone.send(b"x")
    other, _nbytes = await fetch(handover.address, handover.key, TIMEOUT)
    os.close(other)
    assert not handover._callers
    handover.close()


async def test_a_caller_that_leaves_before_the_answer(fd: int) -> None:
    handover = await Handover.open(fd)
    with connect(handover) as sock:
        sock.send(handover.key)
    other, _nbytes = await fetch(handover.address, handover.key, TIMEOUT)
    os.close(other)
    handover.close()


async def test_closing_drops_who_waits(fd: int) -> None:
    handover = await Handover.open(fd)
    with connect(handover) as mute:
        handover._acceptor._ready()
        handover.close()
        handover.close()
        assert await ended(mute) == b""
    with pytest.raises(OSError, match="passed no memory on"):
        await fetch(handover.address, handover.key, TIMEOUT)


async def test_closing_in_a_forked_child_leaves_the_loop_alone(fd: int) -> None:
    loop = asyncio.get_running_loop()
    handover = await Handover.open(fd)
    with connect(handover):
        handover._acceptor._ready()
        (caller,) = handover._callers
        number = caller.sock.fileno()
        handover.close_in_child()
        handover.close_in_child()
        handover.close()
        caller._timer.cancel()
        assert loop.remove_reader(number), "the loop was told"
        assert caller.sock.fileno() == -1
    # The listening socket is closed; its number may be another's by now.


async def test_other_users_get_nothing(
    fd: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handover = await Handover.open(fd)
    uid = os.getuid() + 1
    monkeypatch.setattr(processes, "_CREDENTIALS", CredentialsOf(uid))
    with connect(handover) as sock:
        assert await ended(sock) == b""
    assert "refused a connection" in caplog.text
    for _ in range(20):
        with connect(handover) as sock:
            assert await ended(sock) == b""
    assert caplog.text.count("refused a connection") == 10
    with pytest.raises(ConnectionError, match=f"runs as user {uid}"):
        await fetch(handover.address, handover.key, TIMEOUT)
    handover.close()


class CredentialsOf:
    """Credentials of user `uid`, whatever the kernel says."""

    size = 12

    def __init__(self, uid: int) -> None:
        self.uid = uid

    def unpack(self, raw: bytes) -> tuple[int, int, int]:
        return 1, self.uid, 0


@asynccontextmanager
async def impostor(answer: Callable[[socket.socket], None]) -> AsyncIterator[str]:
    """Listens like a `Handover`, and answers the first caller's key as it likes."""
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


@pytest.mark.parametrize(
    ("data", "count"), [(b"12345678", 0), (b"1234", 1), (b"", 0)], ids=["no fd", "short", "nothing"]
)
async def test_answers_that_make_no_sense(fd: int, data: bytes, count: int) -> None:
    before = open_files()
    async with impostor(lambda sock: send(sock, data, [fd] * count)) as address:
        with pytest.raises(ConnectionError, match=f"got {count} and {len(data)}"):
            await fetch(address, bytes(KEY_BYTES), TIMEOUT)
    assert open_files() == before


async def test_a_flood_of_descriptors_is_not_taken(fd: int) -> None:
    before = open_files()
    async with impostor(lambda sock: send(sock, bytes(7) + b"\x05", [fd] * 200)) as address:
        other, nbytes = await fetch(address, bytes(KEY_BYTES), TIMEOUT)
    assert nbytes == 5
    os.close(other)
    assert open_files() == before


def send(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    if data:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        sock.sendmsg([data], [rights] if fds else [])


async def test_a_silent_handover_is_given_up(fd: int) -> None:
    held: list[socket.socket] = []
    async with impostor(lambda sock: held.append(sock.dup())) as address:
        with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
            await fetch(address, bytes(KEY_BYTES), 0.01)
    for sock in held:
        sock.close()


async def test_nobody_there() -> None:
    with pytest.raises(OSError, match=r"aiodist-mem-0 passed no memory on: .*refused"):
        await fetch(f"{SCHEME}aiodist-mem-0", bytes(KEY_BYTES), TIMEOUT)
    with pytest.raises(ValueError, match="unix-abstract:"):
        await fetch("tcp://127.0.0.1:1", bytes(KEY_BYTES), TIMEOUT)


async def test_an_offer_that_is_no_descriptor() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        await Handover.open(-1)


async def test_a_full_table_of_descriptors_frees_the_socket(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> int:
        raise OSError(24, "Too many open files")

    before = open_files()
    monkeypatch.setattr(os, "dup", full)
    with pytest.raises(OSError, match="Too many open files"):
        await Handover.open(fd)
    assert open_files() == before
