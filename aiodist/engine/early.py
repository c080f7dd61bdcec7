"""Headers of collectives' frames, checked; and what came before its collective was called here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiodist.errors import ProtocolError

Key = tuple[object, int]
"""The tag and the number of a collective."""


class Keeper(Protocol):
    """Who keeps what comes before its collective is called."""

    def came(self, frame: Ahead) -> None:
        """Takes `frame`, which is here as a whole."""
        ...


@dataclass(eq=False, slots=True)
class Ahead:
    """A frame of a collective that was not called here when it began to come: the landing of its
    payload, in memory of its own."""

    keeper: Keeper
    key: Key
    src: int
    slot: int  # its number among the frames of `src`
    call: bytes  # what `src` has called
    memory: memoryview

    def landed(self) -> None:
        self.keeper.came(self)


@dataclass(eq=False, slots=True)
class Early:
    """All that came for one collective that was not called here yet.

    `costs`: by rank, what is kept of it. `grants`: by rank, up to which slot it takes frames, and
    its call. `inquirers` and `knockers` are the ranks that asked whether it was called here, to be
    answered when it is. (No sets: there may be many of these, and who asks are few.)
    """

    costs: dict[int, int] = field(default_factory=dict)
    frames: list[Ahead] = field(default_factory=list)
    grants: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    inquirers: tuple[int, ...] = ()
    knockers: tuple[int, ...] = ()

    def take(self, src: int, call: bytes, into: memoryview) -> bool:
        """Whether there is a frame of `src` with this call and of that size: it is `into` then."""
        for frame in self.frames:
            # One of another call or size stays: the call becomes an operation then, which is handed
            # that frame and fails by it, so that all hear of the difference.
            if frame.src == src and frame.call == call and len(frame.memory) == len(into):
                into[:] = frame.memory
                self.frames.remove(frame)
                return True
        return False

    def values(self, call: bytes, fits: Callable[[int], bool]) -> dict[int, memoryview] | None:
        """What has come by rank, if that is nothing but one frame of this call of each, of a size
        that fits."""
        found = {frame.src: frame.memory for frame in self.frames}
        if self.grants or self.inquirers or self.knockers or len(found) < len(self.frames):
            return None
        for frame in self.frames:
            if frame.slot or frame.call != call or not fits(len(frame.memory)):
                return None
        return found

    @property
    def is_empty(self) -> bool:
        return not (self.frames or self.grants or self.inquirers or self.knockers)


def key_of(fields: Sequence[Any]) -> Key:
    """The key in a header ``[kind, context, tag, seq, …]``. Raises ProtocolError."""
    if len(fields) < 4 or type(fields[3]) is not int or fields[3] < 0:
        raise ProtocolError("a collective's frame has a tag and a sequence number")
    tag = fields[2]
    if tag is not None and type(tag) not in (str, int, bytes):
        raise ProtocolError(f"a tag is a str or an int, not {type(tag).__name__}")
    return tag, fields[3]


def slot_and_call(fields: Sequence[Any]) -> tuple[int, bytes]:
    """The rest of MESSAGE and GRANT headers. Raises ProtocolError."""
    if len(fields) != 6 or type(fields[4]) is not int or type(fields[5]) is not bytes:
        raise ProtocolError("a MESSAGE or GRANT frame ends in a slot and a call")
    return fields[4], fields[5]


def entered_and_text(fields: Sequence[Any]) -> tuple[bool, str]:
    """The rest of a STATUS header. Raises ProtocolError."""
    if len(fields) != 6 or type(fields[4]) is not bool or type(fields[5]) is not str:
        raise ProtocolError("a STATUS frame ends in a flag and a text")
    return fields[4], fields[5]
