"""A rank waits for the stamps of others: first it polls, then it sleeps until it is woken.

::

    wait ──> are they there? ── yes ──────────────────────────────────────────────> go on
                  │ no
                  ├──> poll for some microseconds, then doze (`Progress.watch`) ──> go on
                  ├──> is the loop due for a turn? ── yes ──> resumed with the next one
                  └──> say on the board: I sleep until they are at this stamp
                              └──> look once more ── there ── take it back ───────> go on
                                        └── not there ──> return to the loop
                                                              │
                the rank that gets there sees the word, and sends a KICK frame ──> resumed

The second look makes this safe: see "Sleep, then look again" in `aiodist.shared_memory.board`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aiodist.shared_memory.board import Board
from aiodist.transports.polling import Progress


class LaneWaiting:
    """What one rank waits for on its lane. It waits for one thing at a time."""

    def __init__(
        self,
        board: Board,
        progress: Progress,
        resume_soon: Callable[[], None],
        *,
        polls: bool,
        crowded: bool,
    ) -> None:
        self._board = board
        self.progress = progress  # decides how long to poll
        self._resume_soon = resume_soon  # makes the loop go on with the current operation
        self.polls = polls  # whether a wait begins with polling of memory
        self.crowded = crowded  # whether other ranks may need this core
        self._asleep = False  # whether the board says that this rank sleeps
        # Whether the loop has just resumed the operation, and nothing has come since. Then it does
        # not give way: operations of several lanes would give way to each other, for ever.
        self.is_fresh = False
        self.hurries = False  # whether waits end at once, because another rank is gone

    def wait(self, peers: Sequence[int], stamp: int) -> bool:
        """Wait until `peers` have reached `stamp`, for a moment.

        If False, they have not. The loop, or `woken`, will then resume the current operation.
        """
        board = self._board
        if board.reached(peers, stamp) or (not self.hurries and self.poll(peers, stamp)):
            self.is_fresh = False
            return True
        if self.hurries or self.gives_way():
            return False
        board.sleep(peers, stamp)
        if board.reached(peers, stamp):
            board.awake()
            self.is_fresh = False
            return True
        self._asleep = True
        return False

    def poll(self, peers: Sequence[int], stamp: int) -> bool:
        """Poll for a moment, and return whether `peers` have reached `stamp`."""
        return self.polls and self.progress.watch(self._board, peers, stamp, crowded=self.crowded)

    def is_due(self) -> bool:
        """Whether the loop is due for a turn."""
        return not self.hurries and self.progress.is_due()

    def gives_way(self) -> bool:
        """Whether the loop is due for a turn, and has not just resumed the current operation. This
        then goes on in that turn."""
        if self.hurries or self.is_fresh or not self.progress.is_due():
            return False
        self._resume_soon()
        return True

    def woken(self) -> bool:
        """Stop sleeping, and return whether this rank slept."""
        slept = self._asleep
        if slept:
            self._asleep = False
            self._board.awake()
        return slept

    def close(self) -> None:
        """Wait for nothing more."""
        self._asleep = False
