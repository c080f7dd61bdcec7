"""Control messages of recovery: votes of ranks that go on after a loss, and what comes of them."""

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
    MemberInfo,
    Message,
    NonEmptyName,
    OptionalSize,
    Ranks,
    Text,
    View,
)

MAX_BALLOTS = 256
"""Most ballots that one member may have under way."""

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

    `members`: the ids of all who vote (empty: all members of the sender's group). `least` and
    `most` are for a rendezvous. Replies, once all living voters have voted: for an agreement, and
    where the context is not the coordinator's group itself, Verdict; else NextView, or the View of
    the next epoch. Void where it was given up, or voters voted on different things.
    """

    context: ContextId
    number: Number
    purpose: Annotated[Purpose, schema.one_of(Purpose)]
    flag: Annotated[bool, schema.flag] = True
    members: Ids = ()
    least: OptionalSize = None
    most: OptionalSize = None

    @property
    def call(self) -> str:
        """What was called, in words: the same of all voters."""
        if self.purpose is Purpose.RENDEZVOUS:
            return f"rendezvous(min_size={self.least}, max_size={self.most})"
        return f"{self.purpose}()"


class GiveUpVote(Message, code=51):
    """Makes the ballot void, if it is not decided yet. No reply but that to the vote."""

    context: ContextId
    number: Number
    cause: Annotated[Cause, schema.one_of(Cause)]
    text: Text = ""


class BallotResult(Message, code=52):
    """The answer to Vote where the ballot is decided: the AND of the flags of all who are alive. Of
    a shrink also `members`, who are alive, in the order of the vote, and `epoch`, the next of the
    group's name; of an agreement none, and that of the group."""

    flag: Annotated[bool, schema.flag]
    members: Ids
    epoch: Epoch


class NextView(Message, code=57, rows="joined"):
    """The answer to Vote where it began the next epoch, for those who were in the one before: what
    is not as it was in their view, which has the digest `before`.

    `gone`: the ranks that are not in it any more. The others keep their order, and `joined` come
    behind them. A view of thousands is long, and all of them need the next one as soon as one of
    them is lost. `digest`: that of the next view, so that no mistake stays unnoticed.
    """

    before: Annotated[bytes, schema.blob(16)]
    epoch: Epoch
    digest: Annotated[bytes, schema.blob(16)]
    gone: Ranks
    joined: Annotated[
        tuple[MemberInfo, ...], schema.sequence(schema.struct(MemberInfo), MAX_MEMBERS)
    ]

    @staticmethod
    def between(before: View, after: View) -> NextView:
        """What leads from one view to the one that comes after it."""
        ids = after.ranks
        gone = tuple([one.rank for one in before.members if one.id not in ids])
        joined = after.members[len(before.members) - len(gone) :]
        return NextView(before.digest, after.epoch, after.digest, gone, joined)

    def after(self, before: View) -> View:
        """The whole view. Raises ValueError where it does not come after `before`.

        Members that share a process share both views and this message (`decode_message`), so they
        share the work, too: for each of thousands, it would be that of thousands.
        """
        # Other members of this process find this very change as long as it lives (`codec` shares
        # it), and in it the view that the first of them has made. So it lives as long as anybody
        # has that view, and keeps no view itself::
        #
        #     member ──> view ──_made_by──> change     strong
        #     change ──_made──> before, view           weak
        known_before, known = self.__dict__.get("_made", (_nothing, _nothing))
        made: View | None = known()
        if made is not None and known_before() is before:
            return made
        if before.digest != self.before:
            raise ValueError(f"a change of another view than that of epoch {before.epoch}")
        gone = {*self.gone}
        stay = [member for member in before.members if member.rank not in gone]
        ranked = [replace(member, rank=rank) for rank, member in enumerate(stay)]
        view = View(before.group, self.epoch, (*ranked, *self.joined))
        if view.digest != self.digest:
            raise ValueError(f"a change of the view of epoch {before.epoch} that makes no sense")
        # As long as somebody has the view, this message is the one that the others decode.
        view.__dict__["_made_by"] = self
        self.__dict__["_made"] = weakref.ref(before), weakref.ref(view)
        return view


def _nothing() -> None:
    """What has not been made yet."""


class Void(Message, code=53):
    """The answer to Vote where the ballot is not decided, and never will be. `by`: the id of the
    member because of whom. `details`, by member id: who is missing, or what each called."""

    cause: Annotated[Cause, schema.one_of(Cause)]
    text: Text
    by: NonEmptyName
    details: Annotated[Mapping[str, Any], schema.tree(None)] = field(default_factory=dict)


class Heard(schema.Struct):
    """What came of a ballot, as a member was told."""

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
    No reply; the coordinator rules who of the two is lost. `ended`: the process of that member has
    ended, so that there is nothing to weigh."""

    id: NonEmptyName
    reason: Text
    ended: Annotated[bool, schema.flag] = False
