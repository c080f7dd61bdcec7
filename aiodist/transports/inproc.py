"""Links between ranks of one event loop: each frame is copied once, into the receiver's memory.

Nothing is delivered inside `send`: the receiving end takes its frames in its own `poll`, or in a
turn of the loop. So no callback runs inside another one. Otherwise two ranks that answer each
other's frames would fill Python's stack. A frame stays with its sender, as views of the user's
memory, until the receiving end has a landing for it.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Callable, Sequence

from aiodist.errors import ProtocolError
from aiodist.transports.base import Done, Link, Listener, Receiver, deliver
from aiodist.transports.link import FRAME, POLL_BUDGET, BaseLink, log
from aiodist.transports.outbox import Outgoing
from aiodist.wire.frames import OVERHEAD

SCHEME = "inproc://"

# Weak, because a group that the program drops unclosed must be freed. Its actor holds its listener.
_listeners: weakref.WeakValueDictionary[str, InprocListener] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class InprocLink(BaseLink):
    """One end of a pair. Frames stay with the sending end until the other end takes them."""

    __slots__ = ("_peer", "_scheduled")

    _peer: InprocLink

    def __init__(
        self, loop: asyncio.AbstractEventLoop, peer_name: str, receiver: Receiver | None
    ) -> None:
        super().__init__(loop, "inproc", peer_name, receiver)
        self._scheduled = False  # the loop will look at what the other end has sent

    @classmethod
    def pair(
        cls, loop: asyncio.AbstractEventLoop, name: str, receiver: Receiver | None
    ) -> tuple[InprocLink, InprocLink]:
        """Make two connected ends: the one that dialled (with `receiver`), and the other."""
        dialled = cls(loop, SCHEME + name, receiver)
        accepted = cls(loop, f"{SCHEME}{name}#{next(_numbers)}", None)
        dialled._peer, accepted._peer = accepted, dialled
        return dialled, accepted

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
        self._queue(Outgoing(header, payload, nbytes, done, token), urgent)

    def _queue(self, frame: Outgoing, urgent: bool) -> None:
        frame.left += OVERHEAD  # it counts for as much as on a stream
        self._outbox.push(frame, urgent)
        self._peer._schedule()

    def _send_bye(self) -> None:
        self._queue(Outgoing(b"", (), 0, None, None), urgent=False)

    # ---- receiving ----

    def _schedule(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            # By the loop, because `send` must not call the other side's receiver, which may send in
            # turn.
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._scheduled = False
        self.poll()
        if self._peer._outbox.backlog:
            self._schedule()

    def poll(self) -> bool:
        return False if self._polling else self._receive()

    def _read(self) -> bool:
        peer = self._peer
        budget = POLL_BUDGET
        while peer._outbox.backlog and budget > 0 and not self._closed:
            frame = peer._outbox.pop()
            budget -= frame.left + FRAME
            if frame.head:
                self._deliver(frame)
            else:
                self._ended_by_peer()
            # Only now, because the payload was read from the sender's memory.
            if frame.done is not None and not peer._closed:
                try:
                    frame.done()
                except Exception as error:
                    peer._failed(error)
            if peer._closed and not self._closed:
                self._lost()
        return budget < POLL_BUDGET

    def _deliver(self, frame: Outgoing) -> None:
        nbytes = frame.nbytes
        if len(frame.head) > self.max_header:
            raise ProtocolError(
                f"a header of {len(frame.head)} bytes, over the limit of {self.max_header}"
            )
        if nbytes > self.max_payload:
            raise ProtocolError(
                f"a payload of {nbytes} bytes, over the limit of {self.max_payload}"
            )
        landing = self.receiver.frame(self, frame.head, nbytes)
        if self._closed:
            return
        self._received_bytes += nbytes
        deliver(landing, frame.views, nbytes)

    # ---- the end ----

    def _ended_by_peer(self) -> None:
        if not self._finishing or not self._outbox.backlog:  # ours was not asked for, or was taken
            self.close()
            self._peer.close()

    def _lost(self) -> None:
        self.close(
            ConnectionResetError(f"{self._peer_name} closed the connection without ending it")
        )

    def _release(self) -> None:
        self._outbox.clear()
        peer = self._peer
        if not peer._closed and not self._loop.is_closed():
            self._loop.call_soon(peer._follow)

    def _follow(self) -> None:
        """Close, because the other end has closed."""
        if not self._closed:
            self._lost()

    def close_in_child(self) -> None:
        """After a fork, in the child: drop everything, without telling the receiver."""
        self._closed = self._told = True
        self._outbox.clear()


class InprocListener:
    """Accepts connections of its own event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, accept: Callable[[Link], None]) -> None:
        self.name = f"rank-{next(_numbers)}"
        self.address = SCHEME + self.name
        self.loop = loop
        self._accept = accept
        _listeners[self.name] = self

    def connect(self, receiver: Receiver) -> InprocLink:
        """Make a link to this listener."""
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
        self.close()


class InprocTransport:
    """Makes links between ranks of the running loop. Addresses are "inproc://…"."""

    kind = "inproc"

    async def listen(self, accept: Callable[[Link], None], *, host: str = "") -> Listener:
        """Listen under a new name. `host` is ignored."""
        return InprocListener(asyncio.get_running_loop(), accept)

    async def dial(self, address: str, receiver: Receiver) -> Link:
        """Connect. Raises ConnectionRefusedError if there is no such listener on this loop."""
        if not address.startswith(SCHEME):
            raise ValueError(f"an address looks like {SCHEME}rank-1, not {address!r}")
        listener = _listeners.get(address.removeprefix(SCHEME))
        if listener is None or listener.loop is not asyncio.get_running_loop():
            raise ConnectionRefusedError(f"there is no listener at {address} in this event loop")
        return listener.connect(receiver)
