"""The connections that this rank makes: the first ones, and those in place of broken ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiodist.links.greeting import LOST_CALLER, Greeting, Identity
from aiodist.links.peer import SHORT_LIFE, Peer, PeerHome
from aiodist.transports.base import Link, Receiver
from aiodist.transports.sockets import exhaustion

REACH_TIMEOUT = 10.0
"""Seconds that the system of a peer may take to accept a connection."""
REACH_AGAIN_TIMEOUT = 3.0
"""Seconds for a connection in place of one that broke."""
PAUSES = [0.001 * 2**attempt for attempt in range(9)]
"""Seconds between calls to a peer, if the connection breaks before it has answered the greeting.

A peer that has left, or trusts another authority, may not say more than that. So the attempts end.
"""
LATER_PAUSES = [1.0] * 10
"""Further such pauses if the peer may refuse because it calls as well, and its connection is
kept."""
Dial = Callable[[int, Receiver, float], Awaitable[Link]]


class Caller:
    """Makes the connections of one endpoint. `identity` shows that it is a member.

    ``dial(root, receiver, seconds)`` makes a link, if the peer's system answers within so many
    seconds.
    """

    def __init__(self, endpoint: PeerHome, identity: Identity, dial: Dial) -> None:
        self._loop = endpoint.loop
        self._endpoint = endpoint
        self._identity = identity
        self._dial = dial

    async def connect(self, peer: Peer) -> None:
        """Connect to `peer`, or report that this is impossible."""
        why = ""
        is_over = False
        try:
            try:
                why = await self._call(peer)
            # also an address that makes no sense, because the others must hear of it
            except Exception as error:
                why = f"not reachable: {error}"
                if peer.is_needed and (exhausted := exhaustion(error)) is not None:
                    self._endpoint.owner.exhausted(exhausted)  # not the fault of the peer
                # The peer was there, and no process listens there any more.
                is_over = bool(peer.broken) and isinstance(error.__cause__, ConnectionRefusedError)
                if is_over:
                    why = f"its process has probably ended ({error.__cause__})"
            if why and not peer.broken and not peer.is_linked:
                # A rank that aborts tells the coordinator why before it stops listening. That
                # reason says more, and cancels this.
                await self._endpoint.owner.caught_up()
        finally:
            # If this was cancelled, `dialing` may already be another call.
            if peer.dialing is asyncio.current_task():
                peer.dialing = None
        if why and not peer.is_linked:
            if peer.is_needed:
                self._endpoint.cut(peer.rank, peer.broken + why, is_over=is_over)
            else:
                peer.unreached()

    async def _call(self, peer: Peer) -> str:
        """Call `peer` until it answers. If it refuses for good, return why.

        Raises OSError if it cannot be reached. A busy peer may take any time to answer. Its lease
        decides whether it is alive: when that ends, the coordinator says so, and this is cancelled.
        """
        # If both sides call at once, the connection of the lower id is kept.
        is_kept = self._identity.id < peer.id
        pauses = PAUSES if is_kept else PAUSES + LATER_PAUSES
        refused = 0
        while True:
            began = self._loop.time()
            try:
                answer = await self._greet(peer)
            except OSError as error:
                # Only a connection that broke is worth another attempt. If it was refused, the
                # process has ended.
                if refused == len(pauses) or not was_broken(error.__cause__ or error):
                    raise
            else:
                if answer is None:
                    return ""
                if answer.is_final or refused == len(pauses):
                    if answer.why.startswith(LOST_CALLER):
                        # If the coordinator has removed this rank, its word ends this call.
                        await self._endpoint.owner.caught_up(self._endpoint.lease)
                    return f"it refuses connections ({answer.why})"
                # The peer answered, and the connection lasted, so one of the two was just busy for
                # too long. A proxy may also accept, answer nothing and close, without end.
                if answer.was_heard and self._loop.time() > began + SHORT_LIFE:
                    refused = 0
            await asyncio.sleep(pauses[refused])
            refused += 1

    async def _greet(self, peer: Peer) -> Greeting | None:
        """Connect to `peer`, unless it connects first. Returns a greeting that the peer ended, else
        None."""
        greeting = Greeting(self._loop, peer, self._identity)
        link: Link | None = None
        patience = REACH_TIMEOUT if peer.link is None else REACH_AGAIN_TIMEOUT
        try:
            link = peer.calling = await self._dial(peer.rank, greeting, patience)
            greeting.begin(link)
            return None if await greeting.answered or peer.is_linked else greeting
        finally:
            if peer.calling is link:
                peer.calling = None
            # The link failed, or the peer's own connection replaced it, or the peer is lost, or the
            # endpoint was closed.
            if link is not None and peer.link is not link:
                link.close()


def was_broken(error: BaseException) -> bool:
    """Tell whether a connection broke, as opposed to being refused."""
    return isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
