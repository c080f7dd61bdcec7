"""Calling peers: connections that this rank makes, at first, and in place of those that broke."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiodist.links.greeting import Greeting, Identity
from aiodist.links.peer import SHORT_LIFE, Home, Peer
from aiodist.transports.base import Link, Receiver
from aiodist.transports.sockets import exhaustion

REACH_TIMEOUT = 10.0
"""Seconds for the system of a peer to take a connection."""
REACH_AGAIN_TIMEOUT = 3.0
"""Seconds for the system of a peer to take a connection in place of one that broke."""
PAUSES = [0.001 * 2**attempt for attempt in range(9)]
"""Seconds between calls to a peer, if the connection breaks before it has answered the greeting. A
peer that has left, or trusts another authority, does not always say more than that: so not for
ever."""
LATER_PAUSES = [1.0] * 10
"""Further such pauses, where the peer may refuse because it calls as well, and of two connections
its own is kept."""
Dial = Callable[[int, Receiver, float], Awaitable[Link]]


class Caller:
    """Makes the connections of one endpoint, which shows by `identity` that it is a member.
    ``dial(root, receiver, seconds)`` makes links, to systems that answer within so many seconds."""

    def __init__(self, endpoint: Home, identity: Identity, dial: Dial) -> None:
        self._loop = endpoint.loop
        self._endpoint = endpoint
        self._identity = identity
        self._dial = dial

    async def connect(self, peer: Peer) -> None:
        """Have a connection to `peer`, or learn that there is none to be had."""
        why = ""
        is_over = False
        try:
            why = await self._call(peer)
        except Exception as error:  # also an address that makes no sense: the others must hear
            why = f"not reachable: {error}"
            if (exhausted := exhaustion(error)) is not None:
                self._endpoint.on_exhausted(exhausted)  # no fault of the peer
            # It was there, and nobody listens there any more.
            is_over = bool(peer.broken) and isinstance(error.__cause__, ConnectionRefusedError)
        finally:
            # Whoever cancelled this may have begun another call since, which is not this one's to
            # forget.
            if peer.dialing is asyncio.current_task():
                peer.dialing = None
        if why and not peer.is_linked:
            self._endpoint.cut(peer.rank, peer.broken + why, is_over=is_over)

    async def _call(self, peer: Peer) -> str:
        """Call `peer` until it answers, or refuses for good: then why. Raises OSError where it
        cannot be reached.

        It may take any time to answer, for it may be busy. Whether it is alive is for its lease to
        say: when that is over, and the coordinator says so, this is cancelled.
        """
        # Where both call at once, the connection of the lower id is kept.
        is_kept = self._identity.id < peer.id
        pauses = PAUSES if is_kept else PAUSES + LATER_PAUSES
        refused = 0
        while True:
            began = self._loop.time()
            try:
                answer = await self._greet(peer)
            except OSError as error:
                # Nobody listens for a process that has ended. What breaks may be made.
                if refused == len(pauses) or not was_broken(error.__cause__ or error):
                    raise
            else:
                if answer is None:
                    return ""
                if answer.is_final or refused == len(pauses):
                    return f"it refuses connections ({answer.why})"
            if self._loop.time() > began + SHORT_LIFE:
                refused = 0  # that was none: one of the two was busy for too long
            await asyncio.sleep(pauses[refused])
            refused += 1

    async def _greet(self, peer: Peer) -> Greeting | None:
        """Connect to `peer`, unless it connects first. A greeting that it has ended, else None."""
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
            # It failed, was superseded by the peer's own connection, the peer is lost, or the
            # endpoint was closed.
            if link is not None and peer.link is not link:
                link.close()


def was_broken(error: BaseException) -> bool:
    """Whether a connection broke, rather than that there was none to be had."""
    return isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
