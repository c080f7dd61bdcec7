"""One rank's links to its peers: made when first needed, shared by all groups of a membership.

An endpoint belongs to one membership: one group in one epoch. Groups derived from it (subgroup,
split, dup) are further contexts on the same links.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

from aiodist.errors import AiodistError, ProtocolError
from aiodist.runtime.lane import Moved
from aiodist.runtime.progress import Progress
from aiodist.runtime.work import Work
from aiodist.transports.base import Done, Link, Receiver
from aiodist.wire import kinds
from aiodist.wire.frames import MAX_HEADER, MAX_PAYLOAD, pack_fields, unpack_fields

log = logging.getLogger("aiodist.endpoint")

HANDSHAKE_TIMEOUT = 10.0
"""Seconds for a peer to say hello, and for the answer."""
FAREWELL_TIMEOUT = 1.0
"""Seconds for peers to hear that we leave at once."""
MAX_EARLY_BYTES = 8 << 20
"""Most bytes that one peer may send for groups that were not made here yet."""
CLOSED = "it closed the group"
MAX_CLOSED = 4096
"""How many closed contexts are remembered, to tell their late frames from garbage."""

Dial = Callable[[int, Receiver], Awaitable[Link]]


class Inbox(Protocol):
    """Takes the frames of one group: a context."""

    ended: AiodistError | None

    @property
    def id(self) -> bytes: ...

    @property
    def pending(self) -> list[Work[Any]]: ...

    def frame(self, root: int, fields: list[Any], nbytes: int) -> memoryview | None: ...

    def payload(self, root: int) -> None: ...

    def rank_lost(self, root: int, reason: str) -> None: ...

    def close(self, error: AiodistError) -> None: ...


class Identity(NamedTuple):
    """Who this endpoint is, and who its peers are."""

    group: str
    epoch: int
    rank: int
    ids: tuple[str, ...]


class Outgoing(NamedTuple):
    """A frame that waits for its link."""

    header: bytes
    payload: Sequence[memoryview]
    done: Done | None
    token: object
    urgent: bool


class Peer:
    """The link to one rank, and what it brings: the `Receiver` of that link."""

    __slots__ = (
        "_early_bytes", "_endpoint", "_queue", "_target", "attached", "dialing", "link", "rank",
    )  # fmt: skip

    def __init__(self, endpoint: Endpoint, rank: int) -> None:
        self.rank = rank
        self.link: Link | None = None
        self.attached = asyncio.Event()
        self.dialing: asyncio.Task[None] | None = None
        self._endpoint = endpoint
        self._queue: list[Outgoing] = []
        self._target: Inbox | Stray | None = None
        self._early_bytes = 0

    def send(self, frame: Outgoing) -> None:
        """Send, or queue until there is a link."""
        link = self.link
        if link is not None:
            link.send(
                frame.header,
                frame.payload,
                done=frame.done,
                token=frame.token,
                urgent=frame.urgent,
            )
            return
        self._queue.append(frame)
        if self.dialing is None:
            self.dialing = self._endpoint.start_dialing(self)

    def discard(self, token: object) -> None:
        self._queue = [frame for frame in self._queue if frame.token is not token]
        if self.link is not None:
            self.link.discard(token)

    def attach(self, link: Link) -> None:
        """`link` is up: send what waits for it."""
        link.receiver = self
        link.max_header = MAX_HEADER
        link.max_payload = MAX_PAYLOAD
        self.link = link
        self.attached.set()
        queue, self._queue = self._queue, []
        # As on a link: what is urgent goes first.
        for frame in sorted(queue, key=lambda frame: not frame.urgent):
            self.send(frame)

    # -- Receiver ---------------------------------------------------------------------------------

    def frame(self, link: Link, header: bytes, nbytes: int) -> memoryview | None:
        fields = unpack_fields(header)
        if len(fields) < 2 or type(fields[1]) is not bytes or type(fields[0]) is not int:
            raise ProtocolError("a header has a kind and a context")
        endpoint = self._endpoint
        if fields[0] == kinds.FAREWELL:
            self._farewell(fields)
            return None
        context = endpoint.contexts.get(fields[1])
        if context is not None:
            self._target = context
            return context.frame(self.rank, fields, nbytes)
        self._target = None
        if fields[1] in endpoint.closed_contexts:
            # Nobody takes it here any more, and the peer may not know.
            link.send(pack_fields(kinds.FAREWELL, fields[1], CLOSED))
            return None
        cost = nbytes + len(header) + 100
        self._early_bytes += cost
        if self._early_bytes > MAX_EARLY_BYTES:
            raise ProtocolError(
                f"rank {self.rank} sent over {MAX_EARLY_BYTES} bytes for groups not known here"
            )
        self._target = stray = Stray(self.rank, fields, bytearray(nbytes), cost)
        return memoryview(stray.data)

    def _farewell(self, fields: list[Any]) -> None:
        if len(fields) != 3 or type(fields[2]) is not str:
            raise ProtocolError("a FAREWELL frame ends in a text")
        if not fields[1]:
            self._endpoint.lose(self.rank, f"it aborted: {fields[2]}")
            return
        context = self._endpoint.contexts.get(fields[1])
        if context is not None:
            context.rank_lost(self.rank, fields[2])

    def payload(self, link: Link) -> None:
        target, self._target = self._target, None
        if isinstance(target, Stray):
            self._endpoint.keep(target)
        elif target is not None:
            target.payload(self.rank)

    def closed(self, link: Link, error: BaseException | None) -> None:
        if self.link is link:
            self._target = None
            reason = "it left the group" if error is None else f"connection lost ({error})"
            self._endpoint.lose(self.rank, reason)

    def settle(self, stray: Stray) -> None:
        """A stray frame has found its group."""
        self._early_bytes -= stray.cost


class Stray(NamedTuple):
    """A frame for a group that was not made here yet."""

    rank: int
    fields: list[Any]
    data: bytearray
    cost: int


class Endpoint:
    """Links to the peers of one membership, and the contexts that use them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.progress = Progress(loop)
        self.moved = Moved()
        self.contexts: dict[bytes, Inbox] = {}
        self.closed_contexts: OrderedDict[bytes, None] = OrderedDict()
        self.lost: dict[int, str] = {}
        self.closing = False
        self._identity: Identity | None = None
        self._peers: list[Peer] = []
        self._dial: Dial | None = None
        self._greeters: dict[Greeter, None] = {}  # in order: a simulation repeats itself
        self._strays: dict[bytes, list[Stray]] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}

    @property
    def rank(self) -> int:
        assert self._identity is not None
        return self._identity.rank

    def activate(self, identity: Identity, dial: Dial) -> None:
        """The membership is known: from now on peers are answered and can be reached."""
        self._identity = identity
        self._dial = dial
        self._peers = [Peer(self, rank) for rank in range(len(identity.ids))]
        for greeter in list(self._greeters):
            greeter.proceed()

    # -- for contexts -----------------------------------------------------------------------------

    def add(self, context: Inbox) -> None:
        """Let frames for `context` through, the ones that came early first."""
        self.contexts[context.id] = context
        for stray in self._strays.pop(context.id, ()):
            self._peers[stray.rank].settle(stray)
            view = context.frame(stray.rank, stray.fields, len(stray.data))
            if view is not None:
                view[:] = stray.data
            context.payload(stray.rank)

    def remove(self, context: Inbox, reason: str = CLOSED) -> None:
        """Drop further frames for `context`, and tell those who may wait for some of ours."""
        farewell = pack_fields(kinds.FAREWELL, context.id, reason[:1000])
        for peer in self._peers:
            if peer.link is not None:
                peer.link.send(farewell)  # behind all that was sent before
        self.contexts.pop(context.id, None)
        self.closed_contexts[context.id] = None
        if len(self.closed_contexts) > MAX_CLOSED:
            self.closed_contexts.popitem(last=False)

    def keep(self, stray: Stray) -> None:
        """Keep a stray until its group is made (or deliver it, if that happened meanwhile)."""
        context = self.contexts.get(stray.fields[1])
        if context is None:
            self._strays.setdefault(stray.fields[1], []).append(stray)
            return
        self._peers[stray.rank].settle(stray)
        view = context.frame(stray.rank, stray.fields, len(stray.data))
        if view is not None:
            view[:] = stray.data
        context.payload(stray.rank)

    def send(
        self,
        rank: int,
        header: bytes,
        payload: Sequence[memoryview] = (),
        *,
        done: Done | None = None,
        token: object = None,
        urgent: bool = False,
    ) -> None:
        """Send one frame to `rank`; nothing happens when it is lost."""
        peer = self._peers[rank]
        link = peer.link
        if link is not None:
            link.send(header, payload, done=done, token=token, urgent=urgent)
        elif rank not in self.lost and not self.closing:
            peer.send(Outgoing(header, payload, done, token, urgent))

    def discard(self, rank: int, token: object) -> None:
        self._peers[rank].discard(token)

    def divert(self, rank: int, into: memoryview | None) -> int:
        link = self._peers[rank].link
        return 0 if link is None else link.divert(into)

    def poll(self) -> None:
        """Take in what has arrived."""
        for peer in self._peers:
            if peer.link is not None:
                peer.link.poll()

    def link(self, rank: int) -> Link | None:
        return self._peers[rank].link

    @property
    def payload_bytes(self) -> tuple[int, int]:
        """Payload bytes sent and received so far, over all links and through shared memory."""
        links = [peer.link for peer in self._peers if peer.link is not None]
        return (
            sum([link.sent_bytes for link in links], self.moved.sent),
            sum([link.received_bytes for link in links], self.moved.received),
        )

    # -- making links -----------------------------------------------------------------------------

    def accept(self, link: Link) -> None:
        """A peer has connected."""
        greeter = Greeter(self, link)
        link.receiver = greeter
        self._greeters[greeter] = None

    def start_dialing(self, peer: Peer) -> asyncio.Task[None]:
        return self.spawn(self._connect(peer), f"aiodist dial rank {peer.rank}")

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run something beside; it is cancelled when the endpoint closes."""
        task = self.loop.create_task(coroutine, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    async def _connect(self, peer: Peer) -> None:
        assert self._dial is not None and self._identity is not None
        identity = self._identity
        greeting = Greeting(self.loop, peer)
        link: Link | None = None
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                link = await self._dial(peer.rank, greeting)
                link.send(
                    pack_fields(
                        kinds.HELLO,
                        kinds.MAGIC,
                        kinds.VERSION,
                        identity.group,
                        identity.epoch,
                        identity.rank,
                        identity.ids[identity.rank],
                        identity.ids[peer.rank],
                    ),
                    urgent=True,
                )
                answered = await greeting.answered
                if not answered and identity.rank > peer.rank:
                    # Both dialled at once, and the connection of the lower rank is kept.
                    await peer.attached.wait()
        except Exception as error:  # also an address that makes no sense: the others must hear
            if link is not None and peer.link is not link:
                link.close()
            if peer.link is None:
                self.lose(peer.rank, f"not reachable: {str(error) or 'no answer to hello'}")
        except asyncio.CancelledError:
            # Superseded by the peer's own connection, or the endpoint was closed.
            if link is not None and peer.link is not link:
                link.close()
            raise
        else:
            if peer.link is None:
                self.lose(peer.rank, "it refuses connections (it has left, or lost us)")
        finally:
            peer.dialing = None

    def greeted(self, greeter: Greeter, rank: int) -> None:
        """Rank `rank` has connected to us."""
        self._greeters.pop(greeter, None)
        assert self._identity is not None
        peer = self._peers[rank]
        if peer.link is not None or rank in self.lost or self.closing:
            greeter.link.close()
            return
        if peer.dialing is not None:
            # Both dialled at once: the connection of the lower rank is kept.
            if self.rank < rank:
                greeter.link.close()
                return
            peer.dialing.cancel()
        # Urgent: nothing may overtake it.
        greeter.link.send(pack_fields(kinds.HELLO_ACK, self._identity.ids[self.rank]), urgent=True)
        peer.attach(greeter.link)

    def forget(self, greeter: Greeter) -> None:
        self._greeters.pop(greeter, None)

    # -- ends -------------------------------------------------------------------------------------

    def lose(self, rank: int, reason: str) -> None:
        """`rank` is gone: fail what needs it, in every context."""
        if rank in self.lost or self.closing or rank == self.rank:
            return
        self.lost[rank] = reason
        log.debug("rank %d is lost: %s", rank, reason)
        peer = self._peers[rank]
        if peer.link is not None and not peer.link.is_closed:
            peer.link.close()
        for context in list(self.contexts.values()):
            context.rank_lost(rank, reason)

    def left(self, rank: int) -> None:
        """`rank` has left in order: once all that it sent is in, it is gone."""
        link = self._peers[rank].link
        if link is None or link.is_closed:
            self.lose(rank, "it left the group")

    async def finish(self, timeout: float) -> None:
        """Send what is queued, say goodbye, close."""
        self.closing = True
        await self._stop_tasks()
        links = [peer.link for peer in self._peers if peer.link is not None]
        if links:
            await asyncio.gather(*(link.finish(timeout) for link in links))

    def abort(self, reason: str) -> None:
        """Leave at once, telling the peers why. Await `aborted` next."""
        self.closing = True
        farewell = pack_fields(kinds.FAREWELL, b"", reason[:1000])
        for peer in self._peers:
            if peer.link is not None:
                peer.link.send(farewell, urgent=True)

    async def aborted(self) -> None:
        """Wait until everything is closed after `abort`."""
        await self.finish(FAREWELL_TIMEOUT)

    def close_in_child(self) -> None:
        """After a fork: close the child's copies of the sockets."""
        self.closing = True
        for greeter in self._greeters:
            greeter.link.close_in_child()
        for peer in self._peers:
            if peer.link is not None:
                peer.link.close_in_child()

    async def _stop_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for greeter in list(self._greeters):
            greeter.link.close()

    def identify(self, fields: list[Any]) -> int | None:
        """The rank that says hello with `fields`; None while the membership is not known.

        Raises ProtocolError for a hello that is not for us.
        """
        if len(fields) != 8 or fields[:3] != [kinds.HELLO, kinds.MAGIC, kinds.VERSION]:
            raise ProtocolError(f"not the hello of aiodist protocol {kinds.VERSION}")
        identity = self._identity
        if identity is None:
            return None
        group, epoch, rank, their_id, our_id = fields[3:]
        if (group, epoch) != (identity.group, identity.epoch):
            raise ProtocolError(f"a hello for group {group!r} epoch {epoch!r}")
        if (
            type(rank) is not int
            or not 0 <= rank < len(identity.ids)
            or rank == identity.rank
            or identity.ids[rank] != their_id
            or identity.ids[identity.rank] != our_id
        ):
            raise ProtocolError(f"a hello of someone who is not rank {rank!r} of {group!r}")
        return rank


