"""Passing a file descriptor to other processes of this host, once, at set-up.

`Handover` listens at a random abstract Unix socket. A caller that runs as the same user and
shows the key gets the descriptor by SCM_RIGHTS; everybody else gets nothing. Address and key
travel to the peers by a way of the caller's choice.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Self

from aiodist.transports.processes import peer_pid
from aiodist.transports.sockets import Acceptor, log
from aiodist.transports.sparing import Sparing
from aiodist.transports.unix import SCHEME, bound_socket, connected_socket

KEY_BYTES = 16
"""Length of the key."""

PATIENCE = 10.0
"""Seconds that a caller has to show the key."""

_SIZE = struct.Struct(">Q")
_FD_BYTES = array.array("i").itemsize


class Handover:
    """Gives one file descriptor to every caller that has the `key`, until closed.

    `address` ("unix-abstract:aiodist-mem-…") and `key` are what `fetch` takes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self._loop = loop
        self._size = _SIZE.pack(os.fstat(fd).st_size)
        self._callers: set[Caller] = set()
        self._sparing = Sparing(log)
        self._user = os.geteuid()
        sock, self.address = bound_socket("aiodist-mem", SCHEME)
        try:
            self._fd = os.dup(fd)  # ours: the number of a closed one may soon mean another file
            self._acceptor = Acceptor(loop, sock, self.address, self._take)
        except BaseException:
            sock.close()
            raise

    @classmethod
    async def open(cls, fd: int) -> Self:
        """Offer `fd`, which may be closed afterwards. Raises OSError."""
        return cls(asyncio.get_running_loop(), fd)

    def _take(self, sock: socket.socket) -> None:
        try:
            pid = peer_pid(sock, self._user)
        except PermissionError as error:
            self._sparing.warning("refused", "%s refused a connection: %s", self.address, error)
            sock.close()
            return
        self._callers.add(Caller(self._loop, sock, pid, KEY_BYTES, 0, self._heard))

    def _heard(self, caller: Caller, key: bytes, fds: list[int]) -> None:
        self._callers.discard(caller)
        with caller.release() as sock:
            if hmac.compare_digest(key, self.key):
                with contextlib.suppress(OSError):  # it is gone: its affair
                    socket.send_fds(sock, [self._size], [self._fd])
            elif key:
                text = "%s: process %d showed a wrong key"
                self._sparing.warning("wrong key", text, self.address, caller.pid)

    def close(self) -> None:
        """Stop. What was given stays given. Idempotent."""
        self._acceptor.close()
        for caller in self._callers:
            caller.release().close()
        self._drop()

    def close_in_child(self) -> None:
        """After a fork, in the child: drop this process' copies, leaving the loop alone."""
        self._acceptor.close_in_child()
        for caller in self._callers:
            caller.sock.close()
        self._drop()

    def _drop(self) -> None:
        self._callers.clear()
        fd, self._fd = self._fd, -1
        if fd != -1:
            os.close(fd)


class Caller:
    """A connection that has not said yet what it has to say first: `nbytes` bytes, and at most
    `most` file descriptors with them, within `PATIENCE` seconds.

    Then `heard(caller, data, fds)` is called, once, which must `release` it; `data` is shorter,
    or empty, where the other side went away or took too long.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        pid: int,
        nbytes: int,
        most: int,
        heard: Callable[[Caller, bytes, list[int]], None],
    ) -> None:
        self.sock = sock
        self.pid = pid
        self._loop = loop
        self._nbytes = nbytes
        self._most = most
        self._heard = heard
        self._data = b""
        self._fds: list[int] = []
        self._timer = loop.call_later(PATIENCE, self._over)
        loop.add_reader(sock.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            data, fds = receive_fds(
                self.sock, self._nbytes - len(self._data), self._most - len(self._fds)
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, fds = b"", []
        self._data += data
        self._fds += fds
        if not data or len(self._data) == self._nbytes:
            self._over()

    def _over(self) -> None:
        fds, self._fds = self._fds, []
        self._heard(self, self._data, fds)

    def release(self) -> socket.socket:
        """Stop listening to it: its socket, which is the caller's now."""
        self._timer.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self.sock.fileno())
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        return self.sock


async def fetch(address: str, key: bytes, timeout: float | None) -> tuple[int, int]:
    """Get the descriptor that a `Handover` at `address` offers: (fd, size of the file in bytes).
    The caller closes `fd`, which is not inherited by child processes.

    Raises OSError where the other side cannot be reached, is another user's, refuses, breaks off,
    or takes longer than `timeout` seconds (TimeoutError; None: any time).
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            with await connected_socket(address, SCHEME) as sock:
                peer_pid(sock, os.geteuid())
                await loop.sock_sendall(sock, key)
                await readable(loop, sock)
                data, fds = receive_fds(sock, _SIZE.size, 1)
    except TimeoutError:
        raise TimeoutError(
            f"{address} passed no memory on within {timeout:g} s: is its process stopped?"
        ) from None
    except OSError as error:
        raise ConnectionError(f"{address} passed no memory on: {error}") from error
    if len(fds) != 1 or len(data) != _SIZE.size:
        for fd in fds:
            os.close(fd)
        raise ConnectionError(
            f"{address} passed no memory on: expected one descriptor and {_SIZE.size} bytes, got"
            f" {len(fds)} and {len(data)} (a wrong key, or it was just closed)"
        )
    return fds[0], _SIZE.unpack(data)[0]


async def readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    """Wait until there is something to read from `sock`, the end included."""
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock.fileno(), wake)
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())


def receive_fds(sock: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int]]:
    """Up to `nbytes` bytes that are there, and at most `most` descriptors that came with them:
    the kernel drops further ones. They are not inherited by child processes. Raises OSError."""
    # Not socket.recv_fds, which drops its `flags`. CMSG_LEN, not CMSG_SPACE, whose padding has
    # room for one more.
    data, ancillary, _flags, _address = sock.recvmsg(
        nbytes, socket.CMSG_LEN(most * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(value[: len(value) - len(value) % _FD_BYTES])
    return data, fds.tolist()
