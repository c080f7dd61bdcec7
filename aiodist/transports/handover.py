"""How a process hands memory over to others of its host, which map it: the one way there is.

Lanes, links through shared memory, arrays of `Group.empty` and of `Group.share` all do it so::

    owner    Offer: makes a segment, listens     its words ──> any way there is ──> the others
    other    take: connects, shows the key ──> gets the file (SCM_RIGHTS) ──> maps it, closes it
    other    says whether it has it ──> the owner closes the Offer: the file and the socket

**Who offers.** The process that owns the memory makes it (`Segment.create`), and with it an
`SegmentOffer`: a socket at a random abstract name. Name and key are its *words*, which travel to
the others by a way of the caller's choice. Two ends of a connection need neither: each passes its
segment on over the connection itself (`pass_on`, `received`).

**Who maps.** Whoever has the words (`take`). It may have to wait, as the owner may compute; there
is no limit here, since the operation that waits has its deadline. If the owner dies, the connection
ends. What it gets is checked: a memfd, of the size that was said, that nobody can shrink.

**What fails** is an OSError in the process that it fails in, with the reason in words. It says so
to the others by the way that the words came: in the next round of the collective (lanes, `share`:
all have it, or none uses it), by a word that does not come (`empty`: the array is staged as others
are), or by ending the connection (links: another transport is taken). Nobody has to clean up for
anybody: a file that is under way to a dead process is closed by the system.

**When files are closed.** Mapped memory needs no file. Who maps closes it at once; the owner when
all have answered, by `SegmentOffer.close`, and in any case when the group or the operation ends.
The memory lasts until its last view is gone, in whatever process.

**Strangers.** The other end must run as the same user: both ask the kernel (`peer_pid`). Another
user's connection is closed and logged, now and then; so is one that shows a wrong key. Who says
nothing is dropped after `PATIENCE` seconds.
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
from contextlib import closing

from aiodist.buffers.segment import Segment
from aiodist.errors import ProtocolError
from aiodist.transports.processes import peer_pid
from aiodist.transports.sockets import Acceptor, log
from aiodist.transports.sparing import Sparing
from aiodist.transports.surroundings import closed_on_error, ready
from aiodist.transports.unix import SCHEME, bound_socket, connected_socket

KEY_BYTES = 16
"""Length of the key."""

PATIENCE = 10.0
"""Seconds that a caller has to say what it has to say first."""

VERSION = 1
"""Of the layout of what is passed on, and of how that is done."""

_GREETING = struct.Struct(">11sBQ")
GREETING_BYTES = _GREETING.size

_FD_BYTES = array.array("i").itemsize

Heard = Callable[[socket.socket, int, bytes, list[int]], None]
"""Called once for each caller, with its socket, its process, what it said, and the files that came
with that. All of these belong to whoever is called."""


class Callers(Acceptor):
    """Accepts connections of this user's processes, and hears what each of them says first:
    `nbytes` bytes, and at most `most` files with them, within `PATIENCE` seconds. What `heard` gets
    is shorter, or empty, where the other side went away or took too long."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listening: tuple[socket.socket, str],
        nbytes: int,
        most: int,
        heard: Heard,
    ) -> None:
        """`listening`: a socket, and its address."""
        super().__init__(loop, *listening, self._called)
        self._user = os.geteuid()
        self._expected = nbytes, most
        self._heard = heard
        self._callers: set[Caller] = set()
        self._sparing = Sparing(log)

    def _called(self, sock: socket.socket) -> None:
        try:
            pid = peer_pid(sock, self._user)
        except PermissionError as error:
            self._sparing.warning("refused", "%s refused a connection: %s", self.address, error)
            sock.close()
            return
        self._callers.add(Caller(self._loop, sock, pid, *self._expected, self._over))

    def _over(self, caller: Caller, data: bytes, fds: list[int]) -> None:
        self._callers.discard(caller)
        self._heard(caller.release(), caller.pid, data, fds)

    def close(self) -> None:
        """Stop. What was given stays given. Idempotent."""
        super().close()
        for caller in self._callers:
            caller.release().close()
        self._callers.clear()

    def close_in_child(self) -> None:
        """After a fork, in the child: drop this process' copies, leaving the loop alone."""
        super().close_in_child()
        for caller in self._callers:
            caller.sock.close()
        self._callers.clear()