class Greeter:
    """Receives the hello of a peer that connected to us."""

    def __init__(self, endpoint: Endpoint, link: Link) -> None:
        self.link = link
        self._endpoint = endpoint
        self._fields: list[Any] | None = None
        self._timer = endpoint.loop.call_later(HANDSHAKE_TIMEOUT, self._expired)

    def frame(self, link: Link, header: bytes, nbytes: int) -> memoryview | None:
        if self._fields is not None or nbytes:
            raise ProtocolError("a peer waits for the answer to its hello")
        self._fields = unpack_fields(header)
        return None

    def payload(self, link: Link) -> None:
        self.proceed()

    def proceed(self) -> None:
        """Answer the hello, once it has come and the membership is known."""
        if self._fields is None:
            return
        self._timer.cancel()
        try:
            rank = self._endpoint.identify(self._fields)
        except ProtocolError as error:
            self.link.close(error)
            return
        if rank is not None:
            self._endpoint.greeted(self, rank)

    def closed(self, link: Link, error: BaseException | None) -> None:
        self._timer.cancel()
        self._endpoint.forget(self)
        if isinstance(error, ProtocolError):
            log.warning("connection of %s closed: %s", link.peer_name, error)

    def _expired(self) -> None:
        self.link.close(ProtocolError(f"no hello within {HANDSHAKE_TIMEOUT:g} s"))


class Greeting:
    """Receives the answer to our hello."""

    def __init__(self, loop: asyncio.AbstractEventLoop, peer: Peer) -> None:
        self.answered: asyncio.Future[bool] = loop.create_future()
        self._peer = peer

    def frame(self, link: Link, header: bytes, nbytes: int) -> memoryview | None:
        fields = unpack_fields(header)
        if nbytes or len(fields) != 2 or fields[0] != kinds.HELLO_ACK:
            raise ProtocolError("not the answer to a hello")
        return None

    def payload(self, link: Link) -> None:
        if self.answered.done():
            link.close()  # superseded
            return
        # At once: the peer's first frames may be right behind its answer.
        self._peer.attach(link)
        self.answered.set_result(True)

    def closed(self, link: Link, error: BaseException | None) -> None:
        if not self.answered.done():
            self.answered.set_result(False)
