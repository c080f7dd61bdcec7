"""Setting up links through shared memory, and not being able to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import socket
from pathlib import Path
from typing import Any

import pytest

import aiodist
from aiodist.buffers.segment import Segment, unsupported_reason
from aiodist.links.endpoint import Endpoint
from aiodist.testing.links import LinkPair, connected
from aiodist.transports import handover, processes, registry
from aiodist.transports.base import Link
from aiodist.transports.shm import SCHEME, ShmListener, ShmTransport
from aiodist.transports.shm_rings import SEGMENT
from aiodist.transports.surroundings import ready
from aiodist.transports.unix import bound_socket

_HELLO = handover.greeting(SEGMENT)

pytestmark = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> str:
    return Path("/proc/self/maps").read_text(encoding="utf-8")


async def test_a_link_leaves_nothing_behind() -> None:
    before = open_files()
    async with connected(ShmTransport()) as ends:
        assert ends.a.kind == ends.b.kind == "shm"
        assert ends.a.peer_name == ends.b.peer_name == f"shm:pid {os.getpid()}"
        assert open_files() - before == 2, "a socket each"
    assert open_files() == before
    assert "aiodist-link" not in mappings()


async def test_bad_addresses() -> None:
    with pytest.raises(ValueError, match="shm:aiodist-"):
        await ShmTransport().dial("unix-abstract:aiodist-1", LinkPair().at_a)
    with pytest.raises(ConnectionRefusedError):
        await ShmTransport().dial("shm:aiodist-0", LinkPair().at_a)


async def listen() -> tuple[ShmListener, list[Link]]:
    accepted: list[Link] = []
    listener = await ShmTransport().listen(accepted.append)
    assert isinstance(listener, ShmListener)
    return listener, accepted


def call(listener: ShmListener) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect("\0" + listener.address.removeprefix(SCHEME))
    sock.setblocking(False)
    return sock


async def readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await ready(sock, loop.add_reader, loop.remove_reader)


async def ended(sock: socket.socket) -> None:
    """Wait until the other side has closed, without an answer."""
    async with asyncio.timeout(30):
        await readable(sock)
    with contextlib.suppress(ConnectionResetError):  # it closed with bytes of ours unread
        assert sock.recv(1) == b""


def passed(sock: socket.socket, data: bytes, nbytes: int, count: int = 1) -> None:
    own = Segment.create(nbytes)
    socket.send_fds(sock, [data], [own.fd] * count)
    own.close()


async def test_strangers_get_no_link(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    listener, accepted = await listen()
    before = open_files()
    for data, nbytes, count, complaint in (
        (b"GET / HTTP/1.1\r\n" * 2, SEGMENT, 1, "got 1 descriptors"),
        (_HELLO, SEGMENT, 0, "got 0 descriptors"),
        (_HELLO, SEGMENT + 4096, 1, f"of {SEGMENT + 4096} bytes"),
        (_HELLO[:-1], SEGMENT, 1, "got 1 descriptors"),
        (b"", SEGMENT, 0, "it ended the set-up"),
    ):
        with call(listener) as sock:
            if count:
                passed(sock, data, nbytes)
            elif data:
                sock.send(data)
            sock.shutdown(socket.SHUT_WR)
            await ended(sock)
        assert complaint in caplog.records[-1].getMessage()
        # Who only goes away is nothing to warn of.
        assert (caplog.records[-1].levelname == "WARNING") == bool(data)
    with call(listener) as sock:
        passed(sock, _HELLO, SEGMENT, count=100)  # 99 of them are nobody's
        async with asyncio.timeout(30):
            await readable(sock)
    (link,) = accepted
    link.close()
    await asyncio.sleep(0)
    assert open_files() == before
    listener.close()


async def test_memory_that_could_shrink_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    listener, accepted = await listen()
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.ftruncate(fd, SEGMENT)
    with call(listener) as sock:
        socket.send_fds(sock, [_HELLO], [fd])
        await ended(sock)
    os.close(fd)
    assert "SIGBUS" in caplog.text
    assert not accepted
    listener.close()


async def test_who_says_nothing_is_dropped_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handover, "PATIENCE", 0.0)
    listener, accepted = await listen()
    with call(listener) as sock:
        await ended(sock)
    assert not accepted
    assert not listener._callers
    listener.close()


async def test_closing_the_listener_drops_who_waits() -> None:
    listener, accepted = await listen()
    with call(listener) as sock:
        listener._ready()
        assert listener._callers
        listener.close()
        listener.close()
        await ended(sock)
    assert not accepted


async def test_closing_the_listener_closes_what_came_too_early() -> None:
    before = open_files()
    listener, accepted = await listen()
    with call(listener) as sock:
        passed(sock, _HELLO[:5], SEGMENT)
        listener._ready()
        (caller,) = listener._callers
        caller._readable()
        assert caller._fds
        listener.close()
    assert not accepted
    assert open_files() == before


async def test_closing_the_listener_in_a_forked_child_leaves_the_loop_alone() -> None:
    listener, _accepted = await listen()
    with call(listener) as sock:
        listener._ready()
        (caller,) = listener._callers
        number = caller.sock.fileno()
        listener.close_in_child()
        listener.close_in_child()
        listener.close()
        caller._timer.cancel()
        await ended(sock)
    assert asyncio.get_running_loop().remove_reader(number), "the loop was told"


async def test_other_users_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class OfAnother:
        size = 12

        def unpack(self, raw: bytes) -> tuple[int, int, int]:
            return 4711, os.getuid() + 1, 0

    listener, accepted = await listen()
    monkeypatch.setattr(processes, "_CREDENTIALS", OfAnother())
    with pytest.raises(PermissionError, match="process 4711 runs as user"):
        await ShmTransport().dial(listener.address, LinkPair().at_a)
    listener._ready()
    assert "refused a connection" in caplog.text
    assert not accepted
    listener.close()


async def test_a_cancelled_dial_closes_its_socket() -> None:
    before = open_files()
    silent, address = bound_socket("aiodist", SCHEME)
    dial = asyncio.ensure_future(ShmTransport().dial(address, LinkPair().at_a))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    dial.cancel()
    await asyncio.wait([dial])
    silent.close()
    assert open_files() == before


# ---- where memory cannot be shared ----


def fails_from(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `count`-th segment that this process maps, and later ones, cannot be mapped."""
    mapped: list[int] = []
    attach = Segment.attach

    def limited(fd: int, nbytes: int, *, writes: bool = False, keep: bool = False) -> Segment:
        mapped.append(fd)
        if len(mapped) >= count:
            os.close(fd)
            raise OSError(12, "Cannot allocate memory")
        return attach(fd, nbytes, writes=writes, keep=keep)

    monkeypatch.setattr(Segment, "attach", limited)


