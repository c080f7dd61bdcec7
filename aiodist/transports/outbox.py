"""What a link has accepted and not sent yet. No I/O here.

Two queues: urgent frames go before bulk ones, but never into a frame that is partly sent::

    the socket takes  <──  what is left of one frame │ urgent, in order │ bulk, in order

**Why two.** A rank that sends 64 MiB has hundreds of frames queued. Without the urgent queue an
abort, a grant or the eight bytes of another collective would wait for all of these. A frame is at
most 1 MiB (`MAX_PAYLOAD`) for the same reason: an urgent frame waits for one frame at most, and for
what the socket has taken already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from aiodist.transports.base import Done

GATHER = 256 * 1024
"""Bytes after which `gather` stops, because larger writes leave the cache and are slower."""

MOST_BUFFERS = 512
"""The most buffers of one gathered write. Linux takes 1024 (IOV_MAX)."""


class Outgoing:
    """One frame on its way: `head` is what is left of its prefix, `views` of its payload."""

    __slots__ = (
        "begun", "done", "head", "left", "nbytes", "token", "views", "whole_head", "whole_views",
    )  # fmt: skip

    def __init__(
        self,
        head: bytes,
        views: Sequence[memoryview],
        nbytes: int,
        done: Done | None,
        token: object,
    ) -> None:
        self.head = self.whole_head = head  # the second stays whole, to be sent again
        self.views = list(views)
        self.whole_views = views  # kept, because it may have to be sent again
        self.nbytes = nbytes  # of its payload
        self.left = len(head) + nbytes  # bytes that have not left yet
        self.done = done  # called when all of it has left
        self.token = token  # the frame's owner, see `Link.discard`
        self.begun = False  # a part of it was sent over an earlier connection

    def trim(self, count: int) -> None:
        """Drop the first `count` bytes (fewer than are left), because they have been sent."""
        self.left -= count
        head = self.head
        if count < len(head):
            self.head = head[count:]
            return
        count -= len(head)
        self.head = b""
        gone = 0
        for view in self.views:
            if count < view.nbytes:
                break
            count -= view.nbytes
            gone += 1
        del self.views[:gone]
        if count:
            self.views[0] = self.views[0].cast("B")[count:]

    # A frame that is partly sent cannot be taken back, because the peer waits for the rest of it.
    # But its owner may want the memory back, so the rest is sent from a copy.
    def detach(self) -> None:
        """Copy the payload, and forget its owner."""
        payload = memoryview(b"".join(self.whole_views))
        self.whole_views = (payload,)
        left = sum([view.nbytes for view in self.views])
        self.views = [payload[self.nbytes - left :]]
        self.done = None
        self.token = None

    def begin_again(self) -> None:
        """Begin the frame anew, because it has to be sent over a new connection."""
        self.head = self.whole_head
        self.views = list(self.whole_views)
        self.left = len(self.head) + self.nbytes


class Outbox:
    """The queued frames of one link."""

    __slots__ = ("_bulk", "_partial", "_urgent", "backlog", "sent_bytes")

    def __init__(self) -> None:
        self._urgent: deque[Outgoing] = deque()
        self._bulk: deque[Outgoing] = deque()
        self._partial: Outgoing | None = None
        self.backlog = 0
        """Bytes that are queued, including prefixes."""
        self.sent_bytes = 0
        """Payload bytes of frames that have left."""

    @property
    def urgent(self) -> int:
        """How many urgent frames are queued."""
        return len(self._urgent)

    def count(self, but: object) -> int:
        """Return how many frames are queued whose token is not `but`."""
        return sum([frame.token is not but for frame in self._all()])

    def _all(self) -> list[Outgoing]:
        partial = () if self._partial is None else (self._partial,)
        return [*partial, *self._urgent, *self._bulk]

    def push(self, frame: Outgoing, urgent: bool) -> None:
        """Queue a frame of which nothing was sent."""
        self.backlog += frame.left
        (self._urgent if urgent else self._bulk).append(frame)

    def pop(self) -> Outgoing:
        """Return the next frame, for links whose frames leave only as a whole."""
        frame = (self._urgent or self._bulk).popleft()
        self.backlog -= frame.left
        self.sent_bytes += frame.nbytes
        return frame

    def push_partial(self, frame: Outgoing) -> None:
        """Queue a frame that is partly sent. The outbox must have no other."""
        self.backlog += frame.left
        self._partial = frame

    def gather(self) -> list[bytes | memoryview]:
        """Return the next buffers to write, in order: about `GATHER` bytes, at most
        `MOST_BUFFERS`."""
        buffers: list[bytes | memoryview] = []
        size = 0
        if self._partial is not None:
            size = self._add(buffers, self._partial)
        for queue in (self._urgent, self._bulk):
            for frame in queue:
                if size >= GATHER or len(buffers) >= MOST_BUFFERS:
                    return buffers
                size += self._add(buffers, frame)
        return buffers

    @staticmethod
    def _add(buffers: list[bytes | memoryview], frame: Outgoing) -> int:
        if frame.head:
            buffers.append(frame.head)
        room = MOST_BUFFERS - len(buffers)
        if len(frame.views) <= room:
            buffers += frame.views
        else:
            buffers += frame.views[:room]
        return frame.left

    def advance(self, count: int) -> list[Outgoing]:
        """Note that the first `count` bytes of `gather` were sent. Returns the frames that are
        out."""
        self.backlog -= count
        # `gather` gave partial, urgent, bulk, in this order, and nothing was queued since. So the
        # bytes are counted in the same order.
        finished: list[Outgoing] = []
        while count:
            frame = self._partial
            if frame is None:
                frame = (self._urgent or self._bulk).popleft()
            if count < frame.left:
                frame.trim(count)
                self._partial = frame
                break
            count -= frame.left
            self._partial = None
            self.sent_bytes += frame.nbytes
            finished.append(frame)
        return finished

    def discard(self, token: object) -> None:
        """See `Link.discard`."""
        if token is None:
            return
        for queue in (self._urgent, self._bulk):
            # The peer may have a part of a frame that is sent again, and waits for it.
            for frame in queue:
                if frame.begun and frame.token == token:
                    frame.detach()
            kept = [frame for frame in queue if frame.token != token]
            if len(kept) < len(queue):
                self.backlog -= sum(frame.left for frame in queue)
                self.backlog += sum(frame.left for frame in kept)
                queue.clear()
                queue.extend(kept)
        if self._partial is not None and self._partial.token == token:
            self._partial.detach()

    def mark(self, token: object) -> None:
        """Give all queued frames this token."""
        for frame in self._all():
            frame.token = token

    def detach(self, token: object) -> None:
        """Copy frames queued with `token`, so that their memory is not read any more."""
        for frame in self._all():
            if frame.token == token:
                frame.detach()

    def adopt(self, other: Outbox, again: Sequence[Outgoing], but: object) -> None:
        """Queue `again`, which is sent once more, and then everything that `other` has left.

        Frames whose token is `but` are left out. The frame that `other` had begun begins anew.
        """
        begun = list(again) if other._partial is None else [*again, other._partial]
        for frame in begun:
            frame.begin_again()
        if begun:
            begun[0].begun = True  # the peer has all frames before it, and none behind it
        self.sent_bytes += other.sent_bytes - sum([frame.nbytes for frame in again])
        self._urgent += [frame for frame in (*begun, *other._urgent) if frame.token is not but]
        self._bulk += other._bulk
        other.clear()
        self.backlog = sum([frame.left for frame in self._all()])

    def clear(self) -> None:
        """Drop everything."""
        self._urgent.clear()
        self._bulk.clear()
        self._partial = None
        self.backlog = 0
