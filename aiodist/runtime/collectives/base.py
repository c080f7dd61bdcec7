"""What all programs share."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, Protocol, TypeVar

from aiodist.errors import AiodistError
from aiodist.runtime.collectives.memories import Blobs
from aiodist.runtime.operation import Phase, Program, prepared
from aiodist.schedules import dissemination

T = TypeVar("T")
Part = Generator[Phase, None, T]
"""A part of a program, with a result of its own."""


class Place(Protocol):
    """Where a program runs: the group as seen by one rank."""

    rank: int
    size: int
    max_message_bytes: int
    allow_pickle: bool

    def error(self, cls: type[AiodistError], message: str, **fields: object) -> AiodistError: ...


class Call(NamedTuple):
    """A collective that was called: everything to start it with."""

    op: str
    text: str
    """What all ranks must agree on, in words."""
    program: Program
    nbytes: int


def share(place: Place, own: bytes) -> Part[list[bytes]]:
    """Every rank's small bytes, by rank (Bruck's all-gather). Synchronises all ranks."""
    memory = Blobs(place.rank, place.size, own)
    yield Phase(prepared(dissemination.all_gather, place.rank, place.size), memory)
    return memory.blobs


def barrier(place: Place) -> Call:
    def program() -> Program:
        yield from share(place, b"")

    return Call("barrier", "barrier()", program(), 0)


def check_root(place: Place, root: int, name: str) -> None:
    """Raise unless `root` is a rank."""
    if isinstance(root, bool) or not isinstance(root, int):
        raise TypeError(f"{name} is a rank, an int, not {root!r}")
    if not 0 <= root < place.size:
        raise ValueError(f"{name}={root} is no rank of this group of {place.size}")
