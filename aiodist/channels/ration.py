"""What a publisher sends of a version: twice its size, however many subscribers there are.

Ordinarily it sends it once (`aiodist.channels.directory`). It is asked again by those whose sources
died, or who do not know of each other because a coordinator was restarted. When it has sent twice
the size, or has promised to, it gives what it is asked for only where nobody else who lives has it:
all whom it was sent to have died, left or stand still. Then one gets it, and the others take it
from him.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIZES = 2
"""So many times the size of the version."""


class Ration:
    """That of one version. `clock`: what time it is; `said_after`: after so many seconds everybody
    has said what he was given."""

    def __init__(self, nbytes: int, clock: Callable[[], float], said_after: float) -> None:
        self._left = SIZES * nbytes
        self._clock = clock
        self._said_after = said_after
        self._giving = 0
        self._last = clock() - said_after  # when somebody was given some of it

    def has(self, nbytes: int) -> bool:
        """Whether so much may be given without further ado."""
        return nbytes <= self._left

    @property
    def is_known(self) -> bool:
        """Whether all have said what they have, and nobody is being given more."""
        return not self._giving and self._clock() - self._last >= self._said_after

    @contextmanager
    def giving(self, nbytes: int, sent: Callable[[], int]) -> Iterator[None]:
        """Somebody is given so much, of which `sent` in the end."""
        self._giving += 1
        self._left -= nbytes
        try:
            yield
        finally:
            self._giving -= 1
            self._left += nbytes - sent()
            self._last = self._clock()
