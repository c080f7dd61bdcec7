"""Limits what a publisher sends: twice the size of a version, however many subscribers there are.

Normally it sends a version once (`aiodist.channels.directory`). Participants ask it again if their
sources died, or if they do not know of each other because a coordinator was restarted. When it has
sent or promised twice what is wanted, it refuses, unless no other living participant has the data.
That happens if all its receivers have died, left or stand still. Then one participant gets it, and
the others take it from that one.

A participant that wants a whole version reports how much of it it has. Participants with slices may
all have different ones. So one that is refused shows that no other has its slices by asking again
for long enough to have asked all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from aiodist.schedules.resharding import Box, intersection, remainder, volume

SIZES = 2
"""How many times the wanted bytes are sent."""


class Ration:
    """The ration of one version of `nbytes`.

    `clock`: returns the time. `said_after`: seconds after which all participants have reported what
    they were given, and a refused one has asked the others.
    """

    def __init__(self, nbytes: int, clock: Callable[[], float], said_after: float) -> None:
        self._nbytes = nbytes
        self._wanted = 0  # bytes that were asked for
        self._boxes: dict[str, list[Box]] = {}  # which boxes these are, by array, if not all
        self._given = 0
        self._clock = clock
        self._said_after = said_after
        self._giving = 0
        self._last = clock() - said_after  # when some of it was last given
        self._refused: dict[str, float] = {}  # refused participants, and since when

    def want(self, boxes: Iterable[tuple[str, Box, int]] | None = None) -> None:
        """Note that these boxes (key, box, bytes of an element) are wanted; None: everything."""
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
        """Whether so many bytes may be given without a further check."""
        return self._given + nbytes <= SIZES * self._wanted

    def has_to(self, here: int, said: Sequence[int]) -> bool:
        """Whether to give more to a participant with `here` bytes, because no other has more.

        `said`: the bytes of all living participants, including this one.
        """
        # Reports are true if there was time for them, and no participant is given more.
        return len(said) <= 1 or (self._is_quiet and max(said) <= here)

    def insists(self, who: str) -> bool:
        """Whether to give more slices to `who`, which was refused for long enough to have asked all
        others."""
        since = self._refused.setdefault(who, self._clock())
        return self._is_quiet and self._clock() - since >= self._said_after

    @property
    def _is_quiet(self) -> bool:
        """Whether nothing is being given, or was just now."""
        return not self._giving and self._clock() - self._last >= self._said_after

    @contextmanager
    def giving(self, nbytes: int, sent: Callable[[], int]) -> Iterator[None]:
        """Count a transfer of `nbytes`, of which `sent` bytes are sent in the end."""
        self._giving += 1
        self._given += nbytes
        try:
            yield
        finally:
            self._giving -= 1
            # this includes a few bytes around the weights
            self._given -= nbytes - min(nbytes, sent())
            self._last = self._clock()


def _without(box: Box, other: Box) -> list[Box]:
    common = intersection(box, other)
    return [box] if common is None else remainder(box, common)
