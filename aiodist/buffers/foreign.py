"""Arrays that are not in memory of the host, as the codec of values sees them.

The codec (`aiodist.buffers.values`) knows how values are described, and nothing of devices. The
rooms above know devices, and nothing of trees. They need three protocols: one that takes arrays out
of an outgoing value, one that has places for arrays of an incoming value, and such a place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from aiodist.buffers.arrays import Flat
from aiodist.buffers.paths import Where

if TYPE_CHECKING:
    from aiodist.buffers.tokens import Spec


class Target(Protocol):
    """The place of one array of an incoming value, as `aiodist.buffers.arrays.UserArray` is."""

    @property
    def value(self) -> Any:
        """What the user gets."""
        ...

    def stage(self) -> tuple[Flat, Flat | None]:
        """Return host memory for its bytes, and what to `commit` when it is filled.

        The memory is empty if the bytes do not come to the host.
        """
        ...

    def commit(self, staged: Flat | None) -> None:
        """Bring the array to its place, because all bytes have come."""
        ...


class Giver(Protocol):
    """Takes foreign arrays out of a value that is encoded."""

    def is_foreign(self, value: Any) -> bool:
        """Tell whether it is for `give`, without taking it."""
        ...

    def give(self, value: Any, where: Where) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape of an array that travels in another way; None for anything else.

        Raises TypeError, naming `where`, for a foreign array that does not travel.
        """
        ...


class Taker(Protocol):
    """Has places for arrays of an incoming value."""

    def is_foreign(self, value: Any) -> bool: ...

    def take(self, spec: Spec, out: Any, where: Where) -> Target | None:
        """Return the place of an array: `out`, or a new one if that is None. None: the host, as
        usual.

        Raises TypeError or ValueError, naming `where`, if the array does not fit.
        """
        ...
