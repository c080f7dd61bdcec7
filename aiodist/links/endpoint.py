"""One rank's links to its peers: made when first needed, shared by all groups of a membership.

An endpoint lives as long as the membership, over all its epochs. It knows a peer by its *root*: a
number of this endpoint, in the order in which it met the peers. In the first epoch the root is the
rank. Each epoch of the group, and each group made of it (subgroup, split, dup), is a context on the
same links. Contexts have distinct ids, so that no frame is taken for another epoch's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from aiodist.errors import ProtocolError, despite_errors
from aiodist.links.caller import Caller, Dial
from aiodist.links.draining import PeersDraining
from aiodist.links.entrance import PeerEntrance
from aiodist.links.greeting import Identity
from aiodist.links.inboxes import Inbox, Inboxes, Stray
from aiodist.links.moved import Traffic
from aiodist.links.owner import EndpointOwner
from aiodist.links.peer import CLOSED, LEFT, LOOKS, Peer
from aiodist.recorder import Recorder
from aiodist.transports.base import Link, deliver
from aiodist.transports.copies import Copies
from aiodist.transports.polling import Progress
from aiodist.transports.surroundings import is_virtual
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields
from aiodist.wire.limits import MAX_MEMBERS

log = logging.getLogger("aiodist.endpoint")

FAREWELL_TIMEOUT = 1.0
"""Seconds for peers to hear that we leave at once."""
LEASE = 15.0
LONGEST_SILENCE = 3600.0
"""Seconds after which a connection without an answer is broken, however long the lease."""


class Endpoint:
    """Links to the peers of one membership, and the contexts that use them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        expected: int = MAX_MEMBERS,
        lease: float = LEASE,
    ) -> None:
        """`expected` is the most members there will be.

        After `lease` seconds without an answer of its system, a peer's connection counts as broken.
        """
        self.loop = loop
        self.lease = min(lease, LONGEST_SILENCE)
        self.progress = Progress(loop)  # polls within calls
        self.copies = Copies()  # copies of data that links may have to send again
        self.recorder = Recorder()  # the flight recorder of all groups of this membership
        self.inboxes = Inboxes()  # the contexts that frames are for
        self.lost: dict[int, str] = {}  # peers that are gone for this rank, and why
        self.doubted: set[int] = set()
        """The lost peers that may live. This rank only knows that there is no link to them any
        more."""
        self.closing = False  # this rank leaves, so peers are not lost any more
        self.reads_devices = True
        """Whether this rank and others may read each other's devices."""
        self.rank = -1
        """This rank's own root."""
        self.owner = EndpointOwner()
        # The peers by root: the number of a member at this endpoint, over all epochs.
        self._peers: dict[int, Peer] = {}
        self.traffic = Traffic(self._peers)  # what was called and moved
        self._roots: dict[str, int] = {}  # by member id
        self._numbers = itertools.count()  # the roots of new members
        self._entrance = PeerEntrance(self, self._peers, expected)  # handles peers that connect
        self._caller: Caller | None = None  # makes links, see `activate`
        self._tasks: dict[asyncio.Task[None], None] = {}  # cancelled at the end, in order
        self._look: asyncio.TimerHandle | None = None  # the next `_look_around`
        self._draining = PeersDraining(
            loop, self._peers, self.lost
        )  # waits before this rank leaves

    def activate(self, identity: Identity, dial: Dial) -> None:
        """Begin, because this rank is a member. `admit` tells which the others are.

        ``dial(root, receiver, seconds)`` makes a link, if the peer's system answers within so many
        seconds.
        """
        self._entrance.identity = identity
        self._caller = Caller(self, identity, dial)
        if not is_virtual(self.loop):  # there the simulated network reports it
            self._look_later()

    def _look_later(self) -> None:
        self._look = self.loop.call_later(self.lease / LOOKS, self._look_around)

    def _look_around(self) -> None:
        """Find connections whose peer does not answer any more, or that have ended unnoticed."""
        if not self.closing:
            # uvloop reports a reset connection once, maybe together with its last bytes. A link
            # reads these and then waits for the next event, because an extra read for each event
            # would cost too much. Here we find such connections.
            self.poll()
            for peer in list(self._peers.values()):
                peer.look(self.lease / LOOKS)
            self._look_later()

    def admit(self, ids: Sequence[str]) -> tuple[int, ...]:
        """Let the members `ids` connect and be reached from now on. Returns their roots."""
        identity = self._entrance.identity
        assert identity is not None
        roots = []
        for member_id in ids:
            root = self._roots.get(member_id)
            if root is None:
                root = self._roots[member_id] = next(self._numbers)
                peer = self._peers[root] = Peer(self, root, member_id)
                self._entrance.know(peer)
                if member_id == identity.id:
                    self.rank = root
            roots.append(root)
        self._entrance.admit(len(ids))
        return tuple(roots)

    def expect(self, expecting: bool) -> None:
        """Note whether peers may already know members that this rank does not know yet."""
        self._entrance.expect(expecting)

    def forget(self, root: int) -> None:
        """Forget a peer that is lost and in no context."""
        peer = self._peers.pop(root)
        del self._roots[peer.id]
        self._entrance.forget(peer)
        self.lost.pop(root, None)
        self.doubted.discard(root)
        if peer.dialing is not None:
            peer.dialing.cancel()
        if peer.link is not None:
            self.traffic.keep(peer.link)
        self.inboxes.forget(root)

    # -- for contexts -----------------------------------------------------------------------------

    def add(self, context: Inbox) -> None:
        """Let frames for `context` through, the ones that came early first."""
        self.inboxes.open[context.id] = context
        for stray in self.inboxes.take(context.id):
            try:
                self._deliver(context, stray)
            except ProtocolError as error:
                self.blame(stray.rank, error)

    def remove(self, context: Inbox, reason: str = CLOSED) -> None:
        """Drop further frames for `context`, and tell peers that may wait for some of ours."""
        reason = reason[:1000]
        farewell = pack_fields(kinds.FAREWELL, context.id, reason)
        for peer in [self._peers[root] for root in context.ranks]:
            if peer.link is not None:
                peer.link.send(farewell)  # behind all that was sent before
        self.inboxes.close(context.id, reason)

    def keep(self, stray: Stray) -> None:
        """Keep a stray frame until its group is made, or deliver it if the group exists by now."""
        context = self.inboxes.open.get(stray.fields[1])
        if context is None:
            for dropped in self.inboxes.keep(stray.fields[1], stray):
                self._peers[dropped.rank].settle(dropped)
        else:
            self._deliver(context, stray)

    def _deliver(self, context: Inbox, stray: Stray) -> None:
        """Deliver a stray frame to its group. Raises ProtocolError."""
        self._peers[stray.rank].settle(stray)
        nbytes = len(stray.memory)
        landing = context.frame(stray.rank, stray.fields, nbytes)
        deliver(landing, (stray.memory,), nbytes)

    def poll(self) -> None:
        """Read what has arrived."""
        for peer in self._peers.values():
            if peer.link is not None:
                peer.link.poll()

    def peer(self, root: int) -> Peer:
        """Return the peer with this root."""
        return self._peers[root]

    def transport_to(self, root: int) -> str | None:
        """Return the transport of the link to a peer; None if there was none, or the peer is
        forgotten."""
        peer = self._peers.get(root)
        return None if peer is None or peer.link is None else peer.link.kind

    # -- making links -----------------------------------------------------------------------------

    def accept(self, link: Link) -> None:
        """Take in a connection that a peer has made."""
        self._entrance.enter(link)

    def start_dialing(self, peer: Peer) -> asyncio.Task[None]:
        """Begin to connect to `peer`."""
        assert self._caller is not None
        return self.spawn(self._caller.connect(peer), f"aiodist dial rank {peer.rank}")

    @property
    def is_dialing(self) -> bool:
        """Whether this rank waits for a link that is being made."""
        return any(peer.dialing is not None for peer in self._peers.values())

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a background task, which is cancelled when the endpoint closes.

        The task handles expected errors itself. An exception of it ends this rank's membership.
        """
        task = self.loop.create_task(coroutine, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._spawned)
        return task

    def _spawned(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
            self.owner.task_failed(error)

    # -- ends -------------------------------------------------------------------------------------

    # How a rank is lost. All ways lead to `lose`, which is final here: nothing is sent to a rank in
    # `lost`, we do not call it, and it is refused when it calls. `lose` closes the link first, so
    # that nothing more comes from that rank. Then each context fails what needs it::
    #
    #     the coordinator says so ────────────────────────┐
    #     it said over the link that it aborts or left ───┤
    #                                                     ├──> lose ──> Context.rank_lost, each
    #     its process has ended ─────────────┐            │
    #     its port refuses connections ──────┼──> cut ────┘
    #     the link is gone for good ─────────┘     └──> the coordinator hears of it (`link_broke`)
    #
    # `cut` is for what this rank has seen, and the coordinator may not have. The coordinator may
    # disagree: of two ranks without a link it evicts one, which may be this one. Two flags tell
    # what is certain. With `ended` the coordinator believes us. With `is_over` it may doubt,
    # because another process could listen there, but this rank does not. With neither, the rank is
    # lost here, because no operation can go on without a link, and it is in `doubted` until the
    # coordinator has ruled. What we tell others meanwhile is a belief (`aiodist.engine.hearsay`).
    #
    # No wait for a link is endless. If something is to be sent without a link, `Caller` works on
    # it, and ends with a link or with `cut`. A system that accepts no connection has some seconds,
    # and one that breaks them has some attempts. If a peer says that it has lost this rank, the
    # coordinator has a lease to say so, too. Only the answer of a process has no limit here,
    # because it may be busy (over TLS, it has some handshakes of 10 s). The silence of its host
    # breaks the connection, the end of the process is noticed, or its lease ends and the
    # coordinator says so.

    def lose(self, rank: int, reason: str) -> None:
        """Take `rank` for lost: fail what needs it, in every context."""
        if rank in self.lost or self.closing or rank == self.rank or rank not in self._peers:
            return
        self.lost[rank] = reason
        log.debug("rank %d is lost: %s", rank, reason)
        peer = self._peers[rank]
        if peer.dialing is not None:
            peer.dialing.cancel()
        if peer.link is not None and not peer.link.is_closed:
            peer.link.close()
        peer.drop()
        contexts = self.inboxes.open.values()
        despite_errors(*(partial(context.rank_lost, rank, reason) for context in contexts))

    def cut(self, rank: int, reason: str, *, ended: bool = False, is_over: bool = False) -> None:
        """Report that there is no link to `rank`, or that its process has `ended`.

        `is_over`: this rank has no doubt, even if the coordinator may.
        """
        if rank in self._peers and rank not in self.lost and not self.closing:
            self.owner.link_broke(rank, reason, ended)
            if not (ended or is_over):
                self.doubted.add(rank)
        self.lose(rank, reason)

    def ruled(self, ranks: Iterable[int] = ()) -> None:
        """Hear that the coordinator has ruled, on `ranks` if on any, or that it never will."""
        self.doubted.difference_update(ranks)
        for context in list(self.inboxes.open.values()):
            context.ruled()

    def blame(self, rank: int, error: ProtocolError) -> None:
        """Take `rank` for lost, because it sent nonsense that shows only after its link has moved
        on."""
        if rank not in self.lost:
            why = str(error)  # the error itself could keep the memory of a post
            log.warning("closing the link to rank %d: %s", rank, why)
            self.cut(rank, f"connection lost ({why})")

    def left(self, rank: int) -> None:
        """Hear that `rank` has left in order. It is gone once all that it sent has come."""
        peer = self._peers[rank]
        # Data of that rank may still be on its way over the link. The end of the link comes behind
        # it, and tells that the rank is gone.
        if not peer.is_linked or (peer.link is not None and peer.link.is_closed):
            self.lose(rank, LEFT)

    async def delivered(self, seconds: float) -> dict[int, int]:
        """Wait until all receivers have what was sent, for at most `seconds`.

        Returns, by root, how many bytes they do not have. See `PeersDraining`.
        """
        return await self._draining.wait(seconds)

    def hurry(self) -> None:
        """End the wait of `delivered`."""
        self._draining.hurry()

    async def finish(self, timeout: float) -> None:
        """Send what is queued, say goodbye, and close."""
        # From here on the end of a link is intended, and no loss.
        self.closing = True
        await self._stop_tasks()
        links = [peer.link for peer in self._peers.values() if peer.link is not None]
        if links:
            await asyncio.gather(*(link.finish(timeout) for link in links))
        self._entrance.is_over = True
        self._entrance.close()

    def abort(self, reason: str) -> None:
        """Leave at once, and tell the peers why. Await `aborted` next."""
        farewell = pack_fields(kinds.FAREWELL, b"", reason[:1000])
        for peer in self._peers.values():
            if peer.link is not None or peer.dialing is not None:
                peer.send(farewell, urgent=True)
        self.closing = True

    async def aborted(self) -> None:
        """Wait until everything is closed after `abort`."""
        # A rank that finds a mismatch may leave by that error before it has links. The verdict
        # waits for the links. Without it the others would only hear that a rank is lost.
        dialing = [peer.dialing for peer in self._peers.values() if peer.dialing is not None]
        try:
            if dialing:
                await asyncio.wait(dialing, timeout=FAREWELL_TIMEOUT)
            await self.finish(FAREWELL_TIMEOUT)
        finally:  # the loop may end before
            for peer in self._peers.values():
                if peer.link is not None:
                    peer.link.close()

    def close_in_child(self) -> None:
        """After a fork: close the child's copies of the sockets."""
        self.closing = True
        self._entrance.close_in_child()
        for peer in self._peers.values():
            peer.close_in_child()

    async def _stop_tasks(self) -> None:
        if self._look is not None:
            self._look.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        # A task may never end, because an interrupt can lose a callback of the loop.
        ended = asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait({ended}, timeout=FAREWELL_TIMEOUT)
        self._entrance.close()
