"""The coordinator's decisions about averagers: members, messages to them, and records.

Each member is a group of one, so that leases, losses and returns work as in any group. This module
starts to work for a member when it sends AverageEnter. `aiodist.membership.rounds` decides the
rounds of each part. This module turns messages into its calls, and its decisions into messages and
records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from aiodist.membership.averagers import (
    SHOWN,
    AveragerMember,
    Room,
    Rounds,
    SeenRound,
    decision_of,
    moving_of,
)
from aiodist.membership.books import REMEMBERED, RoundDue
from aiodist.membership.group import GroupKey, GroupState
from aiodist.membership.histories import Histories, note
from aiodist.membership.loans import Loans
from aiodist.membership.records import (
    AveragerDecided,
    AveragerEntered,
    AveragerRecorded,
    Record,
)
from aiodist.membership.rounds import (
    Contribution,
    Decided,
    Got,
    Owed,
    Recorded,
    Reopened,
)
from aiodist.membership.rounds import Outcome as Decision
from aiodist.membership.seating import Seating
from aiodist.membership.silence import OVERDUE
from aiodist.wire.averaging import (
    AverageDecision,
    AverageDone,
    AverageElect,
    AverageElected,
    AverageEnter,
    AverageEntered,
    AverageFetched,
    AverageGone,
    AverageLacks,
    AverageOffer,
    AverageProgress,
    AverageRefused,
    AverageReopened,
    AverageStateKept,
    AverageWantState,
    AverageWithdraw,
    AverageWithdrawn,
    AveragingRequest,
    Outcome,
    Reached,
    averager_of,
)
from aiodist.wire.limits import MAX_TEXT
from aiodist.wire.messages import Failed, Failure, MemberInfo, Message

EXCERPT = 240
"""The most characters of a tree that an error shows, and `CONTEXT` of these are before the first
difference."""
CONTEXT = 60


class Averaging:
    def __init__(self, seating: Seating) -> None:
        self._seating = seating
        self._books = seating.books
        self._loans = Loans(seating)
        self._tell = self._loans.tell
        self._histories = Histories(seating, self._loans)
        self._rooms: dict[GroupKey, Room] = {}
        self._of_group: dict[GroupKey, tuple[Room, str]] = {}  # by the key of a group of one
        self._lost: dict[GroupKey, None] = {}  # averagers whose members were all lost
        self.silent: set[GroupKey] = set()  # averagers of which no member is heard
        self._books.on_gone = self._gone
        self._books.on_record = self._replay
        self._handlers: dict[type[Message], Callable[[Room, str, int, int, Any], None]] = {
            AverageOffer: self._on_offer,
            AverageWithdraw: self._on_withdraw,
            AverageProgress: self._on_progress,
            AverageLacks: self._on_lacks,
            AverageFetched: self._loans.on_fetched,
            AverageElect: self._loans.on_elect,
            AverageStateKept: self._loans.on_state_kept,
            AverageWantState: self._loans.on_want_state,
        }

    # Messages of members.

    def handle(
        self, group: GroupState | None, conn: int, request: int, message: AveragingRequest
    ) -> None:
        if group is None or conn not in group.members:
            text = "only members can use an averager: join it first"
            self._seating.send(conn, request, Failed(Failure.NOT_A_MEMBER, text))
        elif isinstance(message, AverageEnter):
            self._on_enter(group, conn, request, message)
        elif group.key in self._of_group:
            room, who = self._of_group[group.key]
            self._handlers[type(message)](room, who, conn, request, message)
        elif isinstance(message, AverageWithdraw):
            # The coordinator was restarted, and the member repeats its requests before it has
            # entered again. Answer "not decided", because the member will offer its values anew.
            self._seating.send(conn, request, AverageWithdrawn(False, 0, ()))
        elif isinstance(message, AverageElect):
            self._seating.send(conn, request, AverageElected(False))

    def _on_enter(self, group: GroupState, conn: int, request: int, message: AverageEnter) -> None:
        name = averager_of(group.name)
        info = group.members[conn]
        key = (name, group.run_id)
        room = self._rooms.get(key)
        if room is not None:
            self._heard(room)  # also if it is refused
        failed = self._refusal(room, name, info, message)
        if failed is not None:
            self._seating.send(conn, request, failed)
            return
        if room is None:
            room = self._rooms[key] = Room(name, group.run_id, message.rules)
        if info.id not in room.members:
            self._add(room, info, group.key, message.parts, message.keep)
            self._books.write(
                AveragerEntered(*group.key, info.id, message.rules, message.parts, message.keep)
            )
            self._seating.note("entered", group, averager=name, who=info.name)
        self._seating.send(conn, request, AverageEntered(room.keep))
        if group.restored or key in self._lost:  # members may live, and come back with results
            self._lost.pop(key, None)
            self._histories.wait_for_others(room)
        self._loans.back(room, info.id)
        self._histories.learn(room, info.id, message)
        self._loans.has_state(room, info.id, message.state)
        self._histories.tell_again(room, info.id, message.decisions)
        self._settle(room)
        self._fence(room, message.gone)

    def _fence(self, room: Room, gone: Sequence[str]) -> None:
        """Turn away members that others were told are gone: they have ended their links to them. A
        coordinator that lost its memory lets such a member in at first."""
        room.gone |= dict.fromkeys(gone)
        while len(room.gone) > REMEMBERED:
            del room.gone[next(iter(room.gone))]
        for who in [one for one in room.members if one in room.gone]:
            group = self._books.groups[room.members[who].group]
            reason = "another member was told that it is gone"
            self._seating.evict(group, dict.fromkeys(group.members, reason))

    def _refusal(
        self, room: Room | None, name: str, info: MemberInfo, message: AverageEnter
    ) -> Failed | None:
        if not name:
            return Failed(Failure.INVALID, "only members of an averager have rounds")
        if len(message.reached) != len(message.parts):
            text = f"there are {len(message.parts)} parts, and {len(message.reached)} last results"
            return Failed(Failure.INVALID, text)
        if room is None:
            return None
        if room.rules != message.rules:
            text = (
                f"the averager {name!r} has {room.rules}, but this member asks for"
                f" {message.rules}: give all members the same{self._until_lost(room)}"
            )
            return Failed(Failure.MISMATCH, text[:MAX_TEXT])
        for who, member in room.members.items():
            if member.info.name == info.name and who != info.id:
                text = (
                    f"the averager {name!r} has a member named {info.name!r} already (pid"
                    f" {member.info.pid} on {member.info.host}): give each member a name of its"
                    f" own, or wait until the other one is lost{self._until_lost(room)}"
                )
                return Failed(Failure.INVALID, text[:MAX_TEXT])
        return None

    def _until_lost(self, room: Room) -> str:
        """What an error adds if no member of the averager is heard."""
        groups = [self._books.groups[member.group] for member in room.members.values()]
        if not all(group.absent for group in groups):
            return ""
        lease = max(member.info.lease for member in room.members.values())
        return f"; none of its members is heard, and they are lost in {lease:g} s at most"

    def _add(
        self, room: Room, info: MemberInfo, key: GroupKey, parts: tuple[str, ...], keep: int
    ) -> None:
        room.infos[info.id] = info
        room.members[info.id] = AveragerMember(key, info, parts, keep)
        self._of_group[key] = (room, info.id)
        for part in parts:
            room.rounds(part).part.enter(info.id)

    def _on_offer(self, room: Room, who: str, conn: int, request: int, offer: AverageOffer) -> None:
        member = room.members[who]
        if offer.part not in member.parts:
            text = f"the part {offer.part!r} is not among the parts of this member"
            self._tell(room, who, AverageRefused(offer.part, offer.call, text[:MAX_TEXT]))
            return
        rounds = room.rounds(offer.part)
        part = rounds.part
        if rounds.form != offer.form and not rounds.takes_any_form:
            theirs, mine = _apart(rounds.text, offer.text)
            text = (
                f"the values of part {offer.part!r} of the averager {room.name!r} are {theirs}, but"
                f" this member gives {mine}. All members must give the same keys, containers,"
                " shapes and dtypes in all rounds of a part: give these, or use a part or an"
                " averager of another name"
            )
            self._tell(room, who, AverageRefused(offer.part, offer.call, text[:MAX_TEXT]))
            return
        if offer.after is not None:
            member.reached[offer.part] = offer.after
            if part.round - offer.after.round > member.keep and room.is_known(offer.part):
                self._loans.refuse_stale(room, who, offer.part, offer.call)
                return
        rounds.form, rounds.text = offer.form, offer.text
        if part.moving is None and not part.offers:
            rounds.opened = self._books.now
        self._note_late(room, rounds, who, offer.after)
        found = part.offer(who, Contribution(offer.call, offer.weight, offer.after))
        if found is not None:
            self._histories.answer(room, offer.part, found, offer.call)
        self._settle(room, offer.part)

    def _note_late(self, room: Room, rounds: Rounds, who: str, after: Reached | None) -> None:
        seen = None if after is None else rounds.seen.get(after.round + 1)
        if seen is None:
            return
        # A member that contributed repeats its offer over a new connection.
        moving = rounds.part.moving
        contributors = seen.outcome.ids if seen.outcome else moving.remaining if moving else ()
        if who not in contributors:
            seen.late.setdefault(room.name_of(who), self._books.now - seen.decided)

    def _on_withdraw(
        self, room: Room, who: str, conn: int, request: int, message: AverageWithdraw
    ) -> None:
        if message.part not in room.parts:
            self._seating.send(conn, request, AverageWithdrawn(False, len(room.members), ()))
            return
        room.unpaid.pop((message.part, who), None)
        part = room.parts[message.part].part
        decided = part.withdraw(who, message.call)
        moving = part.moving
        missing = (
            part.missing(who)
            if moving is None
            else sorted({one for pair in moving.missing() for one in pair} - {who})
        )
        names = tuple(map(room.name_of, missing))
        present = len(part.present)
        self._seating.send(conn, request, AverageWithdrawn(decided, present, names))
        self._settle(room, message.part)

    def _on_progress(
        self, room: Room, who: str, conn: int, request: int, message: AverageProgress
    ) -> None:
        rounds = room.parts.get(message.part)
        if rounds is None or rounds.part.moving is None:
            return
        part = rounds.part
        members = list(rounds.part.moving.offers)
        if max((*message.contributions, *message.means), default=0) >= len(members):
            return  # of a decision that is over
        got = Got(
            frozenset([members[one] for one in message.contributions]),
            frozenset([members[one] for one in message.means]),
        )
        part.report(who, message.round, message.attempt, got)
        self._settle(room, message.part)

    def _on_lacks(
        self, room: Room, who: str, conn: int, request: int, message: AverageLacks
    ) -> None:
        if message.part in room.parts:
            room.parts[message.part].part.lacks(who, message.round, message.attempt)
            self._settle(room, message.part)

    # Decisions.

    def _settle(self, room: Room, changed: str | None = None) -> None:
        """Decide what can be decided: in the part that has `changed`, or (None) in all parts."""
        now = self._books.now
        timer = RoundDue(room.key)
        due: list[float] = []
        alive = set(room.members)
        order = room.order
        names = list(room.parts)
        if room.patient_until is not None:
            if now < room.patient_until:  # members that a decision names may still come back
                alive |= room.infos.keys()
                due.append(room.patient_until)
            else:
                room.patient_until = None
                self._loans.pay_again(room)
        elif changed is not None:
            # Keep an earlier deadline, because it may be of another part. If it was of this one,
            # the timer only looks at all parts too early.
            names = [changed]
            pending = self._books.timers.get(timer)
            due += [] if pending is None else [pending]
        for name in names:
            rounds = room.parts[name]
            self._histories.look_for_last(room, name, rounds, due)
            for outcome in rounds.part.settle(now, alive, order):
                self._decided(room, name, outcome)
            if rounds.part.deadline is not None:
                due.append(rounds.part.deadline)
            if rounds.part.is_empty:
                del room.parts[name]
        room.forget_gone()
        if due:
            self._books.timers.set(timer, max(min(due), now))
        else:
            self._books.timers.cancel(timer)

    def tick(self, key: GroupKey) -> None:
        room = self._rooms.get(key)
        if room is not None:
            self._settle(room)

    def _decided(self, room: Room, name: str, outcome: Decision) -> None:
        rounds = room.rounds(name)
        now = self._books.now
        match outcome:
            case Decided():
                rounds.seen.setdefault(outcome.round, SeenRound(rounds.opened, now))
                while len(rounds.seen) > SHOWN:
                    rounds.seen.popitem(last=False)
                decision = decision_of(room, name, outcome)
                record = AveragerDecided(*room.any_group, rounds.form, rounds.text, decision)
                self._books.write(record)
                for who in outcome.offers:
                    if who in outcome.remaining or who in outcome.left_out:
                        self._tell(room, who, decision)
                for who, reason in outcome.left_out.items():
                    note(
                        self._seating, "left out", room, name, outcome.round, who=who, reason=reason
                    )
            case Recorded(round, parent, digest, contributors, holders):
                ids = tuple(one for one, _ in contributors)
                names = tuple(room.name_of(one) for one in ids)
                weights = tuple(weight for _, weight in contributors)
                said = Outcome(name, round, parent, digest, ids, names, weights)
                room.remember(said, list(holders))
                attempts = rounds.part.attempts
                self._books.write(AveragerRecorded(*room.any_group, said, holders, attempts))
                done = AverageDone(said, room.keep)
                for who in holders:
                    self._tell(room, who, done)
                seen = rounds.seen.setdefault(round, SeenRound(now, now))
                seen.recorded, seen.outcome = now, said
                rounds.has_form = bool(rounds.form)
                rounds.opened = now
                note(self._seating, "round", room, name, round, contributors=len(ids))
            case Reopened(round, members):
                self._books.write(_reopened(room, name))
                for who in members:
                    self._tell(room, who, AverageReopened(name, round))
                note(self._seating, "reopened", room, name, round)
            case Owed():
                self._loans.pay(room, name, outcome)

    # Losses.

    def _gone(self, group: GroupState, ids: Sequence[str], *, lost: bool, replays: bool) -> None:
        """The member of a group of one was lost, or has left."""
        if group.key not in self._of_group:
            return
        room, who = self._of_group.pop(group.key)
        known = [name for name in room.parts if not lost and room.is_known(name)]
        del room.members[who]
        for name, rounds in room.parts.items():
            rounds.part.gone([who])
            rounds.is_over = rounds.is_over or (name in known and not room.is_known(name))
        if not room.members:
            del self._rooms[room.key]
            self._books.timers.cancel(RoundDue(room.key))
            self.silent.discard(room.key)
            if lost:
                self._lost[room.key] = None
                if len(self._lost) > REMEMBERED:
                    del self._lost[next(iter(self._lost))]
            return
        if replays:
            return
        gone = AverageGone((who,))
        for other in room.members:
            self._tell(room, other, gone)
        self._loans.gone(room, who)
        self._settle(room)

    def accused(self, group: GroupState, other: str) -> GroupState | None:
        """Return the group of one of a member that a member of `group` cannot reach."""
        if group.key not in self._of_group:
            return None
        room, _ = self._of_group[group.key]
        if other not in room.members:
            return None
        return self._books.groups.get(room.members[other].group)

    def others_are_heard(self, group: GroupState) -> bool:
        """Whether other members of the same averager were heard in time.

        If they were, the silence of `group` is its own. See `aiodist.membership.silence`.
        """
        if group.key not in self._of_group:
            return False
        room, _ = self._of_group[group.key]
        for member in room.members.values():
            other = self._books.groups.get(member.group)
            if other is None or other is group:
                continue
            for conn, lease in other.leases.items():
                left = self._books.time_left(conn)
                if left > OVERDUE * lease:
                    return True
        return False

    def fell_silent(self, group: GroupState) -> None:
        """No member of the averager that `group` is of was heard in time."""
        if group.key in self._of_group:
            self.silent.add(self._of_group[group.key][0].key)

    def got_word(self, group: GroupState | None) -> None:
        """If `group` is of an averager whose members all fell silent, it can be reached again, and
        the others have to come back within their leases."""
        if group is not None and group.key in self._of_group:
            self._heard(self._of_group[group.key][0])

    def _heard(self, room: Room) -> None:
        if room.key in self.silent:
            self.silent.remove(room.key)
            for member in room.members.values():
                self._books.got_word(self._books.groups[member.group])

    # Restarts.

    def records(self) -> Iterator[Record]:
        """Yield all that the next coordinator needs to know."""
        for room in self._rooms.values():
            for who, member in room.members.items():
                yield AveragerEntered(*member.group, who, room.rules, member.parts, member.keep)
            group = room.any_group
            for name, rounds in room.parts.items():
                attempts = rounds.part.attempts
                if rounds.has_form and rounds.outcomes:
                    # Only decisions have the form. The record of that round follows.
                    first = rounds.outcomes[min(rounds.outcomes)][0]
                    said = (name, first.round, first.parent, attempts, attempts, (), (), (), ())
                    yield AveragerDecided(*group, rounds.form, rounds.text, AverageDecision(*said))
                for _, (outcome, holders) in sorted(rounds.outcomes.items()):
                    yield AveragerRecorded(*group, outcome, tuple(holders), attempts)
                if attempts and not rounds.outcomes:
                    yield _reopened(room, name)
                moving = rounds.part.moving
                if moving is not None:
                    decision = decision_of(room, name, moving.decided({}))
                    yield AveragerDecided(*group, rounds.form, rounds.text, decision)

    def _replay(self, record: Record) -> None:
        match record:
            case AveragerEntered():
                key = (averager_of(record.group), record.run_id)
                room = self._rooms.get(key)
                if room is None:
                    room = self._rooms[key] = Room(*key, record.rules)
                    self.silent.add(key)  # until one of its members comes back
                group = self._books.groups[record.group, record.run_id]
                assert group.view is not None
                info = group.view.members[0]
                self._add(room, info, group.key, record.parts, record.keep)
            case AveragerDecided(decision=decision):
                room = self._rooms[averager_of(record.group), record.run_id]
                rounds = room.rounds(decision.part)
                rounds.form, rounds.text = record.form, record.text
                for info in decision.members:
                    room.infos[info.id] = info
                if decision.round <= rounds.part.round:
                    rounds.go_back(decision.before)
                rounds.part.restore(moving_of(decision), decision.before, decision.attempt)
            case AveragerRecorded():
                room = self._rooms[averager_of(record.group), record.run_id]
                rounds = room.rounds(record.outcome.part)
                part = rounds.part
                part.moving = None
                part.attempts = record.attempts
                if not record.reopened:
                    if record.outcome.round <= part.round:
                        rounds.go_back(record.outcome.before)
                    part.restore(None, record.outcome.reached, part.attempts)
                    room.remember(record.outcome, list(record.holders))
                    rounds.has_form = bool(rounds.form)
            case _:
                raise AssertionError(record)

    def status(self) -> list[dict[str, Any]]:
        """Describe each averager in plain data: see `Room.status`."""
        return [room.status() for room in self._rooms.values()]


def _apart(one: str, other: str) -> list[str]:
    """Excerpts of two texts, which begin shortly before the first difference."""
    differs = (at for at, (x, y) in enumerate(zip(one, other, strict=False)) if x != y)
    begin = max(next(differs, min(len(one), len(other))) - CONTEXT, 0)
    return ["…" * bool(begin) + text[begin : begin + EXCERPT] for text in (one, other)]


def _reopened(room: Room, name: str) -> AveragerRecorded:
    part = room.rounds(name).part
    nothing = Outcome(name, part.round + 1, b"", b"", (), (), ())
    return AveragerRecorded(*room.any_group, nothing, (), part.attempts, reopened=True)
