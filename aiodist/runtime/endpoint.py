"""One rank's links to its peers: made when first needed, shared by all groups of a membership.

An endpoint lives as long as the membership, over all its epochs. It knows its peers by *root*, a
number of its own: in the order in which it met them, so that in the first epoch it is the rank.
Each epoch of the group, and each group made of it (subgroup, split, dup) is a context on the same
links, with a number that other contexts do not have: no frame is taken for another epoch's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

from aiodist.errors import AiodistError, ProtocolError
from aiodist.runtime.greeting import HANDSHAKE_TIMEOUT, Greeter, Greeting, Identity, Nonces
from aiodist.runtime.lane import Moved
from aiodist.runtime.progress import Progress
from aiodist.runtime.recorder import Recorder
from aiodist.runtime.strangers import Strangers
from aiodist.runtime.work import Work
from aiodist.transports.base import Done, Link, Receiver
from aiodist.wire import kinds
from aiodist.wire.frames import MAX_HEADER, MAX_PAYLOAD, pack_fields, unpack_fields
from aiodist.wire.limits import MAX_MEMBERS
from aiodist.wire.proof import mark_of

log = logging.getLogger("aiodist.endpoint")

FAREWELL_TIMEOUT = 1.0
"""Seconds for peers to hear that we leave at once."""
MAX_EARLY_BYTES = 8 << 20
"""Most bytes that one peer may send for groups that were not made here yet."""
CLOSED = "it closed the group"
MAX_CLOSED = 4096
"""How many closed contexts are remembered, to tell their late frames from garbage."""

MIN_STRANGERS = 256
"""So many connections that have not shown who they are there may always be."""

Dial = Callable[[int, Receiver], Awaitable[Link]]
Ask = Callable[[Sequence[int], Callable[[dict[int, str]], None]], None]


class Inbox(Protocol):
    """Takes the frames of one group: a context."""

    ended: AiodistError | None
    ranks: tuple[int, ...]

    @property
    def id(self) -> bytes: ...

    @property
    def pending(self) -> list[Work[Any]]: ...

    def frame(self, root: int, fields: list[Any], nbytes: int) -> memoryview | None: ...

    def payload(self, root: int) -> None: ...

    def rank_lost(self, root: int, reason: str) -> None: ...

    def close(self, error: AiodistError) -> None: ...


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
        "_early_bytes", "_endpoint", "_queue", "_target", "attached", "dialing", "id", "link",
        "rank",
    )  # fmt: skip

    def __init__(self, endpoint: Endpoint, rank: int, id: str) -> None:
        self.rank = rank
        self.id = id
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

    @property
    def has_queued(self) -> bool:
        """Whether something waits for the link."""
        return bool(self._queue)

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
            if fields[0] != kinds.REVOKE:
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
            if error is None:
                self._endpoint.lose(self.rank, "it left the group")
            else:
                self._endpoint.cut(self.rank, f"connection lost ({error})")

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

    def __init__(self, loop: asyncio.AbstractEventLoop, *, expected: int = MAX_MEMBERS) -> None:
        """`expected`: how many members there will be at most."""
        self.loop = loop
        self._expected = expected
        self.progress = Progress(loop)
        self.recorder = Recorder()
        self.moved = Moved()
        self.contexts: dict[bytes, Inbox] = {}
        self.closed_contexts: OrderedDict[bytes, None] = OrderedDict()
        self.lost: dict[int, str] = {}
        self.closing = False
        self.reads_devices = True
        """Whether this rank may read the devices of others, and they its own."""
        self.rank = -1
        """This rank's own root."""
        self.on_broken: Callable[[int, str], None] = lambda root, reason: None
        """Called for a peer to whom there is no link any more, though it did not take its leave."""
        self.ask: Ask = lambda roots, tell: None
        """Asks the coordinator what peers are doing, where there is one: it tells, by root."""
        self._identity: Identity | None = None
        self._expecting = False
        self._peers: dict[int, Peer] = {}
        self._roots: dict[str, int] = {}
        self._marks: dict[bytes, int] = {}
        self._numbers = itertools.count()
        self._dial: Dial | None = None
        self._greeters: dict[Greeter, None] = {}  # in order: a simulation repeats itself
        self._strangers: Strangers[Greeter] = Strangers(log, max(MIN_STRANGERS, 2 * expected))
        self._strays: dict[bytes, list[Stray]] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}

    def activate(self, identity: Identity, dial: Dial) -> None:
        """This rank is a member; `dial` makes links. `admit` says who the others are."""
        self._identity = identity
        self._dial = dial

    def admit(self, ids: Sequence[str]) -> tuple[int, ...]:
        """The members `ids` are answered and can be reached from now on: their roots."""
        assert self._identity is not None
        self._expected = max(self._expected, len(ids))
        self._strangers.most = max(MIN_STRANGERS, 2 * len(ids))
        roots = []
        for member_id in ids:
            root = self._roots.get(member_id)
            if root is None:
                root = self._roots[member_id] = next(self._numbers)
                self._peers[root] = Peer(self, root, member_id)
                self._marks[mark_of(member_id)] = root
                if member_id == self._identity.id:
                    self.rank = root
            roots.append(root)
        self._proceed()
        return tuple(roots)

    def expect(self, expecting: bool) -> None:
        """Whether peers may already know members that are not known here."""
        self._expecting = expecting
        self._proceed()

    def _proceed(self) -> None:
        for greeter in list(self._greeters):
            greeter.proceed()

    def forget(self, root: int) -> None:
        """A peer that is lost, and that no context has a place for, is no peer any more."""
        peer = self._peers.pop(root)
        del self._roots[peer.id], self._marks[mark_of(peer.id)]
        self.lost.pop(root, None)
        if peer.dialing is not None:
            peer.dialing.cancel()
        if peer.link is not None:
            self.moved.add(peer.link.sent_bytes, peer.link.received_bytes)
        for context_id, strays in list(self._strays.items()):
            self._strays[context_id] = [stray for stray in strays if stray.rank != root]

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
        for peer in self._peers.values():
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
        for peer in self._peers.values():
            if peer.link is not None:
                peer.link.poll()

    def link(self, rank: int) -> Link | None:
        return self._peers[rank].link

    @property
    def payload_bytes(self) -> tuple[int, int]:
        """Payload bytes sent and received so far, over all links and through shared memory."""
        links = [peer.link for peer in self._peers.values() if peer.link is not None]
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
        self._strangers.add(greeter)

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
        greeting = Greeting(self.loop, peer, self._identity)
        link: Link | None = None
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                link = await self._dial(peer.rank, greeting)
                greeting.begin(link)
                answered = await greeting.answered
                if not answered and self._identity.id > peer.id:
                    # Both dialled at once, and the connection of the lower id is kept.
                    await peer.attached.wait()
        except Exception as error:  # also an address that makes no sense: the others must hear
            if link is not None and peer.link is not link:
                link.close()
            if peer.link is None:
                self.cut(peer.rank, f"not reachable: {str(error) or 'no answer to hello'}")
        except asyncio.CancelledError:
            # Superseded by the peer's own connection, or the endpoint was closed.
            if link is not None and peer.link is not link:
                link.close()
            raise
        else:
            if peer.link is None:
                self.cut(peer.rank, f"it refuses connections ({greeting.why})")
        finally:
            peer.dialing = None

    def holds(self, greeter: Greeter) -> bool:
        """A peer has sent its proof: whether it may wait until the membership is known."""
        self._strangers.discard(greeter)
        return len(self._greeters) - len(self._strangers) <= self._expected

    def greeted(self, greeter: Greeter, rank: int, proof: bytes) -> None:
        """Rank `rank` has connected to us, and `proof` is ours for it."""
        self._greeters.pop(greeter, None)
        peer = self._peers[rank]
        if peer.link is not None or rank in self.lost or self.closing:
            greeter.link.close()
            return
        if peer.dialing is not None:
            # Both dialled at once: the connection of the lower id is kept.
            assert self._identity is not None
            if self._identity.id < peer.id:
                greeter.link.close()
                return
            peer.dialing.cancel()
        # Urgent: nothing may overtake it.
        greeter.link.send(pack_fields(kinds.HELLO_ACK, proof), urgent=True)
        peer.attach(greeter.link)

    def dismiss(self, greeter: Greeter) -> None:
        self._greeters.pop(greeter, None)
        self._strangers.discard(greeter)

    # -- ends -------------------------------------------------------------------------------------

    def lose(self, rank: int, reason: str) -> None:
        """`rank` is gone: fail what needs it, in every context."""
        if rank in self.lost or self.closing or rank == self.rank or rank not in self._peers:
            return
        self.lost[rank] = reason
        log.debug("rank %d is lost: %s", rank, reason)
        peer = self._peers[rank]
        if peer.link is not None and not peer.link.is_closed:
            peer.link.close()
        for context in list(self.contexts.values()):
            context.rank_lost(rank, reason)

    def cut(self, rank: int, reason: str) -> None:
        """There is no link to `rank`, dead or alive."""
        if rank in self._peers and rank not in self.lost and not self.closing:
            self.on_broken(rank, reason)
        self.lose(rank, reason)

    def left(self, rank: int) -> None:
        """`rank` has left in order: once all that it sent is in, it is gone."""
        link = self._peers[rank].link
        if link is None or link.is_closed:
            self.lose(rank, "it left the group")

    async def connected(self, timeout: float) -> None:
        """Wait until there are links for all that was sent; `timeout` seconds at most."""
        dialing = [
            peer.dialing for peer in self._peers.values() if peer.dialing and peer.has_queued
        ]
        if dialing:
            await asyncio.wait(dialing, timeout=timeout)

    async def finish(self, timeout: float) -> None:
        """Send what is queued, say goodbye, close."""
        self.closing = True
        await self._stop_tasks()
        links = [peer.link for peer in self._peers.values() if peer.link is not None]
        if links:
            await asyncio.gather(*(link.finish(timeout) for link in links))

    def abort(self, reason: str) -> None:
        """Leave at once, telling the peers why. Await `aborted` next."""
        self.closing = True
        farewell = pack_fields(kinds.FAREWELL, b"", reason[:1000])
        for peer in self._peers.values():
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
        for peer in self._peers.values():
            if peer.link is not None:
                peer.link.close_in_child()

    async def _stop_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for greeter in list(self._greeters):
            greeter.link.close()

    def identify(self, mark: bytes, mac: bytes, nonces: Nonces) -> tuple[int, bytes] | None:
        """Who connected shows that it is the member with this mark: its root, and our own proof
        for it. None while it may be one that is not known here yet. Raises ProtocolError for
        somebody else."""
        identity = self._identity
        if identity is None:
            return None
        root = self._marks.get(mark)
        if root is None:
            if self._expecting:
                return None
            raise ProtocolError("who connected is no member that is known here")
        their_id = self._peers[root].id
        if root == self.rank or not identity.check("dialler", their_id, mac, nonces):
            raise ProtocolError("who connected did not show that it is a member")
        return root, identity.prove("listener", their_id, nonces)
