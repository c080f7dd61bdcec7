"""What a transport is: links that carry frames in order, and a way to make them.

A link is synchronous: `send` queues and tries at once, `poll` moves what can be moved without
waiting, and the event loop calls the same code when the operating system says there is more.
Nothing in here awaits per frame. All calls come from the loop that owns the link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

Done = Callable[[], None]

STEADY: Final = object()
"""The token of frames whose views are of memory that is never written again as long as anybody has
a view of it: nobody wants it back, and it is kept, not copied, until the peer has the frame."""


class Landing(Protocol):
    """Where the payload of one frame goes, and what is to happen when all of it is there.

    Who takes a header makes the landing and returns it. From then on the link alone remembers that
    this payload is under way: everybody between the two has passed the header on and is done, and
    the last byte goes straight to whoever owns the memory::

        header    link ──> peer ──> group ──> operation ──┐
                  keeps <────────── landing <─────────────┘
        payload   writes into landing.memory, part by part, over one connection or several
        the end   calls landing.landed()

    **The owner may change its mind** at any time, without a word to the link: a call is cancelled,
    and its memory is the user's again. So a link asks for `memory` before each part that it writes,
    and holds no view of it in between. What is there then is of the same size as before, and is
    written to from where the link had come to; what had come by then is in the old memory, which is
    the owner's to copy. A frame of a link that had broken comes again, all of it.

    **Nobody may want it any more.** With None, the rest of the payload is read all the same, since
    the next frame is behind it, but is written nowhere, and `landed` is not called.

    **The link may be lost** first: then `landed` is never called either, and `Receiver.closed`
    says why. Nothing is written from then on.
    """

    @property
    def memory(self) -> memoryview | None:
        """Writable, contiguous memory of exactly as many bytes as the payload has; not looked at
        for an empty one. None: the payload is skipped."""
        ...

    def landed(self) -> None:
        """The payload is complete. Called once, also for an empty one."""


class Receiver(Protocol):
    """Who takes what a link brings. Called from `Link.poll` and by the link's loop, never from
    inside another call to the link.

    An exception raised in `frame`, or by a landing, is logged ("aiodist.transport") and closes the
    link with it. Callbacks may call anything of the link; `poll` does nothing in there.
    """

    def frame(self, link: Link, header: bytes, nbytes: int) -> Landing | None:
        """A header came, `nbytes` of payload follow: where they go. None: they are skipped, or
        there are none and nothing more is to be done for this frame."""
        ...

    def closed(self, link: Link, error: BaseException | None) -> None:
        """The link is closed, once: `error` None after an orderly end by either side, else what
        broke it or was given to `close`. The last call to this receiver."""


class Link(Protocol):
    """A two-way, ordered, reliable stream of frames to one peer."""

    kind: str
    """Name of the transport: "inproc", "shm", "tcp", "unix"."""
    receiver: Receiver
    """May be replaced at any time; set before the first frame is read."""
    max_header: int
    max_payload: int
    """Limits of incoming frames; over them the link closes with ProtocolError."""

    @property
    def sent_bytes(self) -> int:
        """Payload bytes of the frames that have left."""
        ...

    @property
    def received_bytes(self) -> int:
        """Payload bytes of the frames that have come, skipped ones included."""
        ...

    @property
    def is_closed(self) -> bool: ...

    @property
    def backlog(self) -> int:
        """Bytes accepted by `send` that have not left yet, headers included."""
        ...

    @property
    def peer_name(self) -> str:
        """The other end, for messages: "10.0.0.2:4711"."""
        ...

    def send(
        self,
        header: bytes,
        payload: Sequence[memoryview] = (),
        *,
        done: Done | None = None,
        token: object = None,
        urgent: bool = False,
    ) -> None:
        """Send one frame; its payload is the concatenation of `payload` (contiguous byte views).

        The views are read until `done` is called, which may happen inside this call; it is not
        called for frames that are discarded, or lost with the link. `urgent` frames overtake
        queued frames that are not, never the frame that is partly sent, and never each other.
        Sending on a closed or finishing link does nothing (the receiver was, or will be, told).
        `header` must not be empty (ValueError).
        """

    def poll(self) -> bool:
        """Send and receive what can be moved now, without waiting. True: something moved."""
        ...

    def discard(self, token: object) -> None:
        """Forget queued frames sent with `token`: they do not travel, their `done` is not called,
        and their views are not read any more. A frame that is partly sent goes on as it is
        now: its payload is copied, as is that of frames that have left and may have to be sent
        again. Nothing happens for None, the token of frames that have none."""

    def settle(self, token: object) -> None:
        """Do not read the views any more that were sent with `token`, all of which have left (their
        `done` was called): a link that can be made again may have to send them again, and copies
        what the peer may not have. Views that were sent without a token must never change."""

    def close(self, error: BaseException | None = None) -> None:
        """Close at once; what is queued is lost. The peer sees a broken connection. Idempotent."""

    def close_in_child(self) -> None:
        """After a fork, in the child: drop this process' copy. The parent's link goes on; the
        child's receiver is not told."""

    async def finish(self, timeout: float) -> None:
        """Close in order: send what is queued, tell the peer, wait for its end (at most `timeout`
        seconds), close. Frames that come meanwhile are received. The receiver was told of the end
        when this returns; after `timeout` with a TimeoutError."""


def deliver(landing: Landing | None, payload: Sequence[memoryview], nbytes: int) -> None:
    """Do what a link does with a payload of `nbytes` that is here as a whole. Raises ValueError
    for memory of another size."""
    if landing is None:
        return
    if nbytes:
        memory = landing.memory
        if memory is None:
            return
        if len(memory) != nbytes:
            raise wrong_size(memory, nbytes)
        at = 0
        for view in payload:
            if view.nbytes:
                memory[at : at + view.nbytes] = view.cast("B")
                at += view.nbytes
    landing.landed()


def wrong_size(memory: memoryview, nbytes: int) -> ValueError:
    """What a link raises for a landing whose memory is not for a payload of `nbytes`."""
    return ValueError(
        f"the receiver gave {len(memory)} bytes for a payload of {nbytes}:"
        " it must give a view of exactly as many bytes, or None"
    )


class Listener(Protocol):
    """Takes connections in until closed."""

    address: str
    """Where peers find it: "tcp://10.0.0.1:4711", "shm:…", "unix-abstract:…", "inproc://…"."""

    def close(self) -> None:
        """Stop listening; accepted links stay. Idempotent."""

    def close_in_child(self) -> None:
        """After a fork, in the child: drop this process' copy."""


class Transport(Protocol):
    """Makes listeners and links of one kind."""

    kind: str

    async def listen(self, accept: Callable[[Link], None], *, host: str) -> Listener:
        """Listen, where nobody else does. `accept(link)` sets `link.receiver` before it returns.
        Limits of a new link are those of a peer that has not said hello."""
        ...

    async def dial(self, address: str, receiver: Receiver) -> Link:
        """Connect to a listener's `address`. Raises OSError, also where the listener's system does
        not answer. For its process, which may be busy, there is no deadline; cancelling closes the
        socket."""
        ...
