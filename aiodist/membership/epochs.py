"""Epoch numbers: for one group name they only ever grow, also after the group was deleted."""

from __future__ import annotations

REMEMBERED = 4096
"""Names whose last epoch is kept. The oldest beyond these raise the floor for all new names."""


class Epochs:
    """Gives each name the epochs `floor` + 1, 2, 3 …"""

    def __init__(self, floor: int = 0, *, remembered: int = REMEMBERED) -> None:
        self._floor = floor
        self._remembered = remembered
        self._last: dict[str, int] = {}

    @property
    def highest(self) -> int:
        """The highest epoch given so far: a floor that keeps all later ones above."""
        return max([self._floor, *self._last.values()])

    def take(self, name: str) -> int:
        """The next epoch of `name`."""
        epoch = self._last.pop(name, self._floor) + 1
        self._last[name] = epoch
        if len(self._last) > self._remembered:
            oldest = next(iter(self._last))
            self._floor = max(self._floor, self._last.pop(oldest))
        return epoch
