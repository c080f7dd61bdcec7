"""The data of one averager in the coordinator: its members, and the rounds of its parts.

`aiodist.membership.averaging` works on this data.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from aiodist.membership.group import GroupKey
from aiodist.membership.rounds import Owed, PartRounds
from aiodist.wire.averaging import Outcome, Reached, Rules
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
    results."""

    part: PartRounds
    form: bytes = b""
    text: str = ""
    outcomes: OrderedDict[int, tuple[Outcome, list[str]]] = field(default_factory=OrderedDict)
    seen: OrderedDict[int, SeenRound] = field(default_factory=OrderedDict)
    opened: float = 0.0  # the time of the first contribution to the open round


@dataclass(frozen=True, slots=True)
class Loan:
    """A transfer from one member to another: the result of a round of `part`, or (None) the
    state."""

    part: str | None
    round: int
    source: str
    target: str


@dataclass(slots=True)
class AveragerMember:
    """A member. `group`: the key of its group of one. `reached`: by part, the last result that it
    has told of."""

    group: GroupKey
    info: MemberInfo
    parts: tuple[str, ...]
    keep: int
    reached: dict[str, Reached] = field(default_factory=dict)
    wants_state: bool = False

    def has_reached(self, each: tuple[Reached | None, ...]) -> None:
        """These are its last results in each of its parts."""
        for part, one in zip(self.parts, each, strict=False):
            if one is not None:
                self.reached[part] = one


@dataclass(slots=True)
class Room:
    """One averager.

    `infos`: all members that a decision may name, including those that are gone. `unpaid`: by part
    and member, the results that a member needs and no other member has brought back so far, each
    with the call that asked for it. `gone`: the ids of members that others were told are gone,
    before the coordinator lost its memory. `is_restored`: members have brought what it had
    lost. `patient_until`: until then, more of them may come back.
    """

    name: str
    run_id: str
    rules: Rules
    members: dict[str, AveragerMember] = field(default_factory=dict)
    infos: dict[str, MemberInfo] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)
    parts: dict[str, Rounds] = field(default_factory=dict)
    loans: dict[bytes, Loan] = field(default_factory=dict)
    unpaid: dict[tuple[str, str], tuple[Owed, int]] = field(default_factory=dict)
    gone: dict[str, None] = field(default_factory=dict)
    elected: str = ""  # the member that provides the state
    has_state: bool = False
    reached: int = 0  # the sum of the rounds that this state is of
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

    def number(self, member: str, info: MemberInfo) -> None:
        self.infos[member] = info
        self.order.setdefault(member, len(self.order))

    def remember(self, outcome: Outcome, holders: list[str]) -> None:
        rounds = self.rounds(outcome.part)
        rounds.outcomes[outcome.round] = (outcome, holders)
        digests = rounds.part.digests
        digests[outcome.round] = outcome.digest
        digests[outcome.round - 1] = outcome.parent
        while len(rounds.outcomes) > max(1, self.keep):
            del rounds.outcomes[min(rounds.outcomes)]
        for older in [one for one in digests if one < min(rounds.outcomes) - 1]:
            del digests[older]

    def is_behind(self, who: str) -> bool:
        """Whether a member has missed too many rounds, or is of another history."""
        member = self.members[who]
        for name, reached in member.reached.items():
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
