"""Epoch numbers: for one group name they only ever grow, also after the group was deleted."""

from __future__ import annotations

from collections.abc import Mapping

REMEMBERED = 4096
"""Names whose last epoch is kept. The oldest beyond these raise the floor for all new names."""


class Epochs:
    """Gives each name the epochs `floor` + 1, 2, 3 …"""

    def __init__(self, *, remembered: int = REMEMBERED) -> None:
        self.floor = 0
        self._remembered = remembered
        self._last: dict[str, int] = {}

    @property
    def last(self) -> Mapping[str, int]:
        """The last epoch of each name that is remembered, the longest unused first."""
        return self._last

    def take(self, name: str) -> int:
        """The next epoch of `name`."""
        epoch = self._last.get(name, self.floor) + 1
        self.observe(name, epoch)
        return epoch

    def observe(self, name: str, epoch: int) -> None:
        """`name` has had `epoch`: later ones are above. The empty name raises the floor."""
        # Frames of one epoch must never be taken for those of another, so a number that was given
        # once is never given again, also after the group has ended, and under whatever coordinator.
        if not name:
            self.floor = max(self.floor, epoch)
            return
        self._last[name] = max(epoch, self._last.pop(name, 0))
        # A name that is forgotten may come back: the floor sees to it that no epoch of it is given
        # twice.
        if len(self._last) > self._remembered:
            oldest = next(iter(self._last))
            self.floor = max(self.floor, self._last.pop(oldest))
