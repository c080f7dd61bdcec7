"""What a transport is: links that carry frames in order, and a way to make them.

A link is synchronous. `send` queues and tries at once, `poll` moves what can be moved without
waiting, and the event loop calls the same code when the operating system reports more. Nothing here
awaits for each frame. All calls come from the loop that owns the link.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from aiodist.transports.copies import Copies

Done = Callable[[], None]
Severed = Callable[["Link", BaseException], None]
"""Told of a link whose connection broke, and why. Called by the loop."""

STEADY: Final = object()
"""The token of frames whose memory is never written again while a view of it exists. So the link
keeps their views without a copy until the peer has the frame."""


class Landing(Protocol):
    """The memory for the payload of one frame, and what happens when all of it has come.

    The handler of a header makes the landing and returns it. From then on only the link remembers
    that this payload is under way, and the last byte goes straight to the owner of the memory::

        header    link ──> peer ──> group ──> operation ──┐
                  keeps <────────── landing <─────────────┘
        payload   writes into landing.memory, part by part, over one connection or several
        the end   calls landing.landed()

    **The owner may take the memory back** at any time without telling the link, for example if a
    call is cancelled. So a link asks for `memory` before each part that it writes, and holds no
    view in between. New memory has the same size, and the link goes on at the same position. The
    owner copies what the old memory has. After a broken connection the whole frame comes again.

    **The payload may become unwanted.** If `memory` is None, the rest of the payload is read and
    dropped, because the next frame is behind it, and `landed` is not called.

    **The link may be lost** first. `landed` is then never called, and `Receiver.closed` says why.
    Nothing is written after that.
    """

    @property
    def memory(self) -> memoryview | None:
        """Writable, contiguous memory of exactly the size of the payload; None: skip the payload.

        Not asked for an empty payload.
        """
        ...

    def landed(self) -> None:
        """Hear that the payload is complete. Called once, also for an empty one."""


class Receiver(Protocol):
    """Takes what a link brings.

    Called from `Link.poll` and by the link's loop, never from inside another call to the link. An
    exception of `frame`, or of a landing, is logged ("aiodist.transport") and closes the link with
    it. A KeyboardInterrupt or CancelledError is passed on, and closes the link, too. Callbacks may
    call anything of the link; `poll` does nothing inside them.
    """

    def frame(self, link: Link, header: bytes, nbytes: int) -> Landing | None:
        """Take a header that is followed by `nbytes` of payload. Returns the landing of the
        payload.

        None: the payload is skipped, or there is none and nothing more to do for this frame.
        """
        ...

    def closed(self, link: Link, error: BaseException | None) -> None:
        """Hear that the link is closed. Called once, as the last call to this receiver.

        `error` is None after an orderly end by either side, else what broke the link or was given
        to `close`.
        """


class Link(Protocol):
    """A two-way, ordered, reliable stream of frames to one peer."""

    kind: str
    """Name of the transport: "inproc", "shm", "tcp", "unix"."""
    receiver: Receiver
    """May be replaced at any time. It is set before the first frame is read."""
    max_header: int
    max_payload: int
    """Limits of incoming frames. Over them the link closes with ProtocolError."""

    @property
    def sent_bytes(self) -> int:
        """Payload bytes of the frames that have left."""
        ...

    @property
    def received_bytes(self) -> int:
        """Payload bytes of the frames that have come, including skipped ones."""
        ...

    @property
    def is_closed(self) -> bool: ...

    @property
    def backlog(self) -> int:
        """Bytes that `send` has accepted and that have not left yet, including headers."""
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
        """Send one frame. Its payload is the concatenation of `payload` (contiguous byte views).

        The views are read until `done` is called, maybe inside this call. `done` is not called for
        frames that are discarded or lost with the link. `urgent` frames overtake queued frames that
        are not urgent, but never a frame that is partly sent, and never each other. On a closed or
        finishing link this does nothing, because the receiver hears of the end. Raises ValueError
        for an empty `header`.
        """

    def poll(self) -> bool:
        """Send and receive what can be moved now, without waiting. Returns whether something
        moved."""
        ...

    def discard(self, token: object) -> None:
        """Forget queued frames that were sent with `token`: their `done` is not called.

        Their views are not read any more. A frame that is partly sent goes on with a copy of its
        payload, and so do frames that may have to be sent again. None does nothing, because it is
        the token of frames without one.
        """

    def settle(self, token: object) -> None:
        """Stop reading the views that were sent with `token`, after all of them have left.

        A link that can be made again may have to send them again, so it copies what the peer may
        not have. Views that were sent without a token must never change.
        """

    def close(self, error: BaseException | None = None) -> None:
        """Close at once. Queued frames are lost, and the peer sees a broken connection.
        Idempotent."""

    def close_in_child(self) -> None:
        """After a fork, in the child: close this process' copy. The parent's link goes on.

        The child's receiver is not told.
        """

    async def finish(self, timeout: float) -> None:
        """Close in order: send what is queued, tell the peer, wait for its end, close.

        Waits at most `timeout` seconds. Frames that come meanwhile are received. The receiver has
        been told of the end when this returns, after `timeout` with a TimeoutError.
        """

    # -- what only some links can do. These are the answers of the others -------------------------

    @property
    def lasts(self) -> bool:
        """Whether another link may go on in its place if its connection breaks. See `lasting`."""
        return False

    @property
    def is_severed(self) -> bool:
        """Whether its connection is gone, and another link may go on in its place."""
        return False

    @property
    def came(self) -> int:
        """How many frames have come since `keep`."""
        return 0

    @property
    def taken(self) -> int:
        """How many frames sent since `keep` the peer has said to have."""
        return 0

    @property
    def held(self) -> int:
        """How many bytes the peer's system may not have, sent or queued."""
        return self.backlog

    @property
    def unheard(self) -> int:
        """How many frames, sent or queued, the peer has not said to have."""
        return 0

    def keep(self, severed: Severed, copies: Copies | None = None) -> None:
        """Keep what is sent from now on until the peer has it, for a link that goes on in its
        place.

        `severed` is told when the connection breaks. `copies` makes copies.
        """
        return

    def can_go_on(self, came: int) -> bool:
        """Tell whether a peer with `came` frames can be sent the next one by another link."""
        return False

    def adopt(self, old: Link, came: int) -> None:
        """Go on in place of `old`, which is severed. `came` of its frames have come to the peer."""
        raise AssertionError(f"{self!r} does not last")

    def sever(self) -> None:
        """Give up this connection for another one: nothing moves any more. `severed` is
        not told."""
        return

    def break_off(self, error: BaseException) -> None:
        """Give up the connection, because it is useless."""
        self.close(error)

    def deliver(self, done: Done) -> bool:
        """Tell whether all that was sent has come to the peer. If not, `done` will be called."""
        return True

    def listen_for(self, seconds: float) -> None:
        """End an idle connection after about so many seconds without an answer."""
        return

    def is_unanswered(self, seconds: float) -> bool:
        """Tell whether something was sent, and the peer's system has answered nothing for so
        long."""
        return False

    def open_process(self) -> io.FileIO | None:
        """Open the process at the other end (`processes.open_behind`), or return None if the link
        does not know it."""
        return None


