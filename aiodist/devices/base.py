"""What collectives need of a device. `tests/shared/standin.py` has a stand-in for tests.

The memory of a device is seen through *arrays* of its own kind. Work is queued on *streams*, and
the host never waits for them. *Events* order streams, including those of other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from aiodist.types import ReduceOp


class Location(NamedTuple):
    """Where an array is: `offset` bytes into an allocation of this process.

    The number `allocation` is never used again, even after the allocation was freed. Other
    processes `open` the allocation with `handle`.
    """

    allocation: int
    handle: bytes
    offset: int


class Event(Protocol):
    """A point in a stream of this process or of another one.

    Events are recorded again and again. A wait is for the last record before the wait was queued.
    An event that was never recorded is complete.
    """

    @property
    def handle(self) -> bytes:
        """What other processes open it with. Raises OSError if there is nothing."""
        ...

    def done(self) -> bool:
        """Whether the stream has reached it. Does not block."""
        ...


class Stream(Protocol):
    """A queue of work on the device, done in order."""

    def record(self, event: Event) -> None: ...

    def wait(self, event: Event) -> None:
        """Let later work on this stream start after `event`. Does not block."""
        ...


class Device(Protocol):
    """One device, as this process uses it.

    An array `a` has the shape and dtype that `describe` returns. A *flat* array (made by `flat` or
    `at`) has one dimension, is contiguous, and can be sliced.
    """

    kind: str
    """Its name in texts: "cuda"."""

    def describe(self, array: Any) -> tuple[str, tuple[int, ...]]:
        """The dtype name (as in `aiodist.buffers.dtypes`) and shape. Raises TypeError for an array
        that cannot be sent."""
        ...

    def layout(self, array: Any) -> NDArray[Any]:
        """An array of numpy with the addresses of `array`. Its elements must not be accessed.

        Raises ValueError if the memory was freed.
        """
        ...

    def can_write(self, array: Any) -> bool:
        """Whether no two elements share one place in memory."""
        ...

    def flat(self, array: Any) -> Any | None:
        """The memory of an array, flat and without a copy; None if it is not contiguous."""
        ...

    def empty(self, stream: Stream, name: str, shape: Sequence[int]) -> Any:
        """Make a new array, for work on `stream` first, and then on the current stream.

        Raises MemoryError.
        """
        ...

    def host(self, name: str, shape: Sequence[int]) -> Any:
        """Make a new array of the host in pinned memory. Raises MemoryError."""
        ...

    def written(self, array: Any) -> None:
        """Tell autograd that a user's array was written."""
        ...

    def current(self) -> Stream:
        """The stream of the user's present work."""
        ...

    def stream(self) -> Stream: ...

    def event(self) -> Event:
        """Make an event that other processes can open."""
        ...

    def open_event(self, handle: bytes) -> Event:
        """Raises OSError if it cannot be opened."""
        ...

    def locate(self, flat: Any) -> Location:
        """Where a flat array is. Raises OSError if other processes cannot see it."""
        ...

    def holds(self, allocation: int) -> bool:
        """Whether an allocation that was located still exists."""
        ...

    def open(self, handle: bytes) -> Any:
        """Open the allocation of another process (or of this one), until the result is dropped.

        Raises OSError if it is on another host, or was freed.
        """
        ...

    def at(
        self, memory: Any, offset: int, name: str, length: int, owner: object | None = None
    ) -> Any:
        """A flat array in an opened allocation. It and its views keep `owner` alive.

        Raises ValueError if it does not fit into the allocation.
        """
        ...

    def copy(self, stream: Stream, into: Any, source: Any) -> None:
        """Queue a copy between arrays of one shape and dtype, of this device or of its `host`.

        Keep both until it is done.
        """
        ...

    def reduces(self, op: ReduceOp, name: str) -> bool:
        """Whether the device has that operator for elements of dtype `name`."""
        ...

    def reduce(
        self, stream: Stream, op: ReduceOp, operands: Sequence[Any], into: Any, size: int
    ) -> None:
        """Queue the reduction of flat arrays, in their order. `into` may be one of them.

        Keep them until it is done. `size`: the divisor of AVG.
        """
        ...