class SegmentOffer(Callers):
    """Memory of this process, for everybody who has the `words`, until it is closed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        nbytes: int,
        name: str,
        segment: Segment | None = None,
        *,
        all_write: bool = False,
    ) -> None:
        """New memory, see `Segment.create`, or `segment`, which is the Offer's from here on. Raises
        OSError."""
        self.segment = segment or Segment.create(nbytes, name, all_write=all_write)
        self._key = secrets.token_bytes(KEY_BYTES)
        with closed_on_error(self.segment):
            listening = bound_socket("aiodist-mem", SCHEME)
        super().__init__(loop, listening, KEY_BYTES, 0, self._asked)

    @property
    def words(self) -> tuple[str, bytes]:
        """What `take` needs."""
        return self.address, self._key

    def _asked(self, sock: socket.socket, pid: int, key: bytes, fds: list[int]) -> None:
        with sock:
            if hmac.compare_digest(key, self._key):
                with contextlib.suppress(OSError):  # it is gone: its affair
                    pass_on(sock, self.segment)
            elif key:
                text = "%s: process %d showed a wrong key"
                self._sparing.warning("wrong key", text, self.address, pid)

    def close(self) -> None:
        super().close()
        self.segment.close()


async def take(words: object, nbytes: object, *, writes: bool = False) -> memoryview:
    """The memory of a `SegmentOffer` with these words, mapped: `nbytes` bytes, to be read, or to be
    written as well. Waits for as long as the other side takes. Raises what `take_segment` does."""
    with closing(await take_segment(words, nbytes, writes=writes)) as segment:
        return segment.memory


async def take_segment(
    words: object, nbytes: object, *, writes: bool = False, keep: bool = False
) -> Segment:
    """The same, as a segment. `keep`: with its file, so that it can be offered to others again.

    Raises OSError where that side cannot be reached, is another user's, refuses or breaks off; and
    where the words, or what it passes on, make no sense.
    """
    loop = asyncio.get_running_loop()
    match words, nbytes:
        case [str(address), bytes(key)], int():
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
    """What comes with a segment of `nbytes` bytes."""
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
    """Wait for a segment of the other side, and map it. Raises what `mapped` does."""
    await ready(sock, loop.add_reader, loop.remove_reader)
    return mapped(*receive_fds(sock, GREETING_BYTES, 1), nbytes, writes=writes, keep=keep)


def mapped(
    data: bytes, fds: list[int], nbytes: int, *, writes: bool = False, keep: bool = False
) -> Segment:
    """Map the segment of the other side that came with `data`; all of `fds` are closed, but for its
    own where it is to `keep` that. Raises OSError, ProtocolError."""
    if data == greeting(nbytes) and len(fds) == 1:
        return Segment.attach(fds[0], nbytes, writes=writes, keep=keep)
    for fd in fds:
        os.close(fd)
    if not data:
        raise ConnectionResetError(
            "it ended the set-up (it went away, was shown a wrong key, or could not share memory:"
            " then its log says why)"
        )
    raise ProtocolError(
        f"expected a segment and {greeting(nbytes)!r}, got {len(fds)} descriptors and {data!r}: is"
        " it another version of aiodist?"
    )


class Caller:
    """A connection that has not said yet what it has to say first, see `Callers`.

    Then `over(caller, data, fds)` is called, once, which must `release` it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        pid: int,
        nbytes: int,
        most: int,
        over: Callable[[Caller, bytes, list[int]], None],
    ) -> None:
        self.sock = sock
        self.pid = pid
        self._loop = loop
        self._nbytes = nbytes
        self._most = most
        self._heard = over  # called with what was said, or what there is of it when time is over
        self._data = b""  # what has come of it
        self._fds: list[int] = []  # open files that came with it, ours to close
        self._timer = loop.call_later(PATIENCE, self._over)  # who says nothing does not stay
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
        # Bytes and files may come in pieces, from a process that is not ours to trust: no more of
        # either is taken than was expected, and what was taken is closed if it is not handed on
        # (`release`).
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