def deliver(landing: Landing | None, payload: Sequence[memoryview], nbytes: int) -> None:
    """Deliver a whole payload of `nbytes` as a link does. Raises ValueError for memory of another
    size."""
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
    """Make the error for a landing whose memory does not have `nbytes`."""
    return ValueError(
        f"the receiver gave {len(memory)} bytes for a payload of {nbytes}:"
        " it must give a view of exactly as many bytes, or None"
    )


class Listener(Protocol):
    """Accepts connections until closed."""

    address: str
    """Its address for peers: "tcp://10.0.0.1:4711", "shm:…", "unix-abstract:…", "inproc://…"."""

    def close(self) -> None:
        """Stop listening. Accepted links stay. Idempotent."""

    def close_in_child(self) -> None:
        """After a fork, in the child: close this process' copy."""


class Transport(Protocol):
    """Makes listeners and links of one kind."""

    kind: str

    async def listen(self, accept: Callable[[Link], None], *, host: str) -> Listener:
        """Listen at a new address. `accept(link)` sets `link.receiver` before it returns.

        A new link has the limits of a peer that has not said hello.
        """
        ...

    async def dial(self, address: str, receiver: Receiver) -> Link:
        """Connect to a listener's `address`. Raises OSError, also if the listener's system does not
        answer.

        There is no deadline for the listener's process, because it may be busy. Cancelling closes
        the socket.
        """
        ...
