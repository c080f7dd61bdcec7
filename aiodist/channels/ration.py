"""What a publisher sends of a version: twice what is wanted of it, however many subscribers there
are.

Ordinarily it sends it once (`aiodist.channels.directory`). It is asked again by those whose sources
died, or who do not know of each other because a coordinator was restarted. When it has sent twice
of what anybody wants, or has promised to, it gives what it is asked for only where nobody else who
lives has it: all whom it was sent to have died, left or stand still. Then one gets it, and the
others take it from him.

Who wants a version as a whole says how much of it he has, and the others say that, too. Of slices
each may have other ones, so who is refused proves that nobody else has them: by asking again, for
as long as it takes to ask everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from aiodist.schedules.resharding import Box, intersection, remainder, volume

SIZES = 2
"""So many times what is wanted."""


class Ration:
    """That of one version of `nbytes`. `clock`: what time it is; `said_after`: after so many
    seconds everybody has said what he was given, and who was refused has asked the others."""

    def __init__(self, nbytes: int, clock: Callable[[], float], said_after: float) -> None:
        self._nbytes = nbytes
        self._wanted = 0  # bytes that somebody has asked for
        self._boxes: dict[str, list[Box]] = {}  # which these are, by array, if not all
        self._given = 0
        self._clock = clock
        self._said_after = said_after
        self._giving = 0
        self._last = clock() - said_after  # when somebody was given some of it
        self._refused: dict[str, float] = {}  # who was, and since when

    def want(self, boxes: Iterable[tuple[str, Box, int]] | None = None) -> None:
        """Somebody wants these boxes of arrays, whose elements have so many bytes; None: all."""
        if boxes is None:
            self._wanted = self._nbytes
            return
        for key, box, item in boxes:
            known = self._boxes.setdefault(key, [])
            new = [box]
            for other in known:
                new = [rest for one in new for rest in _without(one, other)]
            known += new
            self._wanted = min(self._nbytes, self._wanted + item * sum(map(volume, new)))

    def has(self, nbytes: int) -> bool:
        """Whether so much may be given without further ado."""
        return self._given + nbytes <= SIZES * self._wanted

    def has_to(self, here: int, said: Sequence[int]) -> bool:
        """Whether more has to be given to one who has so many bytes, for nobody has more. `said`:
        how many those have who are there, one of whom it is."""
        # What they have said is true when there was time to say so, and nobody is given more.
        return len(said) <= 1 or (self._is_quiet and max(said) <= here)

    def insists(self, who: str) -> bool:
        """Whether more has to be given to one who wants slices: he was refused for long enough to
        have asked all others."""
        since = self._refused.setdefault(who, self._clock())
        return self._is_quiet and self._clock() - since >= self._said_after

    @property
    def _is_quiet(self) -> bool:
        """Whether nobody is given anything, or was just now."""
        return not self._giving and self._clock() - self._last >= self._said_after

    @contextmanager
    def giving(self, nbytes: int, sent: Callable[[], int]) -> Iterator[None]:
        """Somebody is given so much, of which `sent` in the end."""
        self._giving += 1
        self._given += nbytes
        try:
            yield
        finally:
            self._giving -= 1
            self._given -= nbytes - min(nbytes, sent())  # which has a little around the weights
            self._last = self._clock()


def _without(box: Box, other: Box) -> list[Box]:
    common = intersection(box, other)
    return [box] if common is None else remainder(box, common)
