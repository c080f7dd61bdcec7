"""Whether a member may come back: to a coordinator that was away, or over a new connection."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from aiodist.membership.group import Group
from aiodist.wire.messages import View
from aiodist.wire.returning import Rejoin


class Way(enum.Enum):
    """What a claim to be a member leads to."""

    TAKE_SEAT = enum.auto()
    """The claim is of a member of the view that is known here, which may be later than its own."""

    RESTORE = enum.auto()
    """The view of the claim is newer than what is known here: it becomes the group's."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Who claims to be a member is none any more, and the reason."""

    reason: str


def judge(group: Group | None, ended: int | None, claim: Rejoin) -> Way | Refused:
    """What becomes of `claim`, given what is known: the group of that name and run, and the last
    epoch of the one before it that ended (None: of none).

    The higher epoch wins: who says the lower one missed that the group went on, with it or without
    it.
    """
    # The epoch decides, and not who comes first, or how many: an epoch begins only when all who
    # live have voted for it, or none of the one before is left. So the higher one has the consent
    # of all who matter, and a lower one is the past. Two views of one epoch cannot come of one
    # coordinator; here the first to come is right, as there is nothing to tell them apart by.
    if group is None or group.view is None:
        if ended is not None and claim.epoch <= ended:
            return Refused(f"its group ended with epoch {ended}")
        return Way.RESTORE
    view = group.view
    if claim.epoch > view.epoch:
        return Way.RESTORE
    if claim.epoch < view.epoch and group.place_of(claim.ask.id) is not None:
        return Way.TAKE_SEAT
    if claim.epoch < view.epoch:
        return Refused(
            f"it is of epoch {claim.epoch}, and the group has gone on to epoch {view.epoch}"
        )
    if claim.digest != view.digest or not _is(view, claim):
        return Refused(
            f"epoch {view.epoch} has other members here: two coordinators have served this group"
        )
    if claim.rank in group.lost:
        return Refused(f"it was ruled lost: {group.lost[claim.rank]}")
    if claim.rank in group.left:
        return Refused("it had left")
    return Way.TAKE_SEAT


def check_view(claim: Rejoin, view: View) -> str | None:
    """What is wrong with the view of a claim; None: nothing."""
    if (view.group, view.epoch, view.digest) != (claim.ask.group, claim.epoch, claim.digest):
        return "the view is not the one that was announced"
    if [member.rank for member in view.members] != list(range(len(view.members))):
        return "the members of a view are sorted by rank, from 0"
    if len({member.id for member in view.members}) != len(view.members):
        return "a view has a member id twice"
    return None if _is(view, claim) else f"rank {claim.rank} of the view is another member"


def _is(view: View, claim: Rejoin) -> bool:
    return claim.rank < len(view.members) and view.members[claim.rank].id == claim.ask.id
