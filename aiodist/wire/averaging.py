"""Control messages of averagers: what a member says of its rounds to the coordinator, and hears.

Each member is a group of one (`own_group`), so that its lease, its return and its loss are those of
any group. What it is told comes unasked, because a decision is for many and comes at any time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from itertools import chain, zip_longest
from typing import Annotated

from aiodist.wire import schema
from aiodist.wire.limits import MAX_BODY, MAX_MEMBERS, MAX_NAME
from aiodist.wire.messages import MemberInfo, Message, Name, Ranks, Text

MAX_PARTS = 4096
"""Most parts that a member takes part in."""

MAX_OUTCOMES = 32 * MAX_PARTS
"""Most rounds whose results a member names."""

MAX_KEEP = 2**31
"""Most rounds that a member may miss."""

LONGEST = 128
"""Most characters of the name of an averager."""

_OWN = re.compile(r"averager (?P<averager>.+)/(?P<who>[0-9a-f]{24})", re.DOTALL)

Round = Annotated[int, schema.integer(0, 2**62)]
Weight = Annotated[float, schema.expect("a weight", lambda v: type(v) is float and v >= 0)]
Weights = Annotated[
    tuple[float, ...],
    schema.sequence(schema.expect("a weight", lambda v: type(v) is float), MAX_MEMBERS),
]
Names = Annotated[tuple[str, ...], schema.sequence(schema.text(MAX_NAME), MAX_MEMBERS)]
Infos = Annotated[tuple[MemberInfo, ...], schema.sequence(schema.struct(MemberInfo), MAX_MEMBERS)]
Ticket = Annotated[bytes, schema.blob(16)]
Form = Annotated[bytes, schema.blob(32)]
Digest = Annotated[bytes, schema.blob(8)]


def own_group(averager: str, who: str) -> str:
    """The group of one that a member of an averager is."""
    return f"averager {averager}/{who}"


def shared_group(averager: str) -> str:
    """The name by which members of an averager show each other that they are of it."""
    return f"averager {averager}"


def averager_of(group: str) -> str:
    """The averager that a group of one is a member of; "": of none."""
    found = _OWN.fullmatch(group)
    return "" if found is None else found["averager"]


class Rules(schema.Struct):
    """What all members of an averager must agree on. `grace`: seconds; None: "auto"."""

    quorum: Annotated[int, schema.integer(1, MAX_MEMBERS)]
    grace: Annotated[float | None, schema.optional(schema.seconds(0.0))]
    op: Name
    codec: Name

    def __str__(self) -> str:
        grace = "'auto'" if self.grace is None else f"{self.grace:g}"
        return f"quorum={self.quorum}, grace={grace}, op={self.op}, codec={self.codec or 'None'}"


class Reached(schema.Struct):
    """The round of a member's last result, and its digest: see `aiodist.membership.rounds`."""

    round: Round
    digest: Digest


_REACHED = schema.optional(schema.struct(Reached))
EachReached = Annotated[tuple[Reached, ...], schema.sequence(schema.struct(Reached), MAX_PARTS)]
OptionalState = Annotated[
    tuple[Reached, ...] | None,
    schema.optional(schema.sequence(schema.struct(Reached), MAX_PARTS)),
]


class Outcome(schema.Struct):
    """A round that is recorded: the digest of the one before and its own, and which members
    contributed, by id and name, with their weights."""

    part: Name
    round: Round
    parent: Digest
    digest: Digest
    ids: Names
    names: Names
    weights: Weights

    @property
    def reached(self) -> Reached:
        return Reached(self.round, self.digest)

    @property
    def before(self) -> Reached:
        return Reached(self.round - 1, self.parent)


class AverageDecision(Message, code=81):
    """Tells the members of a round who they are, in order, and which of them remain. `parent`: the
    digest of the round before. `begun`: the attempt of the first decision, `attempt`: that of this
    one. It counts up over all rounds."""

    part: Name
    round: Round
    parent: Digest
    begun: Round
    attempt: Round
    members: Infos
    weights: Weights
    calls: Annotated[tuple[int, ...], schema.sequence(schema.integer(0, 2**62), MAX_MEMBERS)]
    remaining: Ranks

    @property
    def before(self) -> Reached:
        return Reached(self.round - 1, self.parent)


class AverageEnter(Message, code=80):
    """Takes part in the averager that the sender's group of one is named after. Reply:
    AverageEntered, or Failed. A member says it again to a coordinator that is back.

    `keep`: how many rounds it may miss (`max_stale`). `reached`: its last result in each of
    `parts`. `state`: what the state is of that it has for others: see AverageElect. For a
    coordinator that lost its memory, `outcomes` has the last rounds whose results it holds.
    `decisions` has that of each part that it knows to be moving, and `gone` the ids of members that
    it was told are gone.
    """

    rules: Annotated[Rules, schema.struct(Rules)]
    parts: Annotated[tuple[str, ...], schema.sequence(schema.text(MAX_NAME), MAX_PARTS)]
    keep: Annotated[int, schema.integer(0, MAX_KEEP)]
    reached: Annotated[tuple[Reached | None, ...], schema.sequence(_REACHED, MAX_PARTS)]
    state: OptionalState = None
    outcomes: Annotated[
        tuple[Outcome, ...], schema.sequence(schema.struct(Outcome), MAX_OUTCOMES)
    ] = ()
    decisions: Annotated[
        tuple[AverageDecision, ...], schema.sequence(schema.struct(AverageDecision), MAX_PARTS)
    ] = ()
    gone: Names = ()

    def telling(self, outcomes: Iterable[Sequence[Outcome]]) -> AverageEnter:
        """Return this message with the newest of the `outcomes` of each part, as many as fit."""
        told: list[Outcome] = []
        room = MAX_BODY - len(schema.pack(self)) - 4  # their number takes 5 bytes instead of 1
        for one in chain.from_iterable(zip_longest(*map(reversed, outcomes))):
            if one is not None:
                room -= len(schema.pack(one))
                if room < 0:
                    break
                told.append(one)
        return replace(self, outcomes=tuple(told))


