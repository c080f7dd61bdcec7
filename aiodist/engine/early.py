"""Headers of collectives' frames, checked, and frames that come before their collective is
called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiodist.errors import ProtocolError

Key = tuple[object, int]
"""The tag and the number of a collective."""


class EarlyKeeper(Protocol):
    """Keeps what comes before its collective is called."""

    def came(self, frame: Ahead) -> None:
        """Takes `frame`, which is complete."""
        ...


@dataclass(eq=False, slots=True)
class Ahead:
    """A frame whose collective was not called here when the frame began. It is also the landing of
    its payload, which goes to memory of its own."""

    keeper: EarlyKeeper
    key: Key
    src: int
    slot: int  # its number among the frames of `src`
    call: bytes  # what `src` called
    memory: memoryview

    def landed(self) -> None:
        self.keeper.came(self)


@dataclass(eq=False, slots=True)
class Early:
    """Everything that came for one collective before it was called here.

    `costs`: how many bytes are kept of each rank. `grants`: by rank, the slot below which it takes
    frames, and its call. `inquirers` and `knockers`: the ranks that asked whether it was called
    here. They get an answer when it is. (They are tuples, because there may be many of these
    objects and few of these ranks.)
    """

    costs: dict[int, int] = field(default_factory=dict)
    frames: list[Ahead] = field(default_factory=list)
    grants: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    inquirers: tuple[int, ...] = ()
    knockers: tuple[int, ...] = ()

    def take(self, src: int, call: bytes, into: memoryview) -> bool:
        """Copy the frame of `src` with this call and size to `into`. False: there is none."""
        for frame in self.frames:
            # A frame of another call or size stays. The call becomes an operation then, gets that
            # frame and fails by it, so that all ranks hear of the difference.
            if frame.src == src and frame.call == call and len(frame.memory) == len(into):
                into[:] = frame.memory
                self.frames.remove(frame)
                return True
        return False

    def values(self, call: bytes, fits: Callable[[int], bool]) -> dict[int, memoryview] | None:
        """Return the payloads by rank, if all that came is one frame of each, of this call and a
        size that fits. None: something else came, too."""
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
    """Return the key in a header ``[kind, context, tag, seq, …]``. Raises ProtocolError."""
    if len(fields) < 4 or type(fields[3]) is not int or fields[3] < 0:
        raise ProtocolError("a frame of a collective must have a tag and a sequence number")
    tag = fields[2]
    if tag is not None and type(tag) not in (str, int, bytes):
        raise ProtocolError(f"a tag must be a str or an int, not {type(tag).__name__}")
    return tag, fields[3]


def slot_and_call(fields: Sequence[Any]) -> tuple[int, bytes]:
    """Return the rest of a MESSAGE or GRANT header. Raises ProtocolError."""
    if len(fields) != 6 or type(fields[4]) is not int or type(fields[5]) is not bytes:
        raise ProtocolError("a MESSAGE or GRANT frame must end in a slot and a call")
    return fields[4], fields[5]


def entered_and_text(fields: Sequence[Any]) -> tuple[bool, str]:
    """Return the rest of a STATUS header. Raises ProtocolError."""
    if len(fields) != 6 or type(fields[4]) is not bool or type(fields[5]) is not str:
        raise ProtocolError("a STATUS frame must end in a flag and a text")
    return fields[4], fields[5]
