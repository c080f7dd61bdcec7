"""One rank of a membership, as another one sees it: the link to it, and what comes over it.

A connection that breaks between two living ranks is made again. Both say how many frames have come
to them, so that each knows what to send again (`aiodist.transports.lasting`). Both also say how
many links they have had, to tell an old connection from one that replaces the present one.

**Who dials.** The side that notices. Often both notice at the same moment. But if a firewall has
forgotten a connection, or a host was cut off, only one side may notice. It must not wait for the
other, because that may take a lease.

**Which connection counts.** If both dial, the connection of the lower member id. That side closes
connections that come in while it dials. The other side ends its own call and accepts
(`Entrance.greeted`). Its calls may be closed without a reason, so it tries for longer. So both
sides keep the same single connection. The first link is made in the same way.

**Which connection is old.** A connection may come in while this rank believes that its link is
well. The number of links that the peer has had (its *generation*) decides::

    links so far     0          1          2
    this rank      ──┼─ link 1 ─┼─ link 2 ─┼──────>

                                     └─ comes in, says 2: the peer has had link 2 as well, and calls
                                        nevertheless, so link 2 is broken, and given up here, too
                                     └─ comes in, says 0 or 1: was begun before there was link 2,
                                        and came in late; it is refused

One case is between the two: this rank took the peer's connection, but its answer was lost. The peer
then does not know of that link, and calls again with its former number (`_unheard`). This counts as
a link that broke, if nothing has come over it. Nothing can have come to the peer either, so the
peer's count of frames is right. The proof of an earlier attempt may also come late, when the peer
has long used the present link. What has come over that link shows that such a proof is old.

The claims are part of the proofs of the greeting, so that only a holder of the token can change a
count. If four connections in a row are *in vain*, the link ends: something breaks each of them, and
the coordinator has to rule. Such a connection broke within a second without carrying anything, or
while the peer's system did not answer. Small packets may pass and large ones not, so that each
connection comes up, and no data arrives. What the last connection carried to the peer is not known,
because only another one would tell.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from aiodist.errors import ProtocolError
from aiodist.links.greeting import Claim
from aiodist.links.inboxes import Inboxes, Stray
from aiodist.links.owner import EndpointOwner
from aiodist.links.process_watch import ProcessWatch
from aiodist.transports.base import Done, Landing, Link
from aiodist.transports.copies import Copies
from aiodist.wire import kinds
from aiodist.wire.frames import MAX_HEADER, MAX_WHOLE, pack_fields, unpack_fields

log = logging.getLogger("aiodist.endpoint")

MAX_EARLY_BYTES = 32 << 20
"""The most bytes that one peer may send for groups that do not exist here yet.

Messages have 16 MiB of credit between distant ranks, and collectives push 8 MiB
(`aiodist.engine.calls.MAX_PUSHED`).
"""
STRAY_COST = 512
"""What each frame costs of that, beside its bytes."""
MAX_UNHEARD = 1 << 17
"""How many unacknowledged frames a peer may have when it asks a question. A peer with more is lost,
because it asks without reading answers."""
QUESTIONS = frozenset(
    {kinds.INQUIRE, kinds.KNOCK, kinds.TAGS, kinds.P2P, kinds.REGION, kinds.DEVICE}
)
"""Kinds of frames that may be answered, whatever the program of this rank does."""
SHORT_LIFE = 1.0
"""Seconds. A connection that breaks sooner, without having carried anything, was in vain."""
MOST_ONCE_LINKED = 64
"""How many frames wait for a link that may never be made. Beyond that the oldest is dropped."""
LOOKS = 4
"""How often in a lease we check whether a peer's host answers."""
IN_VAIN = 4
"""After this many such connections in a row the link is given up."""


class InOrder(str):
    """The reason of a rank that has left: it sends no more, and all that it sent has come."""

    __slots__ = ()


LEFT = InOrder("it left the group")
CLOSED = InOrder("it closed the group")


class WaitingFrame(NamedTuple):
    """A frame that waits for its link."""

    header: bytes
    payload: Sequence[memoryview]
    done: Done | None
    token: object
    urgent: bool

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum([view.nbytes for view in self.payload])


