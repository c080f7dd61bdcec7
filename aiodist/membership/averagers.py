"""The data of one averager in the coordinator: its members, and the rounds of its parts.

`aiodist.membership.averaging` works on this data.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from aiodist.membership.group import GroupKey
from aiodist.membership.rounds import Contribution, Decided, Moving, Owed, PartRounds
from aiodist.wire.averaging import AverageDecision, Outcome, Reached, Rules
from aiodist.wire.messages import MemberInfo

SHOWN = 32
"""The number of recorded rounds that `status` shows of each part."""


@dataclass(slots=True)
class SeenRound:
    """A round for `status`: the times of its first contribution, its decision and its record.

    `late`: by the name of a member, the seconds by which its contribution came too late.
    """

    opened: float
    decided: float
    recorded: float | None = None
    outcome: Outcome | None = None
    late: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Rounds:
    """One part: its rounds, the form of its values, and which members hold which of the last
    results. `has_form`: a round is recorded with this form. `orphaned`: since when no member has
    the last one. `is_over`: all that had it have left in order."""

    part: PartRounds
    form: bytes = b""
    text: str = ""
    has_form: bool = False
    outcomes: OrderedDict[int, tuple[Outcome, list[str]]] = field(default_factory=OrderedDict)
    seen: OrderedDict[int, SeenRound] = field(default_factory=OrderedDict)
    opened: float = 0.0  # the time of the first contribution to the open round
    orphaned: float | None = None
    is_over: bool = False

    @property
    def takes_any_form(self) -> bool:
        """Whether the next call may have any form: no call has one that counts."""
        part = self.part
        return not self.form or not (self.has_form or part.moving or part.offers or part.late)

    def go_back(self, reached: Reached) -> None:
        """No round after `reached` holds any more."""
        if self.part.is_astray(reached):
            self.outcomes.clear()
            self.part.digests.clear()
        self.part.go_back(reached)
        for each in self.outcomes, self.seen:
            for round in [one for one in each if one > reached.round]:
                del each[round]


@dataclass(frozen=True, slots=True)
class Loan:
    """A transfer from one member to another: the result of a round of `part`, or (None) the state,
    which is of the results `reached`."""

    part: str | None
    round: int
    source: str
    target: str
    reached: dict[str, Reached] = field(default_factory=dict)


@dataclass(slots=True)
class AveragerMember:
    """A member. `group`: the key of its group of one. `reached`: by part, the last result that it
    has. `state`: the results that its state for others is of, in each of its parts; None: it has no
    state."""

    group: GroupKey
    info: MemberInfo
    parts: tuple[str, ...]
    keep: int
    reached: dict[str, Reached] = field(default_factory=dict)
    state: tuple[Reached, ...] | None = None
    wants_state: bool = False

    def has(self, part: str, reached: Reached) -> None:
        """It has a result."""
        if part not in self.reached or self.reached[part].round < reached.round:
            self.reached[part] = reached


@dataclass(slots=True)
class Room:
    """One averager.

    `infos`: the members, and those that are gone but that a round still names, in the order in
    which they came. `unpaid`: by part and member, the results that a member needs and no other
    member has brought back so far, each with the call that asked for it. `gone`: the ids of members
    that others were told are gone, before the coordinator lost its memory. `is_restored`: members
    have brought what it had lost. `patient_until`: until then, more of them may come back.
    """

    name: str
    run_id: str
    rules: Rules
    members: dict[str, AveragerMember] = field(default_factory=dict)
    infos: dict[str, MemberInfo] = field(default_factory=dict)
    parts: dict[str, Rounds] = field(default_factory=dict)
    loans: dict[bytes, Loan] = field(default_factory=dict)
    unpaid: dict[tuple[str, str], tuple[Owed, int]] = field(default_factory=dict)
    gone: dict[str, None] = field(default_factory=dict)
    elected: str = ""  # the member that keeps a copy of its state
    copied: tuple[Reached, ...] = ()  # what this copy is of
    lent: int = 0  # the number of loans so far
    is_restored: bool = False
    patient_until: float | None = None

    @property
    def key(self) -> GroupKey:
        return self.name, self.run_id

    @property
    def keep(self) -> int:
        return max((member.keep for member in self.members.values()), default=0)

    @property
    def any_group(self) -> GroupKey:
        return next(iter(self.members.values())).group

    @property
    def order(self) -> dict[str, int]:
        """The place of each member, in the order in which they came."""
        return {who: place for place, who in enumerate(self.infos)}

    def name_of(self, member: str) -> str:
        return self.infos[member].name

    def rounds(self, part: str) -> Rounds:
        found = self.parts.get(part)
        if found is None:
            found = self.parts[part] = Rounds(PartRounds(self.rules.quorum, self.rules.grace))
            found.part.patient_until = self.patient_until
            for who, member in self.members.items():
                if part in member.parts:
                    found.part.enter(who)
        return found

    def forget_gone(self) -> None:
        """Drop the members that are gone and that no round names any more."""
        if len(self.infos) == len(self.members):
            return
        named = set(self.members)
        for rounds in self.parts.values():
            named |= rounds.part.named
        for who in self.infos.keys() - named:
            del self.infos[who]

    def remember(self, outcome: Outcome, holders: list[str]) -> None:
        rounds = self.rounds(outcome.part)
        rounds.outcomes[outcome.round] = (outcome, holders)
        rounds.is_over = False
        for one in holders:
            if one in self.members:
                self.members[one].has(outcome.part, outcome.reached)
        digests = rounds.part.digests
        digests[outcome.round] = outcome.digest
        digests[outcome.round - 1] = outcome.parent
        while len(rounds.outcomes) > max(1, self.keep):
            del rounds.outcomes[min(rounds.outcomes)]
        for older in [one for one in digests if one < min(rounds.outcomes) - 1]:
            del digests[older]

    def is_known(self, part: str) -> bool:
        """Whether a member has the last result of a part, or what follows from it. If those that
        had it have left, the others are told that they are too late, so it counts as known."""
        rounds = self.parts[part]
        found = rounds.part
        if found.round == 0 or found.moving is not None:
            return True
        last = Reached(found.round, found.digests[found.round])
        had = [one.reached.get(part) for one in self.members.values()]
        return last in had or (rounds.is_over and any(one and one.round for one in had))

    def newest_known(self, part: str) -> Reached:
        """The newest result of a part that a member has: one of its history, if there is one."""
        found = [one.reached[part] for one in self.members.values() if part in one.reached]
        known = [one for one in found if one.round and not self.parts[part].part.is_astray(one)]
        return max(known or found, key=lambda one: one.round, default=Reached(0, b""))

    def is_old(self, who: str, state: tuple[Reached, ...]) -> bool:
        """Whether a state is of no use, because results after it are not kept, or because it is of
        another history."""
        member = self.members[who]
        for name, reached in zip(member.parts, state, strict=False):
            part = self.rounds(name).part
            if part.is_astray(reached) or part.round - reached.round > member.keep:
                return True
        return False

    def status(self) -> dict[str, Any]:
        """Describe the averager in plain data.

        "name", "run_id", and the rules "quorum", "grace" (None: "auto"), "codec" and "op".
        "members": each with "id", "name", "host", "pid" and "parts". A survey adds what they have
        "said": see `aiodist.membership.survey`.

        "parts": each with its name, "part", the last recorded "round", "grace" in seconds, and the
        "state", "open" or "moving". "contributed" and "missing" are the names of members that have
        contributed to the present round or not. "rounds" are the last rounds. "late" has the
        members that were late for one of them: by name, the last such round, and the seconds.

        Each of "rounds" has its number, "round", and the "seconds" from its first contribution to
        its record. "contributors" have "weights". "late": by name, the seconds by which members
        were late.
        """
        rules = self.rules
        return {
            "name": self.name,
            "run_id": self.run_id,
            "quorum": rules.quorum,
            "grace": rules.grace,
            "codec": rules.codec,
            "op": rules.op,
            "members": [
                {
                    "id": who,
                    "name": member.info.name,
                    "host": member.info.host,
                    "pid": member.info.pid,
                    "parts": list(member.parts),
                }
                for who, member in self.members.items()
            ],
            "parts": [self._part_status(name, rounds) for name, rounds in self.parts.items()],
        }

    def _part_status(self, name: str, rounds: Rounds) -> dict[str, Any]:
        part = rounds.part
        moving = part.moving

        def names(ids: Iterable[str]) -> list[str]:
            return [self.name_of(one) for one in ids]

        return {
            "part": name,
            "round": part.round,
            "grace": part.grace,
            "state": "open" if moving is None else "moving",
            "contributed": names(part.offers if moving is None else moving.remaining),
            "missing": names(() if moving else sorted(part.present - part.offers.keys())),
            "late": {
                name: (seen.outcome.round, by)
                for seen in rounds.seen.values()
                if seen.outcome is not None
                for name, by in seen.late.items()
            },
            "rounds": [
                {
                    "round": seen.outcome.round,
                    "seconds": seen.recorded - seen.opened,
                    "contributors": list(seen.outcome.names),
                    "weights": list(seen.outcome.weights),
                    "late": dict(seen.late),
                }
                for seen in rounds.seen.values()
                if seen.outcome is not None and seen.recorded is not None
            ],
        }


def decision_of(room: Room, name: str, decided: Decided) -> AverageDecision:
    """The message that says what was decided on a round of a part."""
    members = list(decided.offers)
    return AverageDecision(
        name,
        decided.round,
        decided.parent,
        decided.begun,
        decided.attempt,
        tuple(room.infos[one] for one in members),
        tuple(decided.offers[one].weight for one in members),
        tuple(decided.offers[one].call for one in members),
        tuple(members.index(one) for one in decided.remaining),
    )


def moving_of(decision: AverageDecision) -> Moving:
    """The round that a decision is about."""
    ids = [info.id for info in decision.members]
    offers = {
        one: Contribution(call, weight, decision.before)
        for one, call, weight in zip(ids, decision.calls, decision.weights, strict=True)
    }
    remaining = [ids[rank] for rank in decision.remaining]
    return Moving(
        decision.round, decision.parent, decision.begun, decision.attempt, offers, remaining
    )
