"""`Neighbors`: what a grid and a graph share, and collectives among neighbours.

**Why this uses an all_to_all of the whole group.** Messages between neighbours alone would be
fewer. But a rank whose call raised or was cancelled would then be one call behind its neighbours,
and would take messages of one call for those of the next. A collective uses up its number on all
ranks in any case, and all ranks hear why it failed. Ranks that are not neighbours exchange a small
message each. If that is too much for your program, use `send` and `recv`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

from aiodist.buffers.places import check as check_apart
from aiodist.composing import together
from aiodist.errors import AiodistError, MismatchError
from aiodist.work import Work


class Collective(Protocol):
    """A `Group` or a `BlockingGroup`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_to_all(
        self, xs: Any, *, out: Any = ..., tag: Any = ..., timeout: float | None = ...
    ) -> Any: ...

    def _forgo(self, error: BaseException, tag: Any = ...) -> None: ...


Edge = tuple[int, int]
"""A rank, and the number of the edge among those between the two ranks. Both ends agree on it."""


class Neighbors:
    """The neighbours of a rank of `group`, in the order of the values that are sent and received.

    `sources` and `destinations` are ranks of the group, or None if a place has no neighbour.
    """

    def __init__(
        self,
        group: Collective,
        sources: Sequence[Edge | None],
        destinations: Sequence[Edge | None],
    ) -> None:
        self.group: Any = group
        self.sources = tuple(None if edge is None else edge[0] for edge in sources)
        self.destinations = tuple(None if edge is None else edge[0] for edge in destinations)
        self._from = _places(sources)  # the places of the values from each rank
        self._to = _places(destinations)  # the places of the values for each rank

    def over(self, group: Any) -> Neighbors:
        """Return the same neighbours in another view of the group: a `Group` or `BlockingGroup`."""
        other = copy.copy(self)
        other.group = group
        return other

    def neighbor_all_gather(
        self, x: Any, *, out: Any = None, tag: Any = None, timeout: float | None = None
    ) -> Any:
        """Gather the `x` of the `sources`, as a list in their order. Returns a Work, as collectives
        do.

        A collective of the whole group. `out` is a list of arrays to receive into, one for each
        source. If a place has no neighbour, the result there is ``out[place]`` unchanged (as MPI
        leaves the buffer of MPI_PROC_NULL), or None without `out`. So fill it once with the values
        at the border, and no step needs an ``if``.

        Raises MismatchError, on the ranks that notice, if ranks disagree about who their neighbours
        are.

        For example::

            grid = aiodist.Grid(group, (0,))
            before, behind = np.zeros(1), np.zeros(1)  # 0 at the border
            for step in range(3):
                await grid.neighbor_all_gather(np.ones(1), out=[before, behind])
        """
        xs = [x] * len(self.destinations)
        return self._exchange("neighbor_all_gather", xs, out, tag, timeout)

    def neighbor_all_to_all(
        self, xs: Any, *, out: Any = None, tag: Any = None, timeout: float | None = None
    ) -> Any:
        """Send each of the `destinations` a value of its own, and gather as `neighbor_all_gather`
        does.

        `xs` is the list of these values in order. A value for a place without a neighbour is not
        sent.
        """
        return self._exchange("neighbor_all_to_all", xs, out, tag, timeout)

    def _exchange(self, op: str, xs: Any, out: Any, tag: Any, timeout: float | None) -> Any:
        try:
            _check("xs", xs, self.destinations)
            if out is not None:
                _check("out", out, self.sources)
                # Those of one rank are one slot of the all_to_all, which may have an array twice.
                due = [
                    None if src is None else out[place] for place, src in enumerate(self.sources)
                ]
                check_apart(due, "out")
        except (TypeError, ValueError) as error:
            self.group._forgo(error, tag)  # it counts as a call, so the others hear of it
            raise
        slots = self._by_rank(xs, self._to)
        outs = None if out is None else self._by_rank(out, self._from)
        try:
            given = self.group.all_to_all(slots, out=outs, tag=tag, timeout=timeout)
        except AiodistError as error:
            error.op = op
            raise
        if not isinstance(given, Work):
            return self._in_order(given, out)
        return together(
            given.get_loop(),
            op,
            tag,
            [given],
            lambda _: self._in_order(given.result(), out),
            lambda error: _renamed(error, op),
        ).for_user(self.group._unseen)

    def _by_rank(self, values: Sequence[Any], places: dict[int, list[int]]) -> list[Any]:
        """Return, for each rank of the group, the list of `values` in its places, or None."""
        found: list[Any] = [None] * self.group.size
        for rank, own in places.items():
            found[rank] = [values[place] for place in own]
        return found

    def _in_order(self, given: Sequence[Any], out: Sequence[Any] | None) -> list[Any]:
        """Return what came, in the order of the sources. A place without one keeps its value of
        `out`."""
        values: list[Any] = [None] * len(self.sources) if out is None else [*out]
        for rank, slot in enumerate(given):
            places = self._from.get(rank, [])
            came = [] if slot is None else slot
            # A rank that called all_to_all instead may have sent anything.
            is_list = isinstance(came, list)
            if not is_list or len(came) != len(places):
                own = self.group.rank
                sent = f"{len(came)} values" if is_list else f"no list but {type(came).__name__}"
                raise MismatchError(
                    f"rank {rank} sent {sent} to rank {own}, which has it as a source "
                    f"{len(places)} times: all ranks have to name the same neighbours, or the same "
                    "dims",
                    calls={
                        rank: f"{sent} to rank {own}",
                        own: f"{len(places)} values of rank {rank}",
                    },
                )
            for place, value in zip(places, came, strict=True):
                values[place] = value
        return values


def _check(name: str, values: Any, neighbors: Sequence[int | None]) -> None:
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{name} is a list of one value a neighbour, not {type(values).__name__}")
    if len(values) != len(neighbors):
        raise ValueError(f"{name} has {len(values)} values, and there are {len(neighbors)} places")


def _renamed(error: BaseException, op: str) -> BaseException:
    """Make an error name the call of the program, not the all_to_all behind it."""
    if isinstance(error, AiodistError):
        error.op = op
    return error


def _places(edges: Sequence[Edge | None]) -> dict[int, list[int]]:
    """Return the places of each rank, in the order in which both ends know their edges."""
    places = defaultdict(list)
    for place, edge in enumerate(edges):
        if edge is not None:
            places[edge[0]].append((edge[1], place))
    return {rank: [place for _, place in sorted(own)] for rank, own in places.items()}
