"""The member's socket, which two threads write to."""

from __future__ import annotations

import asyncio
import socket
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

    thread = threading.Thread(
        target=lease._renew_for_ever,
        args=(Client(), loop, threading.Event(), 0.001, lease.Pulse(loop)),
    )
    thread.start()
    thread.join(30)
    assert end.theirs.recv(1) == b""
    assert not end.sock.is_open
    end.theirs.close()
