"""Links between ranks of one event loop: a frame is copied once, from the sender's views into
the memory the receiver gives.

Nothing is delivered inside `send`: the receiving end takes its frames in its own `poll`, or in a
turn of the loop, so no callback ever runs below another one's stack. Were it otherwise, two ranks
that answer each other's frames would call each other until Python's stack is full.

There is no copy in between either: a frame stays with its sender, as views of the user's memory,
until the receiving end has said where it goes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from aiodist.errors import ProtocolError
from aiodist.transports.base import Done, Link, Listener, Receiver
from aiodist.transports.link import FRAME, TURN, BaseLink, log
from aiodist.wire.frames import OVERHEAD

SCHEME = "inproc://"

_listeners: dict[str, InprocListener] = {}
_numbers = itertools.count(1)


class _Frame:
    """A frame on its way; `header` b"" is the end of the stream."""

    __slots__ = ("done", "header", "nbytes", "payload", "token")

    def __init__(
        self,
        header: bytes,
        payload: Sequence[memoryview],
        nbytes: int,
        done: Done | None,
        token: object,
    ) -> None:
        self.header = header
        self.payload = payload
        self.nbytes = nbytes
        self.done = done
        self.token = token

    @property
    def size(self) -> int:
        """Bytes it counts for in `Link.backlog`: what it would take on a stream."""
        return OVERHEAD + len(self.header) + self.nbytes


class InprocLink(BaseLink):
    """One end of a pair. Frames stay with the sending end until the other end takes them."""

    __slots__ = (
        "_backlog",
        "_bulk",
        "_peer",
        "_polling",
        "_scheduled",
        "_sent_bytes",
        "_urgent",
    )

    _peer: InprocLink

    def __init__(
        self, loop: asyncio.AbstractEventLoop, peer_name: str, receiver: Receiver | None
    ) -> None:
        super().__init__(loop, "inproc", peer_name, receiver)
        self._urgent: deque[_Frame] = deque()  # frames that go first
        self._bulk: deque[_Frame] = deque()  # and all others
        self._backlog = 0  # bytes of both
        self._sent_bytes = 0  # of frames that the other end has taken
        self._polling = False  # a callback that polls again is to find nothing to do
        self._scheduled = False  # the loop will look at what the other end has sent

    @classmethod
    def pair(
        cls, loop: asyncio.AbstractEventLoop, name: str, receiver: Receiver | None
    ) -> tuple[InprocLink, InprocLink]:
        """Two connected ends: the one that dialled (with `receiver`), and the other."""
        dialled = cls(loop, SCHEME + name, receiver)
        accepted = cls(loop, f"{SCHEME}{name}#{next(_numbers)}", None)
        dialled._peer, accepted._peer = accepted, dialled
        return dialled, accepted

    @property
    def backlog(self) -> int:
        return self._backlog

    @property
    def sent_bytes(self) -> int:
        return self._sent_bytes

    def send(
        self,
        header: bytes,
        payload: Sequence[memoryview] = (),
        *,
        done: Done | None = None,
        token: object = None,
        urgent: bool = False,
    ) -> None:
        if not header:
            raise ValueError("a frame needs a header: the empty one is the end of the stream")
        if self._closed or self._finishing:
            return
        nbytes = 0
        for view in payload:
            nbytes += view.nbytes
        self._queue(_Frame(header, payload, nbytes, done, token), urgent)

    def _queue(self, frame: _Frame, urgent: bool) -> None:
        (self._urgent if urgent else self._bulk).append(frame)
        self._backlog += frame.size
        self._peer._schedule()

    def _send_bye(self) -> None:
        self._queue(_Frame(b"", (), 0, None, None), urgent=False)

    def discard(self, token: object) -> None:
        if token is None:
            return
        for queue in (self._urgent, self._bulk):
            kept = [frame for frame in queue if frame.token != token]
            if len(kept) < len(queue):
                self._backlog -= sum(frame.size for frame in queue)
                self._backlog += sum(frame.size for frame in kept)
                queue.clear()
                queue.extend(kept)

    def divert(self, into: memoryview | None) -> int:
        return 0  # payloads arrive whole

    # ---- receiving ----

    def _schedule(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._scheduled = False
        self.poll()
        if self._peer._backlog:
            self._schedule()

    def poll(self) -> bool:
        if self._polling:
            return False
        moved = False
        if not self._closed:
            self._polling = True
            try:
                moved = self._take()
            except Exception as error:
                self._failed(error)
            self._polling = False
        if self._closed and not self._told:
            self._tell()
            return True
        return moved

    def _take(self) -> bool:
        peer = self._peer
        budget = TURN
        while peer._backlog and budget > 0 and not self._closed:
            frame = peer._urgent.popleft() if peer._urgent else peer._bulk.popleft()
            peer._backlog -= frame.size
            budget -= frame.size + FRAME
            if frame.header:
                self._deliver(frame)
            else:
                self._ended_by_peer()
            if frame.done is not None and not peer._closed:
                try:
                    frame.done()
                except Exception as error:
                    peer._failed(error)
            if peer._closed and not self._closed:
                self._lost()
        return budget < TURN

    def _deliver(self, frame: _Frame) -> None:
        nbytes = frame.nbytes
        if len(frame.header) > self.max_header:
            raise ProtocolError(
                f"a header of {len(frame.header)} bytes, over the limit of {self.max_header}"
            )
        if nbytes > self.max_payload:
            raise ProtocolError(
                f"a payload of {nbytes} bytes, over the limit of {self.max_payload}"
            )
        destination = self.receiver.frame(self, frame.header, nbytes)
        if self._closed:
            return
        if destination is not None:
            if len(destination) != nbytes:
                raise ValueError(
                    f"the receiver gave {len(destination)} bytes for a payload of {nbytes}:"
                    " it must give a view of exactly as many bytes, or None"
                )
            at = 0
            for view in frame.payload:
                if view.nbytes:
                    destination[at : at + view.nbytes] = view.cast("B")
                    at += view.nbytes
        self._received_bytes += nbytes
        self._peer._sent_bytes += nbytes
        if destination is not None or not nbytes:
            self.receiver.payload(self)

    # ---- the end ----

    def _ended_by_peer(self) -> None:
        if not self._finishing or not self._backlog:  # ours is not asked for, or was taken
            self.close()
            self._peer.close()

    def _lost(self) -> None:
        self.close(
            ConnectionResetError(f"{self._peer_name} closed the connection without ending it")
        )

    def _release(self) -> None:
        self._urgent.clear()
        self._bulk.clear()
        self._backlog = 0
        peer = self._peer
        if not peer._closed and not self._loop.is_closed():
            self._loop.call_soon(peer._follow)

    def _follow(self) -> None:
        """The other end closed: so does this one."""
        if not self._closed:
            self._lost()

    def close_in_child(self) -> None:
        """After a fork, in the child: forget all. Nobody is told."""
        self._closed = self._told = True
        self._urgent.clear()
        self._bulk.clear()
        self._backlog = 0


class InprocListener:
    """Takes connections of its own event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, accept: Callable[[Link], None]) -> None:
        self.name = f"rank-{next(_numbers)}"
        self.address = SCHEME + self.name
        self.loop = loop
        self._accept = accept
        _listeners[self.name] = self

    def connect(self, receiver: Receiver) -> InprocLink:
        """A link to this listener."""
        dialled, accepted = InprocLink.pair(self.loop, self.name, receiver)
        try:
            self._accept(accepted)
        except Exception as error:
            log.exception("%s could not take the connection of %s", self.address, dialled)
            accepted.close(error)
        return dialled

    def close(self) -> None:
        """Stop listening. Accepted links stay. Idempotent."""
        _listeners.pop(self.name, None)

    def close_in_child(self) -> None:
        """After a fork, in the child."""
        self.close()


class InprocTransport:
    """Makes links between ranks of the running loop; addresses are "inproc://…"."""

    kind = "inproc"

    async def listen(
        self, accept: Callable[[Link], None], *, host: str = "", port: int = 0
    ) -> Listener:
        """Listen under a new name; `host` and `port` say nothing here."""
        return InprocListener(asyncio.get_running_loop(), accept)

    async def dial(self, address: str, receiver: Receiver) -> Link:
        """Connect. Raises ConnectionRefusedError where nobody of this loop listens there."""
        if not address.startswith(SCHEME):
            raise ValueError(f"an address looks like {SCHEME}rank-1, not {address!r}")
        listener = _listeners.get(address.removeprefix(SCHEME))
        if listener is None or listener.loop is not asyncio.get_running_loop():
            raise ConnectionRefusedError(f"nobody listens at {address} in this event loop")
        return listener.connect(receiver)
