"""What collectives need of a device. There is a stand-in for tests: `tests/shared/standin.py`.

Memory of a device is seen through *arrays* of its own kind, and read by work that is queued on
*streams*, which the host never waits for. *Events* order streams, those of other processes, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from aiodist.types import ReduceOp


class Location(NamedTuple):
    """Where an array lies: `offset` bytes into an allocation of this process.

    `allocation` is never the number of another one, even after it was freed. `handle`: with which
    other processes `open` it.
    """

    allocation: int
    handle: bytes
    offset: int


class Event(Protocol):
    """A point in a stream of this process, or of another one.

    Events are recorded again and again; whoever waits waits for the last record that was asked for
    when the wait was. One that was never recorded is complete.
    """

    @property
    def handle(self) -> bytes:
        """With which other processes open it."""
        ...

    def done(self) -> bool:
        """Whether the stream has come to it. Does not block."""
        ...


class Stream(Protocol):
    """A queue of work on the device, done in order."""

    def record(self, event: Event) -> None: ...

    def wait(self, event: Event) -> None:
        """What is queued from here on comes after `event`. Does not block."""
        ...


class Device(Protocol):
    """One device, as used by this process.

    An array `a` of it has the shape and dtype that `describe` tells; one that is *flat* (made by
    `flat`, `at`) has one dimension, is contiguous, and can be sliced.
    """

    kind: str
    """What texts call it: "cuda"."""

    def describe(self, array: Any) -> tuple[str, tuple[int, ...]]:
        """Dtype name (as in `aiodist.buffers.dtypes`) and shape. Raises TypeError for an array
        that does not travel."""
        ...

    def can_write(self, array: Any) -> bool:
        """Whether no two elements share one place in memory."""
        ...

    def flat(self, array: Any) -> Any | None:
        """The memory of an array, flat, as it is; None where it is not contiguous."""
        ...

    def empty(self, stream: Stream, name: str, shape: Sequence[int]) -> Any:
        """A new array, for work on `stream`, and then on the current one."""
        ...

    def host(self, name: str, shape: Sequence[int]) -> Any:
        """A new array of the host, which copies go to and come from without a detour."""
        ...

    def written(self, array: Any) -> None:
        """A user's array was written: tell autograd."""
        ...

    def current(self) -> Stream:
        """Where the user's work is queued at present."""
        ...

    def stream(self) -> Stream:
        """A new stream."""
        ...

    def event(self) -> Event:
        """A new event that other processes can open."""
        ...

    def open_event(self, handle: bytes) -> Event:
        """Raises OSError where that cannot be had."""
        ...

    def locate(self, flat: Any) -> Location:
        """Where a flat array lies. Raises OSError where other processes cannot see it."""
        ...

    def holds(self, allocation: int) -> bool:
        """Whether an allocation that was located is still there."""
        ...

    def open(self, handle: bytes) -> Any:
        """The allocation of another process (or of this one), until the result is dropped.

        Raises OSError where that cannot be had: on another host, or freed."""
        ...

    def at(
        self, memory: Any, offset: int, name: str, length: int, owner: object | None = None
    ) -> Any:
        """A flat array in an opened allocation. It and its views keep `owner` alive. Raises
        ValueError where the allocation ends before."""
        ...

    def copy(self, stream: Stream, into: Any, source: Any) -> None:
        """Queue a copy between arrays of one shape and dtype, of this device or of its `host`.
        The caller keeps both until it is done."""
        ...

    def reduces(self, op: ReduceOp, name: str) -> bool:
        """Whether the device has that operator for elements of dtype `name`."""
        ...

    def reduce(
        self, stream: Stream, op: ReduceOp, operands: Sequence[Any], into: Any, size: int
    ) -> None:
        """Queue the reduction of flat arrays, in their order. `into` may be one of them. The caller
        keeps them until it is done. `size`: by which AVG divides."""
        ...
