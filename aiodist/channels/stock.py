"""The versions that a participant has, and the memory for the next one."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from aiodist.channels.changes import Differences
from aiodist.channels.holding import ComingVersion, Holding
from aiodist.channels.lots import Lot
from aiodist.channels.memory import Spare
from aiodist.channels.ration import Ration


class Stock:
    """`holdings`: versions that are here; `lots`: slices of them, by version and name. `spare`:
    memory for the next version. `rations`: for each version of a publisher. `rate`: bytes per
    second of the last version that came whole; 0: unknown."""

    def __init__(self) -> None:
        self.holdings: dict[int, Holding] = {}
        self.lots: dict[tuple[int, str], Lot] = {}
        self.spare = Spare()
        self.rations: WeakKeyDictionary[ComingVersion, Ration] = WeakKeyDictionary()
        self.differences = Differences()
        self.rate = 0.0

    @property
    def own_bytes(self) -> int:
        """Bytes of memory that it takes of this process."""
        return sum(one.own_bytes for one in self.all()) + self.spare.nbytes

    def here(self, version: int | None) -> int:
        """How many bytes of a version are here."""
        return sum(one.here for one in self.all() if one.version == version)

    def whole(self, version: int | None) -> int:
        """How many bytes of it are here that are not of slices."""
        return sum(one.here for one in self.holdings.values() if one.version == version)

    def of(self, version: int, wants: str = "") -> Holding | Lot | None:
        """The slices of that name of a version, or the version as a whole."""
        return self.lots.get((version, wants)) if wants else self.holdings.get(version)

    def all(self) -> list[Holding | Lot]:
        return [*self.holdings.values(), *self.lots.values()]

    def drop(self, holding: Holding) -> None:
        """Do not hold a version any more, unless another one of that number is here now."""
        if self.holdings.get(holding.version) is holding:
            del self.holdings[holding.version]

    def close(self) -> None:
        for one in self.all():
            one.retire()
        self.holdings.clear()
        self.lots.clear()
        self.spare.close()
