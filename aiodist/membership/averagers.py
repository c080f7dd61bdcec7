"""An averager, as the coordinator knows it: its members, and the rounds of its parts.

What is done with these is in `aiodist.membership.averaging`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from aiodist.membership.group import GroupKey
from aiodist.membership.rounds import Part
from aiodist.wire.averaging import Outcome, Rules
from aiodist.wire.messages import MemberInfo

SHOWN = 32
"""The number of recorded rounds that `status` shows of each part."""


@dataclass(slots=True)
class Seen:
    """A round for `status`: when its first contribution came, when it was decided and recorded; and
    the names of members that were late, with the seconds by which they were."""

    opened: float
    decided: float
    recorded: float | None = None
    outcome: Outcome | None = None
    late: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Rounds:
    """One part: its rounds, the form of its values, and which members hold which results."""

    part: Part
    form: bytes = b""
    text: str = ""
    outcomes: OrderedDict[int, tuple[Outcome, list[str]]] = field(default_factory=OrderedDict)
    seen: OrderedDict[int, Seen] = field(default_factory=OrderedDict)
    opened: float = 0.0  # when the first contribution of the open round came


@dataclass(frozen=True, slots=True)
class Loan:
    """What one member gives another: the result of a round of `part`, or (None) the state."""

    part: str | None
    round: int
    source: str
    target: str


@dataclass(slots=True)
class Member:
    """A member: its group of one has the key `group`."""

    group: GroupKey
    info: MemberInfo
    parts: tuple[str, ...]
    keep: int
    wants_state: bool = False


@dataclass(slots=True)
class Room:
    """One averager. `infos`: of all members that a decision may name, also those that are gone."""

    name: str
    run_id: str
    rules: Rules
    members: dict[str, Member] = field(default_factory=dict)
    infos: dict[str, MemberInfo] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)
    parts: dict[str, Rounds] = field(default_factory=dict)
    loans: dict[bytes, Loan] = field(default_factory=dict)
    elected: str = ""  # the member that gives the state
    has_state: bool = False
    lent: int = 0  # how many loans there were
    patient_until: float | None = None

    @property
    def key(self) -> GroupKey:
        return self.name, self.run_id

    @property
    def keep(self) -> int:
        """How many results members keep for others."""
        return max((member.keep for member in self.members.values()), default=0)

    @property
    def any_group(self) -> GroupKey:
        """The group of one of any member."""
        return next(iter(self.members.values())).group

    def name_of(self, member: str) -> str:
        return self.infos[member].name

    def rounds(self, part: str) -> Rounds:
        found = self.parts.get(part)
        if found is None:
            found = self.parts[part] = Rounds(Part(self.rules.quorum, self.rules.grace))
            found.part.patient_until = self.patient_until
            for who, member in self.members.items():
                if part in member.parts:
                    found.part.enter(who)
        return found

    def number(self, member: str, info: MemberInfo) -> None:
        self.infos[member] = info
        self.order.setdefault(member, len(self.order))

    def remember(self, outcome: Outcome, holders: list[str]) -> None:
        """A round is recorded."""
        known = self.rounds(outcome.part).outcomes
        known[outcome.round] = (outcome, holders)
        while len(known) > max(1, self.keep):
            known.popitem(last=False)

    def status(self) -> dict[str, Any]:
        """Plain data: "name" and "run_id"; the rules: "quorum", "grace" (None: "auto"), "codec" and
        "op"; "members", each with "id", "name", "host", "pid" and "parts"; and "parts".

        Each part has its name, "part"; "round", the last one that is recorded; "grace" in seconds;
        its "state", "open" or "moving"; the names of members that have "contributed" to the present
        round, and of those that are "missing"; and its last "rounds". Each of these has "round";
        "seconds" from the first contribution to the record; "contributors" and their "weights"; and
        "late", the seconds by which members were late, by name.
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