class PeerHome(Protocol):
    """The endpoint that a peer belongs to. It knows the groups, and makes links.

    `rank` is its own root. `lost` are the roots of the peers that are gone for it, and why.
    """

    rank: int
    loop: asyncio.AbstractEventLoop
    lease: float
    closing: bool
    lost: dict[int, str]
    copies: Copies
    inboxes: Inboxes
    owner: EndpointOwner

    def start_dialing(self, peer: Peer) -> asyncio.Task[None]:
        """Begin to connect to `peer`. The task ends with an attached link, or with the loss of
        `peer`."""
        ...

    def keep(self, stray: Stray) -> None:
        """Keep a stray frame, whose payload has come, until its group is made."""
        ...

    def lose(self, rank: int, reason: str) -> None:
        """Fail, in all groups, what needs the peer with root `rank`, because it is gone."""
        ...

    def cut(self, rank: int, reason: str, *, ended: bool = False, is_over: bool = False) -> None:
        """Do the same for a peer without a link, which may live, and tell the coordinator.

        `ended`: its process has ended. `is_over`: this rank has no doubt.
        """
        ...


class Peer:
    """One rank: the link to it, and the `Receiver` of that link."""

    __slots__ = (
        "_came", "_early_bytes", "_endpoint", "_generation", "_in_vain", "_is_asked", "_made",
        "_once_linked", "_process_watch", "_queue", "_reaching", "_silent", "_taken", "_unheard",
        "broken", "calling", "dialing", "id", "link", "rank",
    )  # fmt: skip

    def __init__(self, endpoint: PeerHome, rank: int, id: str) -> None:
        self.rank = rank  # its root, a number of this endpoint alone
        self.id = id  # its member id, which all ranks know
        self.link: Link | None = None  # None: there was none yet
        self.dialing: asyncio.Task[None] | None = None  # makes a connection
        self.calling: Link | None = None
        """A connection to the peer that has not answered the greeting yet."""
        self.broken = ""
        """Why the last connection broke."""
        self._generation = 0  # how many links there have been
        self._unheard = -1  # how many the peer had had when it made the last one
        self._made = 0.0  # when the last connection was made, by the clock of the loop
        self._came = 0  # frames that had come before the last connection was made
        self._taken = 0  # frames that had come to the peer by then
        self._in_vain = 0  # connections in a row that were in vain
        self._silent = 0  # looks in a row without an answer
        self._process_watch: ProcessWatch | None = None
        """Watches the peer's process, over all connections."""
        self._endpoint = endpoint
        self._queue: list[WaitingFrame] = []  # frames that wait for the first link
        self._once_linked: deque[bytes] = deque(maxlen=MOST_ONCE_LINKED)
        """Frames that wait, too, but for which this rank makes no link."""
        self._reaching: list[bytes] = []
        """Frames for which it tries to make one, too."""
        self._is_asked = False  # one of these is for an operation that waits for this peer
        # bytes of frames for groups that do not exist here yet, see MAX_EARLY_BYTES
        self._early_bytes = 0

    def send(
        self,
        header: bytes,
        payload: Sequence[memoryview] = (),
        *,
        done: Done | None = None,
        token: object = None,
        urgent: bool = False,
        dial: bool = True,
    ) -> None:
        """Send, as `Link.send` does, or queue until there is a link. Does nothing if the peer is
        lost.

        Without `dial`, this makes no link. The header waits for a link that the peer makes, then
        overtakes what is queued, and does not count as `held`.
        """
        if self.link is not None:
            self.link.send(header, payload, done=done, token=token, urgent=urgent)
            return
        endpoint = self._endpoint
        if self.rank in endpoint.lost or endpoint.closing:
            return
        if not dial:
            self._once_linked.append(header)
            return
        self._queue.append(WaitingFrame(header, payload, done, token, urgent))
        if self.dialing is None:
            self.dialing = endpoint.start_dialing(self)

    def reach(self, header: bytes, *, asks: bool) -> None:
        """Send an urgent frame, and make a link for it. It does not count as `held`. Does nothing
        if the peer is lost.

        `asks`: an operation waits for this peer, which is lost if it cannot be reached. Otherwise
        it is not lost by that.
        """
        endpoint = self._endpoint
        if self.link is not None:
            self.link.send(header, urgent=True)
        elif self.rank not in endpoint.lost and not endpoint.closing:
            self._reaching.append(header)
            self._is_asked = self._is_asked or asks
            if self.dialing is None:
                dialing = endpoint.start_dialing(self)
                self.dialing = None if dialing.done() else dialing  # it may have failed at once

    def unreached(self) -> None:
        """Make no link for the frames of `reach` any more, because none was made."""
        self._once_linked += self._reaching
        self._reaching.clear()

    def drop(self) -> None:
        """Drop what waits for a link, because the peer is lost. Some of it is memory of users."""
        self._queue, self._reaching = [], []
        self._once_linked.clear()

    @property
    def is_needed(self) -> bool:
        """Whether something waits for a connection that cannot be without it."""
        return self.link is not None or self._is_asked or bool(self._queue)

    @property
    def held(self) -> int:
        """How many bytes were sent that the peer's system may not have."""
        link = self.link
        if link is None:
            return sum([frame.nbytes for frame in self._queue])
        return link.held

    @property
    def is_linked(self) -> bool:
        """Whether there is a link with a connection."""
        link = self.link
        return link is not None and not link.is_severed

    def discard(self, token: object) -> None:
        self._queue = [frame for frame in self._queue if frame.token is not token]
        if self.link is not None:
            self.link.discard(token)

    def deliver(self, done: Done) -> bool:
        """Tell whether all that was sent has come to the peer. If not, `done` will be called."""
        return self.link is None or self.link.deliver(done)

    @property
    def claim(self) -> Claim:
        """What we tell the peer over a new connection. After that nothing comes over the old
        one."""
        return Claim(self._generation, 0 if self.link is None else self.link.came)

    def make_way(self, theirs: Claim) -> bool:
        """Tell whether there is room for a connection that the peer has made.

        If the peer knows of the present link and calls nevertheless, that link is broken, and given
        up.
        """
        link = self.link
        if link is None:
            return theirs.came == 0
        if theirs.generation < self._generation:
            # What lies in the link may show that the peer has heard of it since.
            while link.came == self._came and link.taken <= theirs.came and link.poll():
                pass
        if not link.lasts or link.is_closed or theirs.came < link.taken:
            return False  # the last: the peer has said since that more has come
        if not link.is_severed:
            # If our HELLO_ACK was lost, the peer does not know that its connection attempt
            # succeeded. It still names the number of links that it had before, `_unheard`.
            has_not_heard = theirs.generation == self._unheard and link.came == self._came
            if theirs.generation < self._generation and not has_not_heard:
                return False  # it was begun before this link
            self.broken = "the peer has made another connection; "
            link.sever()
        if not link.can_go_on(theirs.came):
            link.close(ProtocolError("it cannot go on where the link broke"))
        return not link.is_closed

    def attach(self, link: Link, theirs: Claim, *, dialled: bool) -> None:
        """Take `link`, which is up: send what waits for it, and what the peer has not got."""
        old = self.link
        # The peer has shown a proof, so it may send frames of full size now.
        link.receiver = self
        link.max_header = MAX_HEADER
        link.max_payload = MAX_WHOLE
        self.link = link  # before going on, because that sends
        # Going on may find the link broken already, and then calls again, though the task that made
        # this link has not heard yet that it was taken.
        self.dialing = None
        self._unheard = -1 if dialled else theirs.generation
        # Both sides know both claims, so both count alike from here on, even if one of them had not
        # heard of the last link.
        self._generation = max(self._generation, theirs.generation) + 1
        link.keep(self._severed, self._endpoint.copies)
        if old is not None:
            log.info("rank %d: the connection was made again (%s)", self.rank, self.broken)
            link.adopt(old, theirs.came)
        self._came = link.came
        if theirs.came > self._taken:
            self._taken, self._in_vain = theirs.came, 0  # the last connection carried something
        link.listen_for(self._endpoint.lease)
        if self._process_watch is None:
            self._process_watch = ProcessWatch.over(link, self._endpoint.loop, self._process_ended)
        self._made = self._endpoint.loop.time()
        once_linked, self._reaching = [*self._once_linked, *self._reaching], []
        self._once_linked.clear()
        for header in once_linked:
            self.send(header, urgent=True)
        queue, self._queue = self._queue, []
        # As on a link: urgent frames first.
        for header, payload, done, token, urgent in sorted(queue, key=lambda frame: not frame[-1]):
            self.send(header, payload, done=done, token=token, urgent=urgent)

    def can_attach(self, link: Link, theirs: Claim) -> bool:
        """Tell whether `link` can take the place of the last one, given the peer's claim."""
        old = self.link
        if old is None:
            return theirs.came == 0
        can_go_on = old.is_severed and not old.is_closed and old.can_go_on(theirs.came)
        return link.lasts and can_go_on

    def look(self, seconds: float) -> None:
        """Check whether the peer's host has answered in the `seconds` since the last look."""
        # While a connection is being made, the old one is gone, so the new one has to be answered.
        link = self.calling or self.link
        if link is None or not link.is_unanswered(seconds):
            self._silent = 0
            return
        self._silent += 1
        if self._silent >= LOOKS:
            link.break_off(TimeoutError(f"no answer for {LOOKS * seconds:g} s"))

    def _severed(self, link: Link, error: BaseException) -> None:
        """Make another connection, because this one broke."""
        endpoint = self._endpoint
        if link is not self.link:
            return
        soon = endpoint.loop.time() < self._made + SHORT_LIFE and link.came == self._came
        # One of the two sides breaks it off first, after four looks. The other has seen fewer.
        unanswered, self._silent = self._silent and link.held, 0
        self._in_vain = self._in_vain + 1 if soon or unanswered else 0
        if endpoint.closing:
            link.close(error)
            return
        if self._in_vain >= IN_VAIN:
            text = (
                f"given up: {IN_VAIN} connections in a row broke, and nothing was seen to arrive; "
                f"the last one: {error}"
            )
            if unanswered:
                text += ". Each was answered at first. Do large packets pass? Check the MTU"
            link.close(ConnectionError(text))
            return
        self.broken = f"connection lost ({error}); "
        if self.dialing is None:
            self.dialing = endpoint.start_dialing(self)

    def _process_ended(self) -> None:
        """Handle the end of the peer's process, though another process may hold its end of the
        connection."""
        link = self.link
        assert link is not None
        while link.poll():  # read what it had sent
            pass
        if not link.is_closed:
            self._endpoint.cut(self.rank, f"its process has ended ({link.peer_name})", ended=True)

    def close_in_child(self) -> None:
        """After a fork, in the child: drop its copies."""
        if self._process_watch is not None:
            self._process_watch.close_in_child()
        for link in (self.link, self.calling):
            if link is not None:
                link.close_in_child()

    # -- Receiver ---------------------------------------------------------------------------------

    def frame(self, link: Link, header: bytes, nbytes: int) -> Landing | None:
        fields = unpack_fields(header)
        if len(fields) < 2 or type(fields[1]) is not bytes or type(fields[0]) is not int:
            raise ProtocolError("a header has a kind and a context")
        endpoint = self._endpoint
        if fields[0] == kinds.FAREWELL and not fields[1]:
            endpoint.lose(self.rank, f"it aborted: {farewell_reason(fields)}")
            return None
        # Answers are queued without limit. So a peer that asks without reading answers would fill
        # this rank's memory.
        if fields[0] in QUESTIONS and link.unheard > MAX_UNHEARD:
            raise ProtocolError(
                f"rank {self.rank} asks, but has not taken in {link.unheard} frames sent to it"
            )
        context = endpoint.inboxes.open.get(fields[1])
        if context is not None:
            return context.frame(self.rank, fields, nbytes)
        if fields[1] in endpoint.inboxes.closed:
            # The context is closed here, and the peer may not know that.
            if fields[0] not in (kinds.REVOKE, kinds.FAREWELL):
                reason = endpoint.inboxes.answer(fields[1], self.rank)
                if reason is not None:
                    link.send(pack_fields(kinds.FAREWELL, fields[1], reason))
            return None
        cost = nbytes + len(header) + STRAY_COST
        self._early_bytes += cost
        if self._early_bytes > MAX_EARLY_BYTES:
            raise ProtocolError(
                f"rank {self.rank} sent over {MAX_EARLY_BYTES} bytes for groups not known here"
            )
        return Stray(endpoint, self.rank, fields, memoryview(bytearray(nbytes)), cost)

    def closed(self, link: Link, error: BaseException | None) -> None:
        if self.link is link:
            if self._process_watch is not None:
                self._process_watch.close()
            if error is None:
                self._endpoint.lose(self.rank, LEFT)
            else:
                self._endpoint.cut(self.rank, f"connection lost ({error})")

    def settle(self, stray: Stray) -> None:
        """Note that a stray frame has found its group."""
        self._early_bytes -= stray.cost


def farewell_reason(fields: Sequence[Any]) -> str:
    """Return why the sender of a FAREWELL frame left. Raises ProtocolError."""
    if len(fields) != 3 or type(fields[2]) is not str:
        raise ProtocolError("a FAREWELL frame ends in a text")
    return CLOSED if fields[2] == CLOSED else fields[2]
