"""Members or joiners of one group, found by connection, member id or rank.

Each join is compared with all members, and each report and vote names members by id. With a search
for each, n ranks that come at once would cost n² steps.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, MutableMapping, ValuesView
from typing import Protocol, TypeVar


class Seated(Protocol):
    """A member or joiner. `rank` is None if it is not known yet."""

    @property
    def id(self) -> str: ...

    @property
    def rank(self) -> int | None: ...


S = TypeVar("S", bound=Seated)


class Seats(MutableMapping[int, S]):
    """A dict in order of arrival. No two entries have the same id or the same rank."""

    __slots__ = ("_by_id", "_by_rank", "_there")

    def __init__(self, there: Mapping[int, S] | None = None) -> None:
        self._there: dict[int, S] = {}
        self._by_id: dict[str, int] = {}
        self._by_rank: dict[int, int] = {}
        self.update(there or {})

    def of_id(self, member_id: str) -> int | None:
        """The connection of the member with this id; None if there is none."""
        return self._by_id.get(member_id)

    def of_rank(self, rank: int) -> int | None:
        """The connection of the member that has this rank, or asked for it; None if there is
        none."""
        return self._by_rank.get(rank)

    def __getitem__(self, conn: int) -> S:
        return self._there[conn]

    def __setitem__(self, conn: int, one: S) -> None:
        self.pop(conn, None)
        self._there[conn] = one
        self._by_id[one.id] = conn
        if one.rank is not None:
            self._by_rank[one.rank] = conn

    def __delitem__(self, conn: int) -> None:
        one = self._there.pop(conn)
        del self._by_id[one.id]
        if one.rank is not None:
            del self._by_rank[one.rank]

    def __contains__(self, conn: object) -> bool:
        return conn in self._there

    def __iter__(self) -> Iterator[int]:
        return iter(self._there)

    def __len__(self) -> int:
        return len(self._there)

    # Messages to thousands of members walk over all seats. The methods of MutableMapping would look
    # up each key.

    def items(self) -> ItemsView[int, S]:
        return self._there.items()

    def values(self) -> ValuesView[S]:
        return self._there.values()
