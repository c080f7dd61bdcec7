"""What the programs of all collectives are made with: where they run, what was called, and the
phase in which every rank shows something to all."""

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
from aiodist.shared_memory.board import BULK, SMALL
from aiodist.types import Tag

T = TypeVar("T")
MAX_RANKS_POSTING = 16
"""With more ranks, a value that goes from each to each in a frame of its own is too many frames."""
MAX_RANKS_IN_SMALL_AREA = 64
"""With more ranks, the small bytes of all may be too much for a small area of shared memory."""

Part = Generator[Phase | Running, None, T]
"""A part of a program, with a result of its own."""


class SharedArrays(Protocol):
    """Arrays in memory that all ranks see."""

    def place_of(self, parts: Iterable[NDArray[Any]]) -> int:
        """Where contiguous arrays lie one behind the other, as `find` takes it; 0 if they do not,
        or not all others see them."""
        ...

    def find(self, peer: int, location: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes of `peer` at a location that it gave. Raises ProtocolError."""
        ...


class Place(Protocol):
    """Where a program runs: the group as seen by one rank."""

    rank: int
    size: int
    teams: Teams
    """The ranks that can share memory."""

    hosts: Teams
    """The ranks of each host, whether they share memory or not."""

    costs: Costs
    """What plans over links are chosen by: the same on all ranks."""

    loop: asyncio.AbstractEventLoop

    @property
    def heap(self) -> SharedArrays: ...

    @property
    def device_memory(self) -> DeviceMemory: ...

    max_message_bytes: int
    allow_pickle: bool
    residuals: dict[Tag, Residuals]
    """What codecs have lost, by tag."""

    shares_memory: bool
    """Whether all ranks are of one host and are to share memory, once that is agreed on."""

    shows: bool
    """Whether the first phase of a program that is made now is to be posted for certain: then there
    is as much in it as on a lane."""

    @property
    def berths(self) -> Berths | None:
        """Lanes for operations that have none, once memory is shared."""
        ...

    @property
    def crowded(self) -> bool:
        """Whether more ranks share memory than have a core each, as all of them know."""
        ...

    def saved(self, nbytes: int) -> None:
        """Counts bytes that this rank did not have to send, because a codec made them fewer."""
        ...

    def call_roll(self, op: Operation) -> None:
        """Tells all others that the array of this rank is on a device, and asks for theirs."""
        ...

    def error(self, cls: type[AiodistError], message: str, **fields: object) -> AiodistError: ...


class Call(NamedTuple):
    """A collective that was called: everything to start it with."""

    op: str
    text: str
    """What all ranks must agree on, in words."""
    start: Start
    nbytes: int
    place: int = 0
    """Where its array lies in memory that all ranks see; 0: elsewhere, or it does not matter."""
    shares_first: bool = False
    """Whether its first phase is a `share` which may be posted, without a function of the user's
    before it."""


def may_post(place: Place) -> bool:
    """Whether ranks may show all others what they send to all, which then is one round over links,
    too: see `aiodist.collectives.post_express`."""
    return place.shares_memory and 1 < place.size <= MAX_RANKS_POSTING


def share_over_links(place: Place, *, first: bool, of_one: bool = False) -> Prepared:
    """The plan of `share` over links."""
    if first and may_post(place):
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
    """Every rank's small bytes, by rank. Synchronises all ranks.

    `first`: it is the first phase of a collective, which may be posted. `of_one`: one rank at most
    has more than a few words to share: the `root`, if that is known.
    """
    memory = Blobs(place.rank, place.size, own)
    if on_lane and spans_hosts(place.teams):
        by_hub = of_one and choose_share(len(place.teams), place.costs).algorithm is star.all_gather
        plan = prepared(team_whole.share, place.rank, place.teams, by_hub, root if by_hub else None)
        yield Phase(
            plan, memory, len(own), SMALL if place.size <= MAX_RANKS_IN_SMALL_AREA else BULK
        )
        # The phase is over, so nobody has given up meanwhile: what makes no sense was written so.
        memory.check()
    elif on_lane:
        # One cell a rank, which has all of a small area for it.
        plan = prepared(pull_whole.share, place.rank, place.size, 1)
        yield Phase(plan, memory, len(own), SMALL)
        memory.check()
    else:
        yield Phase(share_over_links(place, first=first, of_one=of_one), memory)
    return memory.blobs


def barrier(place: Place) -> Call:
    def program(on_lane: bool) -> Program:
        yield from share(place, b"", on_lane, first=True, of_one=True)

    return Call("barrier", "barrier()", program, 0, shares_first=may_post(place))


def as_rank(value: Any, size: int, name: str) -> int:
    """`value` as one of `size` ranks, a plain int. Raises TypeError and ValueError for others."""
    rank = value if type(value) is int else as_int(value, f"{name} is a rank, an int")
    if not 0 <= rank < size:
        raise ValueError(f"{name}={rank} is no rank of this group of {size}")
    return rank


def as_int(value: Any, expected: str) -> int:
    """An integer of any type, as numpy finds them, as a plain int: so it travels, and so it is
    compared. Raises TypeError for what is none, and for a bool."""
    if not isinstance(value, bool):
        try:
            return int(operator.index(value))
        except TypeError:
            pass
    raise TypeError(f"{expected}, not {value!r}")
