"""What a publisher sends of a version: twice its size, however many subscribers there are.

Ordinarily it sends it once (`aiodist.channels.directory`). It is asked again by those whose sources
died, or who do not know of each other because a coordinator was restarted. When it has sent twice
the size, or has promised to, it gives what it is asked for only where nobody else who lives has it:
all whom it was sent to have died, left or stand still. Then one gets it, and the others take it
from him.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

    def has_to(self, here: int, said: Sequence[int]) -> bool:
        """Whether more has to be given to one who has so many bytes, for nobody has more. `said`:
        how many those have who are there, one of whom it is."""
        # What they have said is true when there was time to say so, and nobody is given more.
        is_true = not self._giving and self._clock() - self._last >= self._said_after
        return len(said) <= 1 or (is_true and max(said) <= here)

    @contextmanager
    def giving(self, nbytes: int, sent: Callable[[], int]) -> Iterator[None]:
        """Somebody is given so much, of which `sent` in the end."""
        self._giving += 1
        self._left -= nbytes
        try:
            yield
        finally:
            self._giving -= 1
            self._left += nbytes - min(nbytes, sent())  # which has a little around the weights
            self._last = self._clock()
