"""What the coordinator knows of the rounds of averagers: it learns from members what it has lost,
and goes back if no member has the last result any more.

Members that come back say what they have reached and hold. Until this coordinator has recorded a
round by itself, the newest of that counts. See `aiodist.membership.rounds` for how results of
another history are told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiodist.membership.averagers import Room, Rounds, decision_of, moving_of
from aiodist.membership.loans import Loans
from aiodist.membership.rounds import Astray, Moving, Owed
from aiodist.membership.seating import Seating
from aiodist.wire.averaging import (
    AverageDecision,
    AverageDone,
    AverageEnter,
    AverageReopened,
    Outcome,
    Reached,
)

RETURN_WINDOW = 3.0
"""Seconds in which no round closes after the coordinator lost its memory, or all members that had
the last result: members may come back that know of later rounds."""


class Histories:
    """The rounds of all averagers, as far as members have to bring them back."""

    def __init__(self, seating: Seating, loans: Loans) -> None:
        self._seating = seating
        self._books = seating.books
        self._loans = loans
        self._tell = loans.tell

    def learn(self, room: Room, who: str, message: AverageEnter) -> None:
        """Take over what a returning member knows, because this coordinator may have lost it."""
        member = room.members[who]
        outcomes: dict[str, list[Outcome]] = {}
        for one in message.outcomes:
            outcomes.setdefault(one.part, []).append(one)
        for name, reached in zip(member.parts, message.reached, strict=False):
            if reached is not None:
                member.reached[name] = reached
            self._learn_results(room, who, name, reached, outcomes.get(name, []))
        for decision in message.decisions:
            before = decision.before
            self._learn_results(room, who, decision.part, before, [])
            part = room.rounds(decision.part).part
            is_next = before.round == part.round and not part.is_astray(before)
            if is_next and decision.attempt > part.attempts:
                for info in decision.members:
                    room.infos[info.id] = info
                self._take_up(room, who, decision.part, moving_of(decision), before)
        self._loans.pay_again(room)

    def _learn_results(
        self, room: Room, who: str, name: str, reached: Reached | None, outcomes: list[Outcome]
    ) -> None:
        """The last result of a member in a part was `reached`, and it holds those of `outcomes`."""
        rounds = room.rounds(name)
        part = rounds.part
        said = {} if reached is None else {reached.round: reached.digest}
        for one in outcomes:
            said |= {one.round: one.digest, one.round - 1: one.parent}
        newest = max(said, default=0)
        # Once this coordinator has recorded a round, only results of its own history count.
        is_newer = newest > part.round and not part.has_recorded
        if is_newer:
            if any(part.digests.get(round, digest) != digest for round, digest in said.items()):
                rounds.outcomes.clear()
                part.digests.clear()
            part.digests[newest] = said[newest]
        for one in sorted(outcomes, key=lambda one: -one.round):
            if part.digests.get(one.round) == one.digest:
                _, holders = rounds.outcomes.get(one.round, (one, list(one.ids)))
                room.remember(one, list(dict.fromkeys([*holders, who])))
        if is_newer:
            self._take_up(room, who, name, None, Reached(newest, said[newest]))

    def _take_up(
        self, room: Room, who: str, name: str, moving: Moving | None, reached: Reached
    ) -> None:
        """A part is at the round `reached`, and after that one, `moving` is decided: `who` says so.
        Tell the others."""
        self.wait_for_others(room)
        part = room.rounds(name).part
        before = part.moving
        attempts = part.attempts if moving is None else moving.attempt
        owed = part.restore(moving, reached, attempts)
        remaining = [] if moving is None else moving.remaining
        if before is not None:
            for one in before.remaining:
                if one not in remaining and one != who:
                    self._over(room, one, name, before.round, before.parent)
        if moving is not None:
            decision = decision_of(room, name, moving.decided({}))
            for one in remaining:
                if one != who:
                    self._tell(room, one, decision)
        for debt in owed:
            self.answer(room, name, debt)

    def wait_for_others(self, room: Room) -> None:
        """Members bring what this coordinator has lost, so give all of them the time to come back.
        Those that have not come back by then count as gone."""
        if not room.is_restored:
            room.is_restored = True
            room.patient_until = self._books.now + RETURN_WINDOW
            for rounds in room.parts.values():
                rounds.part.patient_until = room.patient_until

    def answer(self, room: Room, name: str, found: Owed | Astray, call: int = 0) -> None:
        if isinstance(found, Owed):
            self._loans.pay(room, name, found, call)
        else:
            self._loans.refuse_stale(room, found.member, name, found.call, astray=True)

    def _over(self, room: Room, who: str, name: str, round: int, parent: bytes) -> None:
        """A member follows a decision about `round` that holds no longer."""
        rounds = room.rounds(name)
        part = rounds.part
        known = rounds.outcomes.get(round)
        if known is not None and who in known[1]:
            self._tell(room, who, AverageDone(known[0], room.keep))
        elif round <= part.round and not part.is_astray(Reached(round - 1, parent)):
            # Its contribution is in the result, or it is not.
            self._loans.pay(room, name, Owed(who, round))
        else:
            self._tell(room, who, AverageReopened(name, round))

    def tell_again(self, room: Room, who: str, decisions: Sequence[AverageDecision]) -> None:
        """Repeat what a member may have missed while it had no connection. It follows these
        decisions."""
        followed = {decision.part: decision for decision in decisions}
        for name in room.members[who].parts:
            moving = room.rounds(name).part.moving
            if moving is not None and who in moving.remaining:
                self._tell(room, who, decision_of(room, name, moving.decided({})))
            elif name in followed:
                self._over(room, who, name, followed[name].round, followed[name].parent)

    def look_for_last(self, room: Room, name: str, rounds: Rounds, due: list[float]) -> None:
        """If no member has the last result of a part, wait for those that had it, and then go back
        to the newest one that a member has had. Otherwise no member could go on."""
        part = rounds.part
        now = self._books.now
        if room.is_known(name):
            if rounds.orphaned is not None:
                rounds.orphaned, part.patient_until = None, room.patient_until
            return
        if rounds.orphaned is None:
            rounds.orphaned = now
        end = max(rounds.orphaned + RETURN_WINDOW, room.patient_until or 0.0)
        if now < end:
            part.patient_until = end
            due.append(end)
            return
        note(self._seating, "went back", room, name, part.round)
        rounds.go_back(room.newest_known(name))
        rounds.orphaned, part.patient_until = None, room.patient_until
        for (other, who), (owed, _) in list(room.unpaid.items()):
            if other == name and owed.round > part.round:
                del room.unpaid[name, who]
                self._tell(room, who, AverageReopened(name, owed.round))
        self._loans.pay_again(room)


def note(seating: Seating, event: str, room: Room, part: str, round: int, **fields: Any) -> None:
    """Note an event of a part for the log."""
    group = seating.books.groups[room.any_group]
    fields |= {"averager": room.name, "part": part, "round": round}
    seating.note(event, group, **fields)
