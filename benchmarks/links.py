"""Links of aiodist's transports as libraries to measure: no loop, no engine, polled in line."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiodist.transports.base import Landing, Link, Transport
from aiodist.transports.registry import make
from aiodist.wire.frames import MAX_PAYLOAD
from aiodist_cli.bench_worker import ping_pong

HEADER = b"\x95\x01\x02\x03\x04\x05"
"""As large as that of a frame of a collective."""


class Counter:
    """Receives all into one block, and counts."""

    def __init__(self) -> None:
        self.block = memoryview(bytearray(MAX_PAYLOAD))
        self.memory = self.block  # of the frame that came last
        self.frames = 0

    def frame(self, link: Link, header: bytes, nbytes: int) -> Landing | None:
        self.memory = self.block[:nbytes]
        return self

    def landed(self) -> None:
        self.frames += 1

    def closed(self, link: Link, error: BaseException | None) -> None: ...


class Ends:
    """A link between two ranks. A ping-pong goes there and back; of any other operation, the bytes
    go both ways at once, in frames of 256 KiB."""

    kind: str
    computes = False

    def __init__(self, rank: int, size: int, host: str, file: str) -> None:
        import numpy

        self.rank, self.size = rank, size
        self.name = f"a link of the transport {self.kind!r}"
        self._numpy: Any = numpy
        self._loop = asyncio.new_event_loop()
        self._counter = Counter()
        self._wanted = 0
        transport = make(self.kind)
        meeting = (
            self._listen(transport, host, Path(file))
            if rank == 0
            else transport.dial(_read(Path(file)), self._counter)
        )
        self._link: Link = self._loop.run_until_complete(meeting)
        self._link.max_payload = MAX_PAYLOAD

    async def _listen(self, transport: Transport, host: str, file: Path) -> Link:
        accepted: asyncio.Future[Link] = self._loop.create_future()

        def accept(link: Link) -> None:
            link.receiver = self._counter
            accepted.set_result(link)

        listener = await transport.listen(accept, host=host)
        _write(file, listener.address)
        try:
            return await accepted
        finally:
            listener.close()

    def empty(self, elements: int) -> Any:
        return self._numpy.empty(elements, self._numpy.float32)

    def view(self, array: Any) -> Any:
        return array

    def operation(self, op: str, x: Any, out: Any) -> Callable[[], Any]:
        if op == "ping_pong":
            return ping_pong(self.rank, self._send, self._receive, x, out)
        return lambda: (self._send(x, 1 - self.rank), self._receive(x, 1 - self.rank))

    def _send(self, array: Any, peer: int) -> None:
        data = memoryview(array).cast("B")
        for at in range(0, len(data), MAX_PAYLOAD):
            self._link.send(HEADER, [data[at : at + MAX_PAYLOAD]])
            self._link.poll()

    def _receive(self, array: Any, peer: int) -> None:
        """Poll until as much as `array` has come, and all is sent."""
        self._wanted += -(-array.nbytes // MAX_PAYLOAD)
        while self._counter.frames < self._wanted or self._link.backlog:
            if not self._link.poll():
                if self._link.is_closed:
                    raise ConnectionError("the link broke")
                os.sched_yield()

    def barrier(self) -> None:
        self.operation("barrier", self._numpy.empty(1), None)()

    def close(self) -> None:
        self._loop.run_until_complete(self._link.finish(10.0))
        self._loop.close()


def _write(file: Path, address: str) -> None:
    """Say where rank 0 listens: the file is there as a whole, or not at all."""
    written = file.with_suffix(".new")
    written.write_text(address)
    written.rename(file)


def _read(file: Path) -> str:
    deadline = time.monotonic() + 30.0
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("rank 0 did not say where it listens")
        time.sleep(0.01)
    return file.read_text()


class Tcp(Ends):
    """A link over TCP."""

    kind = "tcp"


class Unix(Ends):
    """A link over an abstract Unix socket."""

    kind = "unix"