class AverageEntered(Message, code=82):
    """The answer to AverageEnter. `keep`: the results of so many last rounds are to be kept."""

    keep: Annotated[int, schema.integer(0, MAX_KEEP)]


class AverageOffer(Message, code=83):
    """Offers a contribution. `after`: the sender's last result in that part. `form`: a digest of
    the shapes and dtypes, which `text` shows. No reply, but what is told."""

    part: Name
    call: Round
    after: Annotated[Reached | None, _REACHED]
    weight: Weight
    form: Form
    text: Text


class AverageWithdraw(Message, code=84):
    """Gives a call up. Reply: AverageWithdrawn."""

    part: Name
    call: Round


class AverageWithdrawn(Message, code=85):
    """The answer to AverageWithdraw. `decided`: it is too late, and the contribution may count.
    `present`: how many members take part; `missing`: the names of those that have not
    contributed while the call waited."""

    decided: Annotated[bool, schema.flag]
    present: Annotated[int, schema.integer(0, MAX_MEMBERS)]
    missing: Names


class AverageProgress(Message, code=86):
    """Says from which members, by their place in the decision, the sender has contributions for the
    slices that it reduces, and means. No reply."""

    part: Name
    round: Round
    attempt: Round
    contributions: Ranks
    means: Ranks


class AverageLacks(Message, code=98):
    """Says that nothing is left of the call that a decision names. No reply."""

    part: Name
    round: Round
    attempt: Round


class AverageDone(Message, code=87):
    """Tells members that follow a decision about a round that it is recorded. Those that do not
    hold its result offer their contributions again. `keep`: see AverageEntered."""

    outcome: Annotated[Outcome, schema.struct(Outcome)]
    keep: Annotated[int, schema.integer(0, MAX_KEEP)]


class AverageReopened(Message, code=88):
    """Tells members that follow a decision about a round, or wait for its result, that it holds no
    longer. They offer their contributions again."""

    part: Name
    round: Round


class AverageRefused(Message, code=89):
    """Tells a member that its call fails: its values do not fit, or it needs the state of another
    one, because others are at the round `stale`."""

    part: Name
    call: Round
    text: Text
    stale: Annotated[int | None, schema.optional(schema.integer(0, 2**62))] = None


class AverageFetch(Message, code=90):
    """Names the member that has the result of a round that the receiver was not in.

    If `part` is None, that member has the state. The two meet by `ticket`.
    """

    part: Annotated[str | None, schema.optional(schema.text(MAX_NAME))]
    source: Annotated[MemberInfo, schema.struct(MemberInfo)]
    ticket: Ticket
    outcome: Annotated[Outcome | None, schema.optional(schema.struct(Outcome))] = None


class AverageServe(Message, code=91):
    """Tells a member to give `target` the result of a round, or, if `part` is None, the state."""

    part: Annotated[str | None, schema.optional(schema.text(MAX_NAME))]
    round: Round
    target: Annotated[MemberInfo, schema.struct(MemberInfo)]
    ticket: Ticket


class AverageFetched(Message, code=92):
    """Says that the sender has what `ticket` was for. Or it says (`failed`) that it could not get
    it, or could not give it, so another source is needed. No reply."""

    ticket: Ticket
    failed: Annotated[bool, schema.flag] = False


class AverageElect(Message, code=93):
    """Asks to keep a copy of the state for others. `state`: the last result that it has of each
    part of the sender, or the round 0. Reply: AverageElected."""

    state: EachReached


class AverageElected(Message, code=94):
    """The answer to AverageElect: whether the sender is that member."""

    elected: Annotated[bool, schema.flag]


class AverageStateKept(Message, code=95):
    """Says that the sender has a state for others (see AverageElect), or none any more. No
    reply."""

    state: OptionalState


class AverageWantState(Message, code=96):
    """Asks for the state (`wanted`), or not any more. No reply but AverageFetch, once there is a
    state."""

    wanted: Annotated[bool, schema.flag] = field(default=True)


class AverageGone(Message, code=97):
    """Tells the other members that these are gone."""

    ids: Names


AveragingRequest = (
    AverageEnter
    | AverageOffer
    | AverageWithdraw
    | AverageProgress
    | AverageLacks
    | AverageFetched
    | AverageElect
    | AverageStateKept
    | AverageWantState
)
"""What members say."""

AveragingNews = (
    AverageDecision
    | AverageDone
    | AverageReopened
    | AverageRefused
    | AverageFetch
    | AverageServe
    | AverageGone
)
"""What members are told unasked."""
