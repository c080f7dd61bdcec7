"""Stalls: the coordinator notes when ranks of a group begin to wait for long, and when that ends.

A stall begins with the first rank that reports a long wait. It is over when no rank of the group
waits any more, or the group has formed. So the log has two lines for it, however many ranks and
operations wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiodist.membership.awaited import waits_of
from aiodist.membership.books import Books
from aiodist.membership.group import GroupKey, GroupState, ranks_text
from aiodist.membership.survey import Survey, what
from aiodist.wire.activity import Seen, Stalled, ranks_in, shortened, unpacked
from aiodist.wire.limits import MAX_TEXT
from aiodist.wire.messages import Message, Withdrawn

MOST_TOLD = 4
"""The number of awaited ranks whose activity the log line shows."""


class Noting(Protocol):
    """Writes an event of a group to the log."""

    def __call__(self, event: str, group: GroupState, **fields: Any) -> None: ...


@dataclass(slots=True)
class _Stall:
    """One stall. `conns`: the connections of its waiting ranks. `since`: the time that the first of
    them named. `is_noted`: the log has its first line."""

    since: float
    conns: set[int] = field(default_factory=set)
    is_noted: bool = False


class Stalls:
    def __init__(
        self,
        send: Callable[[int, int, Message], None],
        note: Noting,
        books: Books,
        survey: Survey,
    ) -> None:
        self._send = send  # to a connection, in reply to a request
        self._note = note
        self._books = books
        self._survey = survey
        self._stalls: dict[GroupKey, _Stall] = {}

    def heard(self, group: GroupState, conn: int, request: int, message: Stalled) -> None:
        """Handle the report of a member or joiner that it waits, or no longer does."""
        if not message.seconds:
            self.gone(group, conn)
            return
        stall = self._stalls.get(group.key)
        if stall is None:
            stall = self._stalls[group.key] = _Stall(self._books.now - message.seconds)
        stall.conns.add(conn)
        if conn in group.joiners:
            text = group.waiting_text()[:MAX_TEXT]
            rank = group.joiners[conn].ask.rank
            self._begins(stall, group, message, rank=rank, what="join", why=text)
            self._send(conn, request, Withdrawn(text, group.missing))
            return
        called, missing, lacking = self._awaited(group, conn, message)
        rank = group.members[conn].rank

        def reply(texts: tuple[str, ...]) -> None:
            # A rank that has done it by now does something else than while the others waited.
            done = f"(last: {called} done)"
            texts = tuple(["" if text.endswith(done) else text for text in texts])
            doing = [
                f"{ranks_text([one])}: {text}"
                for one, text in zip(missing, texts, strict=True)
                if text
            ]
            self._begins(
                stall,
                group,
                message,
                rank=rank,
                what=called,
                missing=ranks_text(missing),
                why="; ".join([lacking] * bool(lacking) + doing[:MOST_TOLD]),
            )
            self._send(conn, request, Seen(missing, texts))

        # The note needs what they are doing, which may take a second to find out.
        self._survey.ask_ranks(conn, group, missing, reply)

    def gone(self, group: GroupState, conn: int) -> None:
        stall = self._stalls.get(group.key)
        if stall is not None:
            stall.conns.discard(conn)
            if not stall.conns:
                self.over(group)

    def over(self, group: GroupState) -> None:
        """No rank of the group waits any more, for example because the group has formed."""
        stall = self._stalls.pop(group.key, None)
        if stall is not None and stall.is_noted:
            self._note("stall over", group, seconds=round(self._books.now - stall.since, 1))

    def _begins(self, stall: _Stall, group: GroupState, message: Stalled, **fields: Any) -> None:
        # It may be over by now. Then the log must not say that it begins.
        if not stall.is_noted and self._stalls.get(group.key) is stall:
            stall.is_noted = True
            known = {name: value for name, value in fields.items() if value not in ("", None)}
            self._note("stalled", group, seconds=round(message.seconds, 1), **known)

    def _awaited(
        self, group: GroupState, conn: int, message: Stalled
    ) -> tuple[str, tuple[int, ...], str]:
        """The operation that a member waits in, the ranks that it waits for, and what else."""
        for wait in message.waits:
            there = {member.rank for member in group.members.values()}
            missing = [rank for rank in ranks_in(unpacked(wait.missing)) if rank in there]
            return shortened(what(wait)), tuple(missing), ""
        for known in waits_of(group, conn, self._books.now):
            return known.what, ranks_in(known.missing), known.lacking
        return "a request", (), ""
