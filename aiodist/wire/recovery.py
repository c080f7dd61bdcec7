"""Control messages of recovery: votes of ranks that go on after a loss, and their outcomes."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any

from aiodist.wire import schema
from aiodist.wire.limits import MAX_MEMBERS, MAX_NAME
from aiodist.wire.messages import (
    Epoch,
    EpochView,
    MemberInfo,
    Message,
    NonEmptyName,
    OptionalSize,
    Ranks,
    Text,
)

MAX_BALLOTS = 256
"""The most ballots that one member may have under way."""

Ids = Annotated[tuple[str, ...], schema.sequence(schema.text(MAX_NAME, 1), MAX_MEMBERS)]
ContextId = Annotated[bytes, schema.blob(8)]
Number = Annotated[int, schema.integer(0, 2**62)]


class Purpose(enum.StrEnum):
    """What a ballot decides."""

    AGREE = "agree"
    SHRINK = "shrink"
    RENDEZVOUS = "rendezvous"


class Cause(enum.StrEnum):
    """Why a ballot is void. The values are reasons of `aiodist.engine.failures.Verdict`."""

    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    MISMATCH = "mismatch"


class Vote(Message, code=50):
    """A vote in the ballot `number` of `context`: a group in one epoch, or one made of it.

    `members` are the ids of all voters (empty: all members of the sender's group). `least` and
    `most` are for a rendezvous. The reply comes once all living voters have voted. It is
    BallotResult for an agreement, and for a context that is not the coordinator's group itself.
    Otherwise it is NextView, or the EpochView of the next epoch. It is Void if the ballot was given
    up, if voters voted on different things, or if a voter refuses. `refusal` says what is wrong
    with the arguments of its call.
    """

    context: ContextId
    number: Number
    purpose: Annotated[Purpose, schema.one_of(Purpose)]
    flag: Annotated[bool, schema.flag] = True
    members: Ids = ()
    least: OptionalSize = None
    most: OptionalSize = None
    refusal: Text = ""

    @property
    def call(self) -> str:
        """What was called, in words. It must be the same for all voters."""
        if self.purpose is Purpose.RENDEZVOUS:
            return f"rendezvous(min_size={self.least}, max_size={self.most})"
        return f"{self.purpose}()"


class GiveUpVote(Message, code=51):
    """Makes the ballot void, if it is not decided yet. The only reply is that to the vote."""

    context: ContextId
    number: Number
    cause: Annotated[Cause, schema.one_of(Cause)]
    text: Text = ""


class BallotResult(Message, code=52):
    """The answer to Vote if the ballot is decided: the AND of the flags of all living voters.

    After a shrink, `members` are the living voters in the order of the vote, and `epoch` is the
    next one of the group's name. After an agreement `members` is empty, and `epoch` is the group's.
    """

    flag: Annotated[bool, schema.flag]
    members: Ids
    epoch: Epoch


class NextView(Message, code=57, rows="joined"):
    """The answer to Vote if it began the next epoch: what differs from the view with digest
    `before`.

    It is for members of that view. `gone` are ranks that are no longer members. The others keep
    their order, and `joined` come behind them. Only the change is sent, because a view of thousands
    is long, and all of them need the next one as soon as one is lost. `digest` is that of the next
    view, so that no mistake stays unnoticed.
    """

    before: Annotated[bytes, schema.blob(16)]
    epoch: Epoch
    digest: Annotated[bytes, schema.blob(16)]
    gone: Ranks
    joined: Annotated[
        tuple[MemberInfo, ...], schema.sequence(schema.struct(MemberInfo), MAX_MEMBERS)
    ]

    @staticmethod
    def between(before: EpochView, after: EpochView) -> NextView:
        """Make the change that leads from one view to the next."""
        ids = after.ranks
        gone = tuple([one.rank for one in before.members if one.id not in ids])
        joined = after.members[len(before.members) - len(gone) :]
        return NextView(before.digest, after.epoch, after.digest, gone, joined)

    def after(self, before: EpochView) -> EpochView:
        """Return the whole next view. Raises ValueError if the change does not fit `before`.

        Members in one process share both views and this message (`decode_message`), so they share
        the work, too. Otherwise thousands of them would each do the work for thousands.
        """
        # Other members of this process find this change object while it lives (`codec` shares it),
        # and in it the view that the first of them has made. It lives as long as that view, and
        # keeps no view alive::
        #
        #     member ──> view ──_made_by──> change     strong
        #     change ──_made──> before, view           weak
        known_before, known = self.__dict__.get("_made", (_nothing, _nothing))
        made: EpochView | None = known()
        if made is not None and known_before() is before:
            return made
        if before.digest != self.before:
            raise ValueError(f"a change of another view than that of epoch {before.epoch}")
        gone = {*self.gone}
        stay = [member for member in before.members if member.rank not in gone]
        ranked = [replace(member, rank=rank) for rank, member in enumerate(stay)]
        view = EpochView(before.group, self.epoch, (*ranked, *self.joined))
        if view.digest != self.digest:
            raise ValueError(f"a change of the view of epoch {before.epoch} that makes no sense")
        # Keeps this message alive with the view, so that others decode to it.
        view.__dict__["_made_by"] = self
        self.__dict__["_made"] = weakref.ref(before), weakref.ref(view)
        return view


def _nothing() -> None:
    """Stands for a view that is not made yet."""


class Void(Message, code=53):
    """The answer to Vote if the ballot is not decided and never will be.

    `by` is the id of the member that caused it. `details` tell, by member id, which are missing, or
    what each called.
    """

    cause: Annotated[Cause, schema.one_of(Cause)]
    text: Text
    by: NonEmptyName
    details: Annotated[Mapping[str, Any], schema.tree(None)] = field(default_factory=dict)


class Heard(schema.Struct):
    """The outcome of a ballot, as a member was told."""

    context: ContextId
    number: Number
    verdict: Annotated[BallotResult | None, schema.optional(schema.struct(BallotResult))] = None
    void: Annotated[Void | None, schema.optional(schema.struct(Void))] = None

    @property
    def outcome(self) -> BallotResult | Void | None:
        return self.verdict or self.void


class WatchWaiting(Message, code=54):
    """Asks how many joiners wait for the next rendezvous. Replies: Waiting at once, and again for
    every change, until StoreCancel."""


class Waiting(Message, code=55):
    """The answer to WatchWaiting: how many joiners wait for the next rendezvous."""

    count: Annotated[int, schema.integer(0, MAX_MEMBERS)]


class Unreachable(Message, code=56):
    """Says that the sender's link to member `id` of its group broke, and could not be made again.

    No reply. The coordinator rules which of the two is lost. `ended`: the process of that member
    has ended, so that there is nothing to weigh.
    """

    id: NonEmptyName
    reason: Text
    ended: Annotated[bool, schema.flag] = False
