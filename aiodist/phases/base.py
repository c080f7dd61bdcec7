"""What the programs of all collectives use: the group as a rank sees it, the call, and the phase in
which every rank shows something to all."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from aiodist.codecs.feedback import Residuals
from aiodist.devices.memory import DeviceMemory
from aiodist.engine.operation import Operation, Program, Running, Start
from aiodist.engine.phase import Phase, Prepared, prepared
from aiodist.errors import AiodistError
from aiodist.phases.memories import Blobs
from aiodist.schedules import direct_exchange, dissemination, pull_whole, star, team_whole
from aiodist.schedules.choose_values import choose_share
from aiodist.schedules.costs import Costs
from aiodist.schedules.teams import Teams, spans_hosts
from aiodist.shared_memory.berths import Berths
from aiodist.shared_memory.board import BULK
from aiodist.types import Tag

T = TypeVar("T")
MAX_RANKS_POSTING = 16
"""The most ranks that send a value to each other in frames of their own. More ranks would need too
many frames."""
MAX_RANKS_IN_SMALL_AREA = 64
"""The most ranks whose small bytes surely fit together in a small area of shared memory."""

Part = Generator[Phase | Running, None, T]
"""A part of a program, with a result of its own."""


class SharedArrays(Protocol):
    """Arrays in memory that all ranks see."""

    def place_of(self, parts: Iterable[NDArray[Any]]) -> int:
        """Returns the place of contiguous arrays that follow each other in memory, for `find`. 0:
        they do not, or not all other ranks see them."""
        ...

    def find(self, peer: int, location: int, nbytes: int) -> NDArray[np.uint8]:
        """Returns the `nbytes` bytes of `peer` at a location that it gave. Raises ProtocolError."""
        ...


class Place(Protocol):
    """The group in which a program runs, as one rank sees it."""

    rank: int
    size: int
    teams: Teams
    """The ranks that can share memory."""

    hosts: Teams
    """The ranks of each host, even if they share no memory."""

    costs: Costs
    """What plans over links are chosen by. All ranks have the same."""

    loop: asyncio.AbstractEventLoop

    @property
    def heap(self) -> SharedArrays: ...

    @property
    def device_memory(self) -> DeviceMemory: ...

    max_message_bytes: int
    allow_pickle: bool
    residuals: dict[Tag, Residuals]
    """What codecs have lost, by tag."""

    may_post: bool
    """Whether ranks may post what they send to all others. Over links, that takes one round, too:
    see `aiodist.prepared.post_express`."""

    shows: bool
    """Whether the first phase of a program that is made now will surely be posted. Then it holds as
    much as on a lane."""

    @property
    def berths(self) -> Berths | None:
        """Lanes for operations that have none, once memory is shared."""
        ...

    @property
    def crowded(self) -> bool:
        """Whether more ranks share memory than there are cores. All ranks know the same."""
        ...

    def saved(self, nbytes: int) -> None:
        """Counts bytes that this rank did not have to send, because a codec made them fewer."""
        ...

    def call_roll(self, op: Operation) -> None:
        """Tells all others that the array of this rank is on a device, and asks for theirs."""
        ...

    def error(self, cls: type[AiodistError], message: str, **fields: object) -> AiodistError: ...


class Call(NamedTuple):
    """A collective that was called: everything that is needed to start it."""

    op: str
    text: str
    """What all ranks must agree on, in words."""
    start: Start
    nbytes: int
    place: int = 0
    """The place of its array in memory that all ranks see. 0: it is elsewhere, or does not
    matter."""
    shares_first: bool = False
    """Whether its first phase is a `share` that may be posted, and no function of the user runs
    before."""
    settles: bool = False
    """Whether the bits of its result may differ between a lane and links. Then a call without a
    tag waits until the ranks have agreed on shared memory."""


def share_over_links(place: Place, *, first: bool, of_one: bool = False) -> Prepared:
    """Return the plan of `share` over links."""
    if first and place.may_post:
        algorithm = direct_exchange.share
    elif of_one or place.costs.trip:
        algorithm = choose_share(place.size, place.costs).algorithm
    else:
        algorithm = dissemination.all_gather
    return prepared(algorithm, place.rank, place.size)


def share(
    place: Place,
    own: bytes,
    on_lane: bool,
    *,
    first: bool = False,
    of_one: bool = False,
    root: int | None = None,
) -> Part[list[bytes]]:
    """Share the small `own` bytes of every rank, and return all of them by rank. Synchronises all
    ranks.

    `first`: this is the first phase of a collective, which may be posted. `of_one`: at most one
    rank has more than a few words, `root` if that is known.
    """
    memory = Blobs(place.rank, place.size, own)
    if on_lane and spans_hosts(place.teams):
        by_hub = of_one and choose_share(len(place.teams), place.costs).algorithm is star.all_gather
        plan = prepared(team_whole.share, place.rank, place.teams, by_hub, root if by_hub else None)
        yield Phase(plan, memory, len(own), 0 if place.size <= MAX_RANKS_IN_SMALL_AREA else BULK)
        # Now the phase is over, so no rank gave up meanwhile. Bad data was written like that.
        memory.check()
    elif on_lane:
        # Each rank has one cell, the whole of its small area.
        plan = prepared(pull_whole.share, place.rank, place.size, 1)
        yield Phase(plan, memory, len(own), 0)
        memory.check()
    else:
        yield Phase(share_over_links(place, first=first, of_one=of_one), memory)
    return memory.blobs


def barrier(place: Place) -> Call:
    def program(on_lane: bool) -> Program:
        yield from share(place, b"", on_lane, first=True, of_one=True)

    return Call("barrier", "barrier()", program, 0, shares_first=place.may_post)


def as_rank(value: Any, size: int, name: str) -> int:
    """Return `value` as a plain int, the number of one of `size` ranks.

    Raises TypeError if it is no integer, and ValueError if there is no such rank.
    """
    rank = value if type(value) is int else as_int(value, f"{name} is a rank, an int")
    if not 0 <= rank < size:
        raise ValueError(
            f"{name}={rank} is not a rank of this group of {size}: its ranks are 0 to {size - 1}"
        )
    return rank


def as_int(value: Any, expected: str) -> int:
    """Return an integer of any type, such as a numpy one, as a plain int, because that can be sent
    and compared.

    Raises TypeError, with `expected` in its text, for anything else and for a bool.
    """
    if not isinstance(value, bool):
        try:
            return int(operator.index(value))
        except TypeError:
            pass
    raise TypeError(f"{expected}, not {value!r}")


def as_shape(value: Any) -> tuple[int, ...]:
    """Return a shape, an integer of any type or a sequence of them, as plain ints.

    Raises TypeError for anything else.
    """
    try:
        return (operator.index(value),)
    except TypeError:
        pass
    if not isinstance(value, Iterable):
        raise TypeError(f"shape is an int or a sequence of ints, not {value!r}")
    return tuple([as_int(size, "each size in shape is an int") for size in value])
