"""Wait, before a rank leaves, until its peers have what it sent.

For its sender, a message is done when its memory may be reused. It may still wait here: for a link,
because its receiver has not answered the first call, or for room, because its receiver does not
read. So a program that ends right after `await group.send(x)` must not lose `x`. Data is in one of
these places, and we wait for it from left to right::

    queued, no link ─> outbox, no room ─> own system ─> peer's system ─> peer has read it

    └────────────────────── held ──────────────────┘    └── unheard ──┘
          for as long as the caller allows                 one second at most

**Until nothing is held.** While this process lives, it makes broken connections again and sends
lost data again. Once it has ended, data in its own queues is lost, and so is data that its system
holds if the connection breaks. But data that the peer's system has acknowledged will be read, even
from a connection that was closed, however busy the peer is. So we do not wait until the peer has
read it. That could take a minute of computing, and would keep this rank for nothing.

**Then a second for the answers.** A proxy in between may have acknowledged the data. Most peers
answer at once, so it costs nothing to ask them. A peer that is too busy to answer has the data in
its system. If the system does not say what the peer has, `held` counts everything unanswered.

**Why this ends.** We do not wait for lost ranks, even if they are lost meanwhile. All others have
the time that the caller gives (`op_timeout`), and an abort ends the wait at once (`hurry`). The
caller is told which rank has not taken how much.

**Before and after.** The contexts are closed already, so nothing new is sent. The coordinator is
told last (`rank.actor`), because peers give up connections that are being made when they hear it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping
from functools import partial

from aiodist.links.peer import Peer

ANSWER_TIMEOUT = 1.0
"""Seconds for peers to confirm themselves what their systems have.

If a connection broke later, no process would be there to send the data again.
"""

FIRST_PAUSE = 0.001
LONGEST_PAUSE = 0.05
"""Seconds between looks, because no event tells what has left a socket."""


class PeersDraining:
    """Waits for `peers`, by root, except those that are `lost`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, peers: Mapping[int, Peer], lost: Container[int]
    ) -> None:
        self._loop = loop
        self._peers = peers
        self._lost = lost
        self._hurry = asyncio.Event()
        self._coming: dict[int, asyncio.Future[None]] = {}

    def hurry(self) -> None:
        """Stop waiting."""
        self._hurry.set()

    async def wait(self, seconds: float) -> dict[int, int]:
        """Wait until the peers' systems have everything, or the peers if their systems do not say.

        Returns, by root, how many bytes are missing after `seconds`.
        """
        deadline = self._loop.time() + seconds
        pause = FIRST_PAUSE
        is_over = False
        while held := self._held():
            if is_over or self._hurry.is_set():
                return held
            # After the deadline there is one more look, because this loop may have been busy.
            is_over = self._loop.time() >= deadline
            await self._pause(min(pause, max(0.0, deadline - self._loop.time())))
            pause = min(2 * pause, LONGEST_PAUSE)
        if self._coming:
            for came in self._coming.values():
                came.add_done_callback(self._answered)
            await self._pause(min(ANSWER_TIMEOUT, max(0.0, deadline - self._loop.time())))
        return {}

    def _answered(self, _: asyncio.Future[None]) -> None:
        """Stop waiting if all peers that were asked have everything."""
        if all(came.done() for came in self._coming.values()):
            self.hurry()

    def _held(self) -> dict[int, int]:
        """Return the bytes that peers do not have yet, and ask the peers again if more was sent."""
        held: dict[int, int] = {}
        for root, peer in self._peers.items():
            if root in self._lost:
                continue
            asked = self._coming.get(root)
            if peer.is_linked and (asked is None or asked.done()):
                came = self._loop.create_future()
                if not peer.deliver(partial(_set, came)):
                    self._coming[root] = came
            if count := peer.held:
                held[root] = count
        return held

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._hurry.wait()
        except TimeoutError:
            pass


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
