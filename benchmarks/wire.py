"""A bare TCP connection as a library to measure: what carrying the bytes takes at least."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any


class Wire:
    """TCP with both directions full: `sendfile` from one thread, `recv_into` in another.

    Whatever the operation, its bytes go both ways at once: what an all_reduce or a ping-pong
    between two ranks has to move at least.
    """

    PORT = 29600
    BLOCK = 256 << 10

    computes = False

    def __init__(self, rank: int, size: int, host: str, file: str) -> None:
        import numpy

        self.rank, self.size = rank, size
        self.name = "sendfile and recv_into in Python"
        self._numpy: Any = numpy
        self._socket = _listen_once(host, self.PORT) if rank == 0 else _dial(host, self.PORT)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._block = memoryview(bytearray(self.BLOCK))
        self._file = os.memfd_create("wire")

    def empty(self, elements: int) -> Any:
        return self._numpy.empty(elements, self._numpy.float32)

    def view(self, array: Any) -> Any:
        return array

    def operation(self, op: str, x: Any, out: Any) -> Callable[[], Any]:
        return lambda: self._exchange(x.nbytes)

    def _exchange(self, nbytes: int) -> None:
        sender = threading.Thread(target=self._send, args=(nbytes,))
        sender.start()
        self._receive(nbytes)
        sender.join()

    def _receive(self, nbytes: int) -> None:
        while nbytes:
            got = self._socket.recv_into(self._block[:nbytes])
            if not got:
                raise ConnectionError("the other end of the wire is gone")
            nbytes -= got

    def _send(self, nbytes: int) -> None:
        os.ftruncate(self._file, max(nbytes, os.fstat(self._file).st_size))
        at = 0
        while at < nbytes:
            at += os.sendfile(self._socket.fileno(), self._file, at, nbytes - at)

    def barrier(self) -> None:
        self._exchange(1)

    def close(self) -> None:
        self._socket.close()
        os.close(self._file)


class Turns(Wire):
    """The same, but bytes go only where they have to: of a broadcast there, of a ping-pong there
    and back. Of a broadcast a byte comes back, so that its end is seen."""

    def operation(self, op: str, x: Any, out: Any) -> Callable[[], Any]:
        back = {"broadcast": 1, "ping_pong": x.nbytes}.get(op)
        if back is None:
            return super().operation(op, x, out)
        ways = (self._send, self._receive) if self.rank == 0 else (self._receive, self._send)
        return lambda: [way(nbytes) for way, nbytes in zip(ways, (x.nbytes, back), strict=True)]


def _listen_once(host: str, port: int) -> socket.socket:
    with socket.create_server((host, port)) as listener:
        listener.settimeout(30.0)
        accepted, _ = listener.accept()
    accepted.settimeout(None)
    return accepted


def _dial(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + 30.0
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
