"""How a process hands memory to others of its host, which map it. There is only this way.

Lanes, links through shared memory, arrays of `Group.empty` and of `Group.share` all use it::

    owner    makes a segment, listens            its words ──> any way there is ──> the others
    other    take: connects, shows the key ──> gets the file (SCM_RIGHTS) ──> maps it, closes it
    other    says whether it has it ──> the owner closes the offer: the file and the socket

**The offer.** The owner makes the memory (`Segment.create`) and a `SegmentOffer`: a socket at a
random abstract name. Name and key are its *words*, which the caller sends to the others in some
way. A caller with many segments offers all of them at one socket (`SegmentOffers`). Two ends of a
connection need no words: each passes its segment over the connection (`pass_on`, `received`).

**The mapping.** A process with the words calls `take`. It may have to wait, because the owner may
compute. There is no limit here, because the waiting operation has its deadline. If the owner dies,
the connection ends. The file is checked: it must be a memfd of the right size that cannot shrink.

**Failures** are an OSError in the process that fails, with the reason. It tells the others in the
way that the words came. Lanes and `share` do it in the next round of the collective: all have it,
or none uses it. For `empty` a message is missing, and the array is staged as others. Links end the
connection, and another transport is used. The system closes files under way to a dead process.

**Closing files.** Mapped memory needs no file. The other side closes it at once. The owner closes
it when all have answered, by `SegmentOffers.drop` or `close`, and in any case when the group or the
operation ends. The memory lasts until its last view is gone, in any process.

**Strangers.** The other end must run as the same user: both ask the kernel (`peer_pid`).
Connections of another user, or with a wrong key, are closed and logged sparingly. A caller that
says nothing is dropped after `PATIENCE` seconds.
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
import weakref
from collections.abc import Callable
from contextlib import closing

from aiodist.buffers.segment import Segment
from aiodist.errors import ProtocolError, despite_errors
from aiodist.transports.processes import peer_pid
from aiodist.transports.sockets import Acceptor, log
from aiodist.transports.sparing import Sparing
from aiodist.transports.surroundings import closed_on_error, ready
from aiodist.transports.unix import SCHEME, bound_socket, connected_socket

KEY_BYTES = 24
"""Length of a key: the number of the segment, and a secret."""
_NUMBER_BYTES = 8

PATIENCE = 10.0
"""Seconds for a caller to say its first bytes."""

VERSION = 1
"""Of the layout of what is passed on, and of how that is done."""

_GREETING = struct.Struct(">11sBQ")
GREETING_BYTES = _GREETING.size

_FD_BYTES = array.array("i").itemsize

Heard = Callable[[socket.socket, int, bytes, list[int]], None]
"""Called once for each caller: its socket, its process, what it said, and the files that came with
that. The callee owns all of these."""


class Callers(Acceptor):
    """Accepts connections of this user's processes, and reads what each of them says first.

    That is `nbytes` bytes and at most `most` files, within `PATIENCE` seconds. `heard` gets fewer
    bytes, or none, if the other side went away or took too long.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listening: tuple[socket.socket, str],
        nbytes: int,
        most: int,
        heard: Heard,
    ) -> None:
        """`listening` is a socket and its address."""
        super().__init__(loop, *listening, self._called)
        self._user = os.geteuid()
        self._expected = nbytes, most
        self._heard = heard
        self._callers: set[NewConnection] = set()
        self._sparing = Sparing(log)

    def _called(self, sock: socket.socket) -> None:
        try:
            pid = peer_pid(sock, self._user)
        except PermissionError as error:
            self._sparing.warning("refused", "%s refused a connection: %s", self.address, error)
            sock.close()
            return
        self._callers.add(NewConnection(self._loop, sock, pid, *self._expected, self._over))

    def _over(self, caller: NewConnection, data: bytes, fds: list[int]) -> None:
        self._callers.discard(caller)
        self._heard(caller.release(), caller.pid, data, fds)

    def close(self) -> None:
        """Stop. Given memory stays. Idempotent."""
        super().close()
        for caller in self._callers:
            caller.release().close()
        self._callers.clear()

    def close_in_child(self) -> None:
        """After a fork, in the child: close this process' copies without touching the loop."""
        super().close_in_child()
        for caller in self._callers:
            caller.sock.close()
        self._callers.clear()


