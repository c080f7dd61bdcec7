"""How a rank waits for the stamps of others: it looks, it sleeps, it is woken.

::

    wait ──> are they there? ── yes ──────────────────────────────────────────────> go on
                  │ no
                  ├──> poll for some microseconds, then doze (`Progress.watch`) ──> go on
                  ├──> is the loop due for a turn? ── yes ──> resumed with the next one
                  └──> say on the board: I sleep until they are at this stamp
                              └──> look once more ── there ── take it back ───────> go on
                                        └── not there ──> return to the loop
                                                              │
                      who gets there sees the word, and sends a KICK frame ──> resumed

The second look is what makes it safe: see "Sleep, then look again" in
`aiodist.shared_memory.board`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aiodist.shared_memory.board import Board
from aiodist.transports.polling import Progress


class Waiting:
    """What one rank waits for on its lane: one thing at a time."""

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
        self.progress = progress  # how long to poll
        self._resume_soon = resume_soon  # has the loop go on with the current operation
        self.polls = polls  # whether waiting begins with a look at memory, again and again
        self.crowded = crowded  # whether others may need this core
        self._asleep = False  # the board says that this rank sleeps, and what it waits for
        self.hurries = False  # nothing is waited for: one of the others is gone

    def wait(self, peers: Sequence[int], stamp: int) -> bool:
        """Poll until `peers` have reached `stamp`. False: not yet; the current operation will be
        resumed, from the loop or by `woken`."""
        board = self._board
        if board.reached(peers, stamp):
            return True
        if self.hurries:
            return False
        if self.poll(peers, stamp):
            return True
        if self.gives_way():
            return False
        board.sleep(peers, stamp)
        if board.reached(peers, stamp):
            board.awake()
            return True
        self._asleep = True
        return False

    def poll(self, peers: Sequence[int], stamp: int) -> bool:
        """Whether `peers` reach `stamp` within a moment."""
        return self.polls and self.progress.watch(self._board, peers, stamp, crowded=self.crowded)

    def is_due(self) -> bool:
        """Whether the loop is due for a turn."""
        return not self.hurries and self.progress.is_due()

    def gives_way(self) -> bool:
        """Whether the loop is due for a turn, with the next of which the current operation goes
        on."""
        due = self.is_due()
        if due:
            self._resume_soon()
        return due

    def woken(self) -> bool:
        """Sleep no more: whether this rank slept."""
        slept = self._asleep
        if slept:
            self._asleep = False
            self._board.awake()
        return slept

    def close(self) -> None:
        """Nothing is waited for any more."""
        self._asleep = False
