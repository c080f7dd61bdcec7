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
from functools import partial
from typing import Any

from aiodist.errors import ProtocolError
from aiodist.runtime.greeting import HANDSHAKE_TIMEOUT, Claim, Greeter, Greeting, Identity, Nonces
from aiodist.runtime.moved import Moved
from aiodist.runtime.peer import CLOSED, LOOKS, Inbox, Outgoing, Peer, Stray
from aiodist.runtime.progress import Progress
from aiodist.runtime.recorder import Recorder
from aiodist.runtime.strangers import Strangers
from aiodist.transports.base import Done, Link, Receiver
from aiodist.transports.surroundings import is_virtual
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields
from aiodist.wire.limits import MAX_MEMBERS
from aiodist.wire.proof import mark_of

log = logging.getLogger("aiodist.endpoint")

FAREWELL_TIMEOUT = 1.0
"""Seconds for peers to hear that we leave at once."""
RELINK_TIMEOUT = 3.0
"""Seconds in which a connection that broke is made again, or its peer is given up."""
LEASE = 15.0
LONGEST_SILENCE = 3600.0
"""Seconds after which a connection without an answer is broken, however long the lease."""
ATTEMPTS = 10
"""How often a peer is dialled, if the connection breaks before it has answered the greeting. A peer
that has left, or trusts another authority, does not always say more than that: so not for ever."""
FIRST_PAUSE = 0.001
"""Seconds until the second attempt. Each further one takes twice as long: half a second in all."""
MAX_CLOSED = 4096
"""How many closed contexts are remembered, to tell their late frames from garbage."""

MIN_STRANGERS = 256
"""So many connections that have not shown who they are there may always be."""

Dial = Callable[[int, Receiver], Awaitable[Link]]
Ask = Callable[[Sequence[int], Callable[[dict[int, str]], None]], None]