class SegmentOffers(Callers):
    """Segments of this process. Each is for all that have its words, until it is dropped."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        listening = bound_socket("aiodist-mem", SCHEME)
        super().__init__(loop, listening, KEY_BYTES, 0, self._asked)
        self._secret = secrets.token_bytes(KEY_BYTES - _NUMBER_BYTES)
        self.segments: dict[int, Segment] = {}
        """What is offered, by number."""
        _offers.add(self)

    def add(self, number: int, segment: Segment) -> tuple[str, bytes]:
        """Take `segment` over. Returns its words, which `take` needs."""
        self.segments[number] = segment
        return self.address, number.to_bytes(_NUMBER_BYTES, "big") + self._secret

    def drop(self, number: int) -> None:
        """Offer a segment no longer. Given memory stays. Idempotent."""
        segment = self.segments.pop(number, None)
        if segment is not None:
            segment.close()

    def _asked(self, sock: socket.socket, pid: int, key: bytes, fds: list[int]) -> None:
        with sock:
            if hmac.compare_digest(key[_NUMBER_BYTES:], self._secret):
                segment = self.segments.get(int.from_bytes(key[:_NUMBER_BYTES], "big"))
                if segment is not None:  # None: it was dropped in the meantime
                    with contextlib.suppress(OSError):  # the other side is gone
                        pass_on(sock, segment)
            elif key:
                text = "%s: process %d showed a wrong key"
                self._sparing.warning("wrong key", text, self.address, pid)

    def close(self) -> None:
        super().close()
        for number in list(self.segments):
            self.drop(number)

    def close_in_child(self) -> None:
        super().close_in_child()
        for segment in self.segments.values():
            segment.close()


class SegmentOffer(SegmentOffers):
    """Memory of this process for all that have the `words`, until it is closed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        nbytes: int,
        name: str,
        segment: Segment | None = None,
        *,
        all_write: bool = False,
    ) -> None:
        """Make new memory, see `Segment.create`, or take over `segment`. Raises OSError."""
        self.segment = segment or Segment.create(nbytes, name, all_write=all_write)
        with closed_on_error(self.segment):
            super().__init__(loop)
        self.words = self.add(0, self.segment)


_offers: weakref.WeakSet[SegmentOffers] = weakref.WeakSet()


def _close_in_child() -> None:
    despite_errors(*(offer.close_in_child for offer in list(_offers)))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


async def take(words: object, nbytes: object, *, writes: bool = False) -> memoryview:
    """Map the memory of a `SegmentOffer` with these words: `nbytes` bytes, to read or also to
    write.

    Waits as long as the other side takes. Raises what `take_segment` raises.
    """
    with closing(await take_segment(words, nbytes, writes=writes)) as segment:
        return segment.memory


async def take_segment(
    words: object, nbytes: object, *, writes: bool = False, keep: bool = False
) -> Segment:
    """Do the same, and return a segment. `keep`: with its file, so that it can be offered again.

    Raises OSError if the other side cannot be reached, is another user's, refuses or breaks off,
    and if the words, or what it passes on, make no sense.
    """
    loop = asyncio.get_running_loop()
    match words, nbytes:
        case [str(address), bytes(key)], int(nbytes) if 0 < nbytes < 1 << 63:
            pass
        case _:
            raise ConnectionError(f"malformed words about memory: {words!r}, {nbytes!r} bytes")
    try:
        with await connected_socket(address, SCHEME) as sock:
            peer_pid(sock, os.geteuid())
            await loop.sock_sendall(sock, key)
            return await received(loop, sock, nbytes, writes=writes, keep=keep)
    except (OSError, ValueError, ProtocolError) as error:
        raise ConnectionError(f"{address} passed no memory on: {error}") from error


