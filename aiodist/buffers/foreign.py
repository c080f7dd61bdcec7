"""Arrays that are not in memory of the host, as the codec of values sees them.

The codec (`aiodist.buffers.values`) knows how values are told and where their bytes go, and nothing
of devices. The rooms above know devices, and nothing of trees. These three protocols are all that
they need of each other: somebody who takes arrays out of a value that leaves, somebody who has
places for arrays of a value that comes, and such a place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from aiodist.buffers.arrays import Flat
from aiodist.buffers.paths import Where

if TYPE_CHECKING:
    from aiodist.buffers.tokens import Spec


class Target(Protocol):
    """Where one array of a value that comes goes: an `aiodist.buffers.arrays.Array`, or such."""

    @property
    def value(self) -> Any:
        """What the user gets."""
        ...

    def stage(self) -> tuple[Flat, Flat | None]:
        """Memory of the host for its bytes, empty where they do not come to the host, and what to
        `commit` when it is filled."""
        ...

    def commit(self, staged: Flat | None) -> None:
        """All is there: have it where it goes."""
        ...


class Giver(Protocol):
    """Takes foreign arrays out of a value that is encoded."""

    def give(self, value: Any, where: Where) -> tuple[str, tuple[int, ...]] | None:
        """Dtype and shape of an array that is to travel otherwise; None for anything else.

        Raises TypeError, naming `where`, for a foreign array that does not travel."""
        ...


class Taker(Protocol):
    """Has places for arrays of a value that comes."""

    def is_foreign(self, value: Any) -> bool: ...

    def take(self, spec: Spec, out: Any, where: Where) -> Target | None:
        """Where an array goes: to `out`, or if that is None to a new one. None: to the host, as
        any other. Raises TypeError and ValueError, naming `where`, for what does not fit."""
        ...
