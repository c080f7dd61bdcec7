"""Before a rank leaves: what it has sent is to be with its peers, however busy they are.

A message is done, for its sender, when its memory may be reused. Then it may still wait here: for a
link, since its receiver has not answered the first call yet, or for room, since that does not read.

So `await group.send(x)` and the end of the program right behind it must not mean that `x` is lost.
What was sent is in one of these places, and it is waited for from left to right::

    queued, no link ─> outbox, no room ─> own system ─> peer's system ─> peer has read it
    └────────────────────── held ──────────────────┘    └── unheard ──┘
          for as long as the caller allows                 one second at most

**Until nothing is held.** While this process lives, it makes broken connections again and sends
again what was lost with them. Once it is gone nobody does: what is in its own queues is lost then,
and so is what its system holds if the connection breaks. What the peer's system has acknowledged,
its process will read, even from a connection that was closed, however busy it is now. So that is
how long one waits, and not until the peer has read it: that may take it a minute of computing, for
which this rank would be kept for nothing.

**Then a second for the answers.** An acknowledgement may have been given by somebody between the
two (a proxy), and where the system does not say what the peer has, `held` counts what the peer has
not answered for anyway. Most peers answer at once, so it costs nothing to hear it from themselves.
A peer that is too busy for that has it in its system.

**Why nobody waits for ever.** Ranks that are lost are not waited for, also when they are lost
meanwhile; all others have the time that the caller gives (`op_timeout`), and an abort ends the wait
at once (`hurry`). The caller is told who has not taken how much.

**Before and after.** The contexts are closed by then, so nothing new is sent. The coordinator is
told last (`rank.actor`), since on its word peers would give up connections that are being made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping
from functools import partial

from aiodist.links.peer import Peer

ANSWER_TIMEOUT = 1.0
"""Seconds for peers to say themselves that all has come, which their systems have: should a
connection break now, nobody is there to send again what was lost with it."""

FIRST_PAUSE = 0.001
LONGEST_PAUSE = 0.05
"""Seconds between looks: of what leaves a socket nobody is told."""


class Draining:
    """Waits for `peers`, by root, but for those that are `lost`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, peers: Mapping[int, Peer], lost: Container[int]
    ) -> None:
        self._loop = loop
        self._peers = peers
        self._lost = lost
        self._hurry = asyncio.Event()
        self._coming: dict[int, asyncio.Future[None]] = {}

    def hurry(self) -> None:
        """Wait no longer."""
        self._hurry.set()

    async def wait(self, seconds: float) -> dict[int, int]:
        """Wait until all that was sent is with the peers' systems; where these do not say what they
        have, with the peers. Returns how many bytes are not, after `seconds`, by root."""
        deadline = self._loop.time() + seconds
        pause = FIRST_PAUSE
        is_over = False
        while held := self._held():
            if is_over or self._hurry.is_set():
                return held
            # After that there is another look: it may be this loop that was busy.
            is_over = self._loop.time() >= deadline
            await self._pause(min(pause, max(0.0, deadline - self._loop.time())))
            pause = min(2 * pause, LONGEST_PAUSE)
        if self._coming:
            for came in self._coming.values():
                came.add_done_callback(self._answered)
            await self._pause(ANSWER_TIMEOUT)
        return {}

    def _answered(self, _: asyncio.Future[None]) -> None:
        """One of those who were asked has all. When all of them have, nothing is waited for."""
        if all(came.done() for came in self._coming.values()):
            self.hurry()

    def _held(self) -> dict[int, int]:
        """How much is not with whom. Asks them what they have, also after what was sent since."""
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