@pytest.mark.parametrize("count", [1, 2], ids=["the listener", "the dialler"])
async def test_either_side_cannot_map(
    count: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = open_files()
    fails_from(count, monkeypatch)
    ends = LinkPair()

    def accept(link: Link) -> None:
        link.receiver = ends.at_b

    listener = await ShmTransport().listen(accept)
    with pytest.raises(ConnectionError, match="no shared memory with process"):
        await ShmTransport().dial(listener.address, ends.at_a)
    listener.close()
    if count == 2:  # the listener thought that all was well
        await ends.until(lambda: bool(ends.at_b.ends))
        assert isinstance(ends.at_b.ends[0], ConnectionResetError)
    assert open_files() == before
    (said,) = caplog.records
    assert "other transports are tried: [Errno 12] Cannot allocate memory" in said.getMessage()


async def test_a_dialler_that_has_just_gone_is_nothing_to_warn_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener, accepted = await listen()
    with call(listener) as sock:
        passed(sock, _HELLO, SEGMENT)
    listener._ready()
    (caller,) = listener._callers
    caller._readable()  # EPIPE
    assert not accepted
    assert not caplog.records
    listener.close()


async def test_no_memory_for_a_segment_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()
    listener, accepted = await listen()

    def full(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", full)
    with pytest.raises(ConnectionError, match="Too many open files"):
        await ShmTransport().dial(listener.address, LinkPair().at_a)
    assert not accepted
    listener.close()
    assert open_files() == before


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_that_cannot_share_memory_use_sockets(
    run: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_from(count, monkeypatch)

    async def main() -> None:
        async with aiodist.local(2, transports=("shm", "unix")) as ranks:
            await asyncio.gather(*(group.send(b"x", 1 - group.rank) for group in ranks))
            assert await asyncio.gather(*(group.recv() for group in ranks)) == [b"x", b"x"]
            for group in ranks:
                link = group._actor.endpoint.peer(1 - group.rank).link
                assert link is not None
                assert link.kind == "unix"

    run(main())


# ---- the choice ----


def test_where_segments_are_not_supported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    registry._say_why.cache_clear()
    caplog.set_level("INFO")
    for _ in range(3):
        assert registry.choose(None) == ("inproc", "unix", "tcp")
        assert registry.choose(("shm", "tcp")) == ("tcp",)
    (said,) = caplog.records
    assert "ranks of this host do not share memory, they use sockets" in said.getMessage()
    assert "aarch64" in said.getMessage()
    with pytest.raises(ValueError, match="leaves no transport here, 'shm': the processor is"):
        registry.choose("shm")
    assert registry.choose("tcp") == ("tcp",)
    registry._say_why.cache_clear()


def test_ranks_of_one_host_share_memory(run: Any) -> None:
    async def main() -> None:
        async with aiodist.local(2, transports=None) as ranks:
            assert isinstance(ranks[0]._actor.endpoint, Endpoint)
            await asyncio.gather(*(group.barrier(tag="x") for group in ranks))
        async with aiodist.local(2, transports=("shm", "unix", "tcp")) as ranks:
            await asyncio.gather(*(group.barrier(tag="x") for group in ranks))
            link = ranks[0]._actor.endpoint.peer(1).link
            assert link is not None
            assert link.kind == "shm"

    run(main())
