"""What members of an averager fetch from each other: results of rounds that they missed, and the
state that a new member begins with.

The coordinator chooses the member that gives a result or the state. It tells that member
(AverageServe) and the one that needs it (AverageFetch): see `aiodist.membership.averaging`.
"""

from __future__ import annotations

import hashlib

from aiodist.membership.averagers import Loan, Room
from aiodist.membership.rounds import Owed
from aiodist.membership.seating import Seating
from aiodist.wire.averaging import (
    AverageElect,
    AverageElected,
    AverageFetch,
    AverageFetched,
    AverageRefused,
    AverageServe,
    AverageStateKept,
    AverageWantState,
    Outcome,
    Reached,
)
from aiodist.wire.limits import MAX_TEXT
from aiodist.wire.messages import Message


class Loans:
    """The transfers between members of all averagers."""

    def __init__(self, seating: Seating) -> None:
        self._seating = seating
        self._books = seating.books

    def tell(self, room: Room, who: str, message: Message) -> None:
        """Send a message to a member, if it is here."""
        member = room.members.get(who)
        group = None if member is None else self._books.groups.get(member.group)
        if group is not None:
            for conn in group.members:
                self._seating.send(conn, 0, message)

    # Results.

    def pay(self, room: Room, part: str, owed: Owed, call: int = 0) -> None:
        """Let a member fetch the result of a round that it missed.

        While members may still come back to a coordinator that lost its memory, one of them may
        bring the result: see `pay_again`.
        """
        if owed.member not in room.members:
            return
        known = room.rounds(part).outcomes.get(owed.round)
        holders = [] if known is None else [one for one in known[1] if one in room.members]
        holders = [one for one in holders if one != owed.member]
        if known is not None and holders:
            self._lend(room, part, owed.round, holders, owed.member, known[0])
        elif room.patient_until is not None or not room.is_known(part):
            room.unpaid[part, owed.member] = (owed, call)
        else:
            self.refuse_stale(room, owed.member, part, call)

    def pay_again(self, room: Room) -> None:
        """Pay what could not be paid before, or, if no member comes back any more, refuse it."""
        unpaid, room.unpaid = room.unpaid, {}
        for (part, _), (owed, call) in unpaid.items():
            self.pay(room, part, owed, call)

    def refuse_stale(
        self, room: Room, who: str, part: str, call: int, *, astray: bool = False
    ) -> None:
        """Tell a member that no other member keeps the result that it needs; or (`astray`) that its
        last result is of another history."""
        last = room.rounds(part).part.round
        why = (
            "the last result of this member is none of them, because rounds were decided again"
            " without it"
            if astray
            else "the results that this member missed are no longer kept"
        )
        text = (
            f"the part {part!r} is at round {last}, and {why}: take the state of another member"
            " (`state`), and go on from there; if no member calls `publish_state`, leave the"
            " averager and enter it again"
        )
        self.tell(room, who, AverageRefused(part, call, text[:MAX_TEXT], stale=last))
        self.dismiss(room, who)

    def _lend(
        self,
        room: Room,
        part: str | None,
        round: int,
        holders: list[str],
        target: str,
        outcome: Outcome | None,
    ) -> None:
        # In turn, so that one holder does not serve all.
        source = holders[room.lent % len(holders)]
        room.lent += 1
        words = f"{room.name}\n{source}\n{target}\n{room.lent}\n{self._books.wall_time!r}"
        ticket = hashlib.blake2b(words.encode(), digest_size=8).digest()
        for other, loan in list(room.loans.items()):
            if (loan.part, loan.target) == (part, target):
                del room.loans[other]
        member = room.members[source]
        reached = dict(zip(member.parts, member.state or (), strict=False)) if part is None else {}
        room.loans[ticket] = Loan(part, round, source, target, reached)
        infos = room.infos
        self.tell(room, source, AverageServe(part, round, infos[target], ticket))
        self.tell(room, target, AverageFetch(part, infos[source], ticket, outcome))

    def on_fetched(
        self, room: Room, who: str, conn: int, request: int, message: AverageFetched
    ) -> None:
        loan = room.loans.get(message.ticket)
        if loan is None or who not in (loan.source, loan.target):
            return
        if loan.part is None and who == loan.source:
            return  # the target finds that out
        del room.loans[message.ticket]
        if message.failed:
            self._lend_again(room, loan, but=loan.source)
        elif loan.part is None:
            room.members[who].wants_state = False
            room.members[who].reached.update(loan.reached)
        else:
            known = room.rounds(loan.part).outcomes.get(loan.round)
            if known is not None and who not in known[1]:
                known[1].append(who)
                room.members[who].has(loan.part, known[0].reached)

    def _lend_again(self, room: Room, loan: Loan, but: str) -> None:
        """Find another source for a member whose transfer failed."""
        if loan.target not in room.members:
            return
        if loan.part is None:
            self._give_state(room, but)
            return
        known = room.rounds(loan.part).outcomes.get(loan.round)
        if known is not None and but in known[1]:
            known[1].remove(but)
        self.pay(room, loan.part, Owed(loan.target, loan.round))

    def back(self, room: Room, who: str) -> None:
        """A member is back. It may not have heard that it is to give something."""
        for ticket, loan in list(room.loans.items()):
            if loan.source == who:
                del room.loans[ticket]
                self._lend_again(room, loan, but="")

    def gone(self, room: Room, who: str) -> None:
        """A member is gone, and `room` has no place for it any more."""
        self.dismiss(room, who)
        loans = [loan for loan in room.loans.values() if who in (loan.source, loan.target)]
        room.loans = {
            ticket: loan
            for ticket, loan in room.loans.items()
            if who not in (loan.source, loan.target)
        }
        for loan in loans:
            self._lend_again(room, loan, but=who)

    # The state.

    def dismiss(self, room: Room, who: str) -> None:
        """A member has no state for others any more."""
        if who in room.members:
            room.members[who].state = None
        if room.elected == who:
            room.elected, room.copied = "", ()

    def on_elect(
        self, room: Room, who: str, conn: int, request: int, message: AverageElect
    ) -> None:
        # A slow member may have been the first to ask. Its state would be too old for a new member,
        # so a member that is ahead of it by a round of each part takes its place.
        if room.elected and room.is_old(room.elected, room.copied):
            self.dismiss(room, room.elected)
        is_ahead = _rounds(message.state) > _rounds(room.copied) + len(room.parts)
        if room.is_old(who, message.state):
            self.dismiss(room, who)
        elif room.elected in ("", who) or is_ahead:
            room.elected, room.copied = who, message.state
        else:
            room.members[who].state = None
        self._seating.send(conn, request, AverageElected(room.elected == who))

    def on_state_kept(
        self, room: Room, who: str, conn: int, request: int, message: AverageStateKept
    ) -> None:
        self.has_state(room, who, message.state)

    def has_state(self, room: Room, who: str, state: tuple[Reached, ...] | None) -> None:
        """A member has a state for others, or (None) has none."""
        if state is None or room.is_old(who, state):
            self.dismiss(room, who)
            return
        room.members[who].state = state
        if room.elected in ("", who):
            room.elected, room.copied = who, state
        self._give_state(room)

    def on_want_state(
        self, room: Room, who: str, conn: int, request: int, message: AverageWantState
    ) -> None:
        room.members[who].wants_state = message.wanted
        for ticket, loan in list(room.loans.items()):
            if loan.part is None and loan.target == who:
                del room.loans[ticket]
        self._give_state(room)

    def _give_state(self, room: Room, but: str = "") -> None:
        """Let members fetch the state of another member that is newest in the parts that they take
        part in. If several are equally new, one that covers all these parts is better. `but`: a
        source that has just failed."""
        states = {
            who: dict(zip(member.parts, member.state, strict=False))
            for who, member in room.members.items()
            if member.state is not None and not room.is_old(who, member.state)
        }
        if len(states) > 1:
            states.pop(but, None)
        served = {loan.target for loan in room.loans.values() if loan.part is None}
        for who, member in room.members.items():
            if member.wants_state and who not in served:
                needs = {*member.parts}
                # An old state that covers all parts is worth less: its receiver may soon miss
                # rounds that no member keeps.
                worth = {
                    source: (
                        sum(one.round for part, one in state.items() if part in needs),
                        needs <= state.keys(),
                    )
                    for source, state in states.items()
                    if source != who
                }
                best = max(worth.values(), default=None)
                sources = [source for source, value in worth.items() if value == best]
                if sources:
                    self._lend(room, None, 0, sources, who, None)


def _rounds(state: tuple[Reached, ...]) -> int:
    return sum(one.round for one in state)