# -- over a connection ----------------------------------------------------------------------------


def greeting(nbytes: int) -> bytes:
    """Return what comes with a segment of `nbytes` bytes."""
    return _GREETING.pack(b"aiodist-shm", VERSION, nbytes)


def pass_on(sock: socket.socket, segment: Segment) -> None:
    """Give the other side a segment of this process. Raises OSError."""
    socket.send_fds(sock, [greeting(segment.nbytes)], [segment.fd])


async def received(
    loop: asyncio.AbstractEventLoop,
    sock: socket.socket,
    nbytes: int,
    *,
    writes: bool = False,
    keep: bool = False,
) -> Segment:
    """Wait for a segment of the other side, and map it. Raises what `mapped` raises."""
    await ready(sock, loop.add_reader, loop.remove_reader)
    return mapped(*receive_fds(sock, GREETING_BYTES, 1), nbytes, writes=writes, keep=keep)


def mapped(
    data: bytes, fds: list[int], nbytes: int, *, writes: bool = False, keep: bool = False
) -> Segment:
    """Map the segment of the other side that came with `data`. Raises OSError, ProtocolError.

    All of `fds` are closed, except the segment's own with `keep`.
    """
    if data == greeting(nbytes) and len(fds) == 1:
        return Segment.attach(fds[0], nbytes, writes=writes, keep=keep)
    for fd in fds:
        os.close(fd)
    if not data:
        raise ConnectionResetError(
            "it ended the set-up (it went away, or no longer offers this, or its log says why: a"
            " wrong key, or it could not share memory)"
        )
    raise ProtocolError(
        f"expected a segment and {greeting(nbytes)!r}, got {len(fds)} descriptors and {data!r}: is"
        " it another version of aiodist?"
    )


class NewConnection:
    """A connection that has not said its first bytes yet: see `Callers`.

    Afterwards `over(caller, data, fds)` is called once, and must `release` it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        pid: int,
        nbytes: int,
        most: int,
        over: Callable[[NewConnection, bytes, list[int]], None],
    ) -> None:
        self.sock = sock
        self.pid = pid
        self._loop = loop
        self._nbytes = nbytes
        self._most = most
        self._heard = over  # called with what was said, or the part of it when time is over
        self._data = b""  # what has come of it
        self._fds: list[int] = []  # open files that came with it, ours to close
        self._is_over = False  # `_heard` was called
        self._timer = loop.call_later(PATIENCE, self._late)  # a silent caller does not stay
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
        # Bytes and files may come in pieces, from a process that we cannot trust. No more of either
        # is taken than expected, and files that are not handed on are closed (`release`).
        self._data += data
        self._fds += fds
        if not data or len(self._data) == self._nbytes:
            self._over()

    def _late(self) -> None:
        # If this loop did not turn, the bytes may lie there: uvloop looks at the time first.
        self._readable()
        if not self._is_over:
            self._over()

    def _over(self) -> None:
        self._is_over = True
        fds, self._fds = self._fds, []
        self._heard(self, self._data, fds)

    def release(self) -> socket.socket:
        """Stop listening to it. Returns its socket, which the caller owns now."""
        self._timer.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self.sock.fileno())
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        return self.sock


def receive_fds(sock: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int]]:
    """Receive up to `nbytes` bytes, and at most `most` descriptors with them.

    The kernel drops further descriptors. Child processes do not inherit them. Raises OSError.
    """
    # Not socket.recv_fds, because it drops its `flags`. CMSG_LEN and not CMSG_SPACE, because the
    # padding of that has room for one more.
    data, ancillary, _flags, _address = sock.recvmsg(
        nbytes, socket.CMSG_LEN(most * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(value[: len(value) - len(value) % _FD_BYTES])
    return data, fds.tolist()