class Endpoint:
    """Links to the peers of one membership, and the contexts that use them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        expected: int = MAX_MEMBERS,
        lease: float = LEASE,
    ) -> None:
        """`expected`: how many members there will be at most. `lease`: after so many seconds
        without an answer of its system, a peer's connection is broken."""
        self.loop = loop
        self.lease = min(lease, LONGEST_SILENCE)
        self._expected = expected
        self.progress = Progress(loop)
        self.recorder = Recorder()
        self.moved = Moved()
        self.called = 0
        """Collectives that were called in contexts that have ended."""
        self.contexts: dict[bytes, Inbox] = {}
        self.closed_contexts: OrderedDict[bytes, None] = OrderedDict()
        self.lost: dict[int, str] = {}
        self.closing = False
        self.reads_devices = True
        """Whether this rank may read the devices of others, and they its own."""
        self._is_over = False
        self.rank = -1
        """This rank's own root."""
        self.on_broken: Callable[[int, str, bool], None] = lambda root, reason, ended: None
        """Called for a peer to whom there is no link any more, though it did not take its leave;
        and whether its process is known to have ended."""
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
        self._look: asyncio.TimerHandle | None = None

    def activate(self, identity: Identity, dial: Dial) -> None:
        """This rank is a member; `dial` makes links. `admit` says who the others are."""
        self._identity = identity
        self._dial = dial
        if not is_virtual(self.loop):  # there the network says so
            self._look_later()

    def _look_later(self) -> None:
        self._look = self.loop.call_later(self.lease / LOOKS, self._look_around)

    def _look_around(self) -> None:
        """Find connections that nobody answers on any more."""
        if not self.closing:
            for peer in list(self._peers.values()):
                peer.look(self.lease / LOOKS)
            self._look_later()

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
            try:
                self._deliver(context, stray)
            except ProtocolError as error:
                self.blame(stray.rank, error)

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
        else:
            self._deliver(context, stray)

    def _deliver(self, context: Inbox, stray: Stray) -> None:
        """Its group is there. Raises ProtocolError."""
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

    def settle(self, rank: int, token: object) -> None:
        """See `Link.settle`."""
        link = self._peers[rank].link
        if link is not None:
            link.settle(token)

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
        """Payload bytes sent and received so far, over all links and through shared memory. Any
        thread may ask."""
        peers = list(self._peers.values())
        links = [link for peer in peers if (link := peer.link) is not None]
        return (
            sum([link.sent_bytes for link in links], self.moved.sent),
            sum([link.received_bytes for link in links], self.moved.received),
        )

    # -- making links -----------------------------------------------------------------------------

    def accept(self, link: Link) -> None:
        """A peer has connected."""
        if self._is_over:
            link.close()
            return
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
        assert self._identity is not None
        why = "not reachable: no answer to hello"
        final = True
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT if peer.link is None else RELINK_TIMEOUT):
                for attempt in range(ATTEMPTS):
                    if attempt:
                        await asyncio.sleep(FIRST_PAUSE * 2 ** (attempt - 1))
                    try:
                        answer = await self._greet(peer)
                    except OSError as error:
                        # Nobody listens for a process that has ended. What breaks may be made.
                        if attempt == ATTEMPTS - 1 or not was_broken(error.__cause__ or error):
                            raise
                    else:
                        if answer is None:
                            return
                        why = f"it refuses connections ({answer.why})"
                        if answer.is_final:
                            break
                else:
                    final = self._identity.id < peer.id
                if not final:
                    # Both dialled at once, and the connection of the lower id is kept.
                    await peer.attached.wait()
                    return
        except Exception as error:  # also an address that makes no sense: the others must hear
            if not isinstance(error, TimeoutError):
                why = f"not reachable: {error}"
        finally:
            if peer.dialing is asyncio.current_task():
                peer.dialing = None
        if not peer.is_linked:
            self.cut(peer.rank, peer.broken + why)

    async def _greet(self, peer: Peer) -> Greeting | None:
        """Connect to `peer`, unless it connects first. A greeting that it has ended, else None."""
        assert self._dial is not None and self._identity is not None
        greeting = Greeting(self.loop, peer, self._identity)
        link: Link | None = None
        try:
            link = await self._dial(peer.rank, greeting)
            greeting.begin(link)
            return None if await greeting.answered or peer.is_linked else greeting
        finally:
            # It failed, or took too long; was superseded by the peer's own connection, or the
            # endpoint was closed.
            if link is not None and peer.link is not link:
                link.close()

    def holds(self, greeter: Greeter) -> bool:
        """A peer has sent its proof: whether it may wait until the membership is known."""
        self._strangers.discard(greeter)
        return len(self._greeters) - len(self._strangers) <= self._expected

    def greeted(self, greeter: Greeter, rank: int, claim: Claim, nonces: Nonces) -> None:
        """Rank `rank` has connected to us."""
        assert self._identity is not None
        self._greeters.pop(greeter, None)
        peer = self._peers[rank]
        if rank in self.lost or self.closing:
            why = "it is leaving" if self.closing else f"it has lost this rank: {self.lost[rank]}"
            greeter.link.send(pack_fields(kinds.FAREWELL, b"", why[:1000]), urgent=True)
            greeter.link.close()
            return
        if not peer.make_way(claim):
            greeter.link.close()
            return
        if peer.dialing is not None:
            # Both dialled at once: the connection of the lower id is kept.
            if self._identity.id < peer.id:
                greeter.link.close()
                return
            peer.dialing.cancel()
            peer.dialing = None
        own = peer.claim
        proof = self._identity.prove("listener", peer.id, nonces, own)
        # Urgent: nothing may overtake it.
        greeter.link.send(pack_fields(kinds.HELLO_ACK, proof, *own), urgent=True)
        peer.attach(greeter.link, claim, dialled=False)

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
        if peer.link is not None:
            if peer.dialing is not None:
                peer.dialing.cancel()
            if not peer.link.is_closed:
                peer.link.close()
        for context in list(self.contexts.values()):
            context.rank_lost(rank, reason)

    def cut(self, rank: int, reason: str, *, ended: bool = False) -> None:
        """There is no link to `rank`, dead or alive; or its process has `ended`."""
        if rank in self._peers and rank not in self.lost and not self.closing:
            self.on_broken(rank, reason, ended)
        self.lose(rank, reason)

    def blame(self, rank: int, error: ProtocolError) -> None:
        """What `rank` sent makes no sense, which only shows now that its link has moved on: it is
        lost all the same."""
        if rank not in self.lost:
            log.warning("closing the link to rank %d: %s", rank, error)
            self.cut(rank, f"connection lost ({error})")

    def left(self, rank: int) -> None:
        """`rank` has left in order: once all that it sent is in, it is gone."""
        peer = self._peers[rank]
        if not peer.is_linked or (peer.link is not None and peer.link.is_closed):
            self.lose(rank, "it left the group")

    async def delivered(self, timeout: float) -> None:
        """Wait until there are links for all that was sent, `timeout` seconds at most, and the
        peers have got it: `FAREWELL_TIMEOUT` at most, as they may be busy."""
        dialing = [
            peer.dialing for peer in self._peers.values() if peer.dialing and peer.has_queued
        ]
        if dialing:
            await asyncio.wait(dialing, timeout=timeout)
        coming: list[asyncio.Future[None]] = []
        for root, peer in self._peers.items():
            came: asyncio.Future[None] = self.loop.create_future()
            if root not in self.lost and not peer.deliver(partial(_set, came)):
                coming.append(came)
        if coming:
            await asyncio.wait(coming, timeout=FAREWELL_TIMEOUT)

    async def finish(self, timeout: float) -> None:
        """Send what is queued, say goodbye, close."""
        self.closing = True
        await self._stop_tasks()
        links = [peer.link for peer in self._peers.values() if peer.link is not None]
        if links:
            await asyncio.gather(*(link.finish(timeout) for link in links))
        self._is_over = True
        self._close_greeters()

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
            peer.close_in_child()

    async def _stop_tasks(self) -> None:
        if self._look is not None:
            self._look.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close_greeters()

    def _close_greeters(self) -> None:
        for greeter in list(self._greeters):
            greeter.link.close()

    def identify(self, mark: bytes, mac: bytes, claim: Claim, nonces: Nonces) -> int | None:
        """Who connected shows that it is the member with this mark: its root. None while it may be
        one that is not known here yet. Raises ProtocolError for somebody else."""
        identity = self._identity
        if identity is None:
            return None
        root = self._marks.get(mark)
        if root is None:
            if self._expecting:
                return None
            raise ProtocolError("who connected is no member that is known here")
        their_id = self._peers[root].id
        if root == self.rank or not identity.check("dialler", their_id, mac, nonces, claim):
            raise ProtocolError("who connected did not show that it is a member")
        return root


def was_broken(error: BaseException) -> bool:
    """Whether a connection broke, rather than that there was none to be had."""
    return isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
