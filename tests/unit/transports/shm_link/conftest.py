"""A shared-memory link against raw rings and a raw socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from aiodist.testing.links import LinkPair
from aiodist.transports import shm_rings
from aiodist.transports.shm_link import ShmLink
from aiodist.transports.shm_rings import PAGE, RING, SEGMENT, Rings
from aiodist.wire import frames


class Raw:
    """The other end: rings without a link, and a socket."""

    def __init__(self, own: bytearray, peer: bytearray, sock: socket.socket) -> None:
        self.words = memoryview(own)[:PAGE].cast("Q")
        self.theirs = memoryview(peer)[:PAGE].cast("Q")
        self.rings = Rings(memoryview(own), memoryview(peer), self.bell)
        self.sock = sock

    def bell(self) -> None:
        self.sock.send(b"\0")

    def send(self, data: bytes) -> None:
        """Write what there is room for."""
        assert self.rings.write([data]) == len(data)

    def read(self) -> bytes:
        data = b""
        while have := self.rings.available():
            start = (self.rings.read - self.rings.origin) % RING
            count = min(have, RING - start)
            data += self.rings.incoming[start : start + count]
            self.rings.taken(count)
        return data

    def bells(self) -> int:
        """How many bells came since the last call."""
        try:
            return len(self.sock.recv(1000))
        except BlockingIOError:
            return 0

    @property
    def peer_sleeps(self) -> bool:
        return self.theirs[shm_rings._ASLEEP] != 0


@asynccontextmanager
async def wired(**limits: int) -> AsyncIterator[Any]:
    """`.link`, `.raw` the other end, `.seen` what the link brought."""
    theirs, ours = socket.socketpair()
    theirs.setblocking(False)
    ours.setblocking(False)
    own, peer = bytearray(SEGMENT), bytearray(SEGMENT)
    ends = LinkPair()
    link = ShmLink(
        asyncio.get_running_loop(),
        ours,
        memoryview(own),
        memoryview(peer).toreadonly(),
        peer_name="raw",
        receiver=ends.at_a,
    )
    link.max_payload = limits.get("max_payload", 1 << 26)
    link.max_header = limits.get("max_header", frames.MAX_HEADER)
    link.start()
    raw = Raw(peer, own, theirs)
    try:
        yield SimpleNamespace(link=link, raw=raw, seen=ends.at_a, until=ends.until, ends=ends)
    finally:
        link.close()
        await ends.until(lambda: bool(ends.at_a.ends))
        theirs.close()
    assert len(ends.at_a.ends) == 1
    assert not ends.at_a.mistakes


async def asleep(w: Any, after: int = 0) -> int:
    """Let the loop turn until the link sleeps, after its `after`-th sleep: which sleep it is."""
    for _ in range(10_000):
        sleep: int = w.raw.theirs[shm_rings._ASLEEP]
        if sleep > after:
            return sleep
        await asyncio.sleep(0)
    raise AssertionError("the link does not sleep")


async def came(w: Any, count: int) -> bytes:
    """Read at the other end until `count` bytes have come."""
    data = bytearray()
    for _ in range(10_000):
        data += w.raw.read()
        if len(data) >= count:
            return bytes(data)
        await asyncio.sleep(0)
    raise AssertionError(f"{len(data)} bytes came, not {count}")


@pytest.fixture(name="wired")
def _wired() -> Any:
    """``async with wired() as w:`` see above."""
    return wired


@pytest.fixture(name="asleep")
def _asleep() -> Any:
    return asleep


@pytest.fixture(name="came")
def _came() -> Any:
    return came
