"""The member's socket, which two threads write to."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from aiodist.control import lease
from aiodist.control.connection import ControlSocket
from aiodist.wire.frames import Decoder, Frame, encode

Play = Callable[[Callable[..., Coroutine[Any, Any, None]]], None]

LEASE = encode(b"lease")


class End:
    """A `ControlSocket`, and the other end of its connection."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.theirs.setblocking(False)
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.closed: asyncio.Queue[Exception] = asyncio.Queue()
        self.sock = ControlSocket(ours, self.frames.put_nowait, self.closed.put_nowait)

    async def read(self, count: int) -> list[Frame]:
        """The next `count` frames that arrive at the other end."""
        decoder = Decoder(max_payload=2**20)
        found: list[Frame] = []
        while len(found) < count:
            found += decoder.feed(await asyncio.get_running_loop().sock_recv(self.theirs, 65536))
        return found

    def close(self) -> None:
        self.sock.close()
        self.sock.close()
        self.theirs.close()


def test_frames_stay_whole_whoever_writes(play: Play) -> None:
    @play
    async def scenario(site: Any) -> None:
        end = End()
        big = [encode(b"big", bytes([i]) * 100_000) for i in range(3)]
        for data in big:
            end.sock.send(data)  # the first does not even fit
            thread = threading.Thread(target=end.sock.send_from_thread, args=(LEASE,))
            thread.start()
            thread.join()
        frames = await end.read(3)
        assert [frame.payload[:1] for frame in frames] == [b"\0", b"\1", b"\2"]
        assert {frame.header for frame in frames} == {b"big"}
        assert end.sock.send_from_thread(LEASE)
        assert await end.read(1) == [Frame(b"lease", b"")]
        end.close()
        assert not end.sock.send_from_thread(LEASE)
        end.sock.send(LEASE)


def test_what_is_queued_leaves_with_the_close_if_it_can(play: Play) -> None:
    @play
    async def scenario(site: Any) -> None:
        end = End()
        end.sock.send(encode(b"big", bytes(100_000)))
        reading = asyncio.create_task(end.read(1))
        await reading
        end.sock.send(encode(b"last"))
        end.close()


def test_the_end_is_told_once(play: Play) -> None:
    @play
    async def scenario(site: Any) -> None:
        end = End()
        end.theirs.close()
        assert isinstance(await end.closed.get(), ConnectionResetError)
        assert not end.sock.is_open
        end.close()
        assert end.closed.empty()

        end = End()
        end.theirs.close()
        end.sock.send(LEASE)
        end.sock.send(LEASE)
        assert isinstance(await end.closed.get(), ConnectionError)
        end.close()
        assert end.closed.empty()


def test_nothing_is_told_after_the_close(play: Play) -> None:
    @play
    async def scenario(site: Any) -> None:
        end = End()

        def close_at_once(frame: Frame) -> None:
            end.frames.put_nowait(frame)
            end.sock.close()

        end.sock.on_frame = close_at_once
        end.theirs.sendall(LEASE * 3)
        assert await end.frames.get() == Frame(b"lease", b"")
        assert end.frames.empty()
        end.close()


def test_the_lease_thread_gives_up_a_membership_whose_loop_is_closed() -> None:
    loop = asyncio.new_event_loop()

    async def make() -> End:
        return End()

    end = loop.run_until_complete(make())
    loop.close()

    class Client:
        abandon_from_thread = staticmethod(end.sock.abandon)

    end.theirs.settimeout(30)
    member: Any = Client()
    lease.Lease(member, loop, 0.001)
    assert end.theirs.recv(1) == b""
    assert not end.sock.is_open
    end.theirs.close()


class Renewed:
    """A member that counts its signs of life."""

    def __init__(self) -> None:
        self.signs = threading.Semaphore(0)
        self.threads: set[int] = set()

    def busy_from_thread(self, seconds: float, ident: int) -> bytes | None:
        return None

    def renew_from_thread(self, frame: bytes) -> None:
        self.threads.add(threading.get_ident())
        self.signs.release()

    def wait(self) -> None:
        assert self.signs.acquire(timeout=30)


def lease_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "aiodist-lease"]


async def test_one_thread_renews_the_leases_of_all() -> None:
    """As long as there are any. Those that fail do so alone."""
    loop = asyncio.get_running_loop()
    assert not lease_threads()
    members: list[Any] = [Renewed() for _ in range(50)]
    members[7].renew_from_thread = lambda frame: 1 / 0
    leases = [lease.Lease(member, loop, 0.001) for member in members]
    for member in members[:7] + members[8:]:
        for _ in range(3):
            member.wait()
    (thread,) = lease_threads()
    assert {ident for member in members for ident in member.threads} == {thread.ident}
    for one in leases:
        one.stop()
    thread.join(30)
    assert not lease_threads()
    later = Renewed()
    one = lease.Lease(later, loop, 0.001)
    later.wait()
    one.stop()


async def test_a_lease_that_was_stopped_is_renewed_no_more() -> None:
    loop = asyncio.get_running_loop()
    stopped, other = Renewed(), Renewed()
    first = lease.Lease(stopped, loop, 1000.0)
    second = lease.Lease(other, loop, 0.001)
    other.wait()
    first.stop()
    (thread,) = lease_threads()
    second.stop()
    thread.join(30)  # it does not sleep until the first would have been due
    assert not thread.is_alive()
    assert not stopped.signs.acquire(blocking=False)


def test_a_forked_child_has_no_leases() -> None:
    script = """
import asyncio, os, threading
from aiodist.control import lease

class Member:
    def __init__(self): self.signs = threading.Semaphore(0)
    def busy_from_thread(self, seconds, ident): return None
    def renew_from_thread(self, frame): self.signs.release()

async def main():
    loop = asyncio.get_running_loop()
    member = Member()
    kept = lease.Lease(member, loop, 0.001)
    assert member.signs.acquire(timeout=30)
    child = os.fork()
    if not child:
        mine = Member()
        assert not lease._renewals._due
        lease.Lease(mine, loop, 0.001)
        os._exit(not mine.signs.acquire(timeout=30))
    assert os.waitpid(child, 0)[1] == 0
    assert member.signs.acquire(timeout=30)
    kept.stop()  # or it would find the loop closed

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.stderr, done.returncode) == ("", 0)
