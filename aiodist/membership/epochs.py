"""Epoch numbers, which only grow for each group name, even after the group was deleted."""

from __future__ import annotations

from collections.abc import Mapping

REMEMBERED = 4096
"""The number of names whose last epoch is kept. Older names raise the floor for all new names."""


class Epochs:
    """Gives each name the epochs `floor` + 1, 2, 3 …"""

    def __init__(self, *, remembered: int = REMEMBERED) -> None:
        self.floor = 0
        self._remembered = remembered
        self._last: dict[str, int] = {}

    @property
    def last(self) -> Mapping[str, int]:
        """The last epoch of each remembered name; the name that was unused longest comes first."""
        return self._last

    def take(self, name: str) -> int:
        # A name that was forgotten may be known again by an epoch below the floor, from a member
        # that comes back late.
        epoch = max(self._last.get(name, 0), self.floor) + 1
        self.observe(name, epoch)
        return epoch

    def observe(self, name: str, epoch: int) -> None:
        """Note that `name` has had `epoch`, so that later epochs are higher. The empty name raises
        the floor."""
        # Frames of one epoch must never be taken for frames of another. So a number is never given
        # twice, even after the group has ended or under another coordinator.
        if not name:
            self.floor = max(self.floor, epoch)
            return
        self._last[name] = max(epoch, self._last.pop(name, 0))
        # A forgotten name may come back. The floor makes sure that it gets no old epoch.
        if len(self._last) > self._remembered:
            oldest = next(iter(self._last))
            self.floor = max(self.floor, self._last.pop(oldest))
