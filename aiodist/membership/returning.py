"""Whether a member may come back: to a coordinator that was away, or over a new connection."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from aiodist.membership.group import GroupState
from aiodist.wire.messages import EpochView
from aiodist.wire.returning import Rejoin


class HowToReturn(enum.Enum):
    """What to do with a claim to be a member."""

    TAKE_SEAT = enum.auto()
    """The claimant is a member of the view that is known here, which may be newer than its own."""

    RESTORE = enum.auto()
    """The view of the claim is newer than what is known here, and replaces it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The claimant is no longer a member, for this reason."""

    reason: str


def judge(group: GroupState | None, ended: int | None, claim: Rejoin) -> HowToReturn | Refused:
    """Judge `claim`. `group`: the group of that name and run; `ended`: the last epoch of an earlier
    one that ended (None: there was none).

    The higher epoch wins. A claim with a lower epoch missed that the group went on, with or without
    the claimant.
    """
    # The epoch decides, not the order or number of claims. An epoch begins only if all living
    # members have voted for it, or none of the epoch before is left. So the higher epoch has the
    # consent of all. One coordinator never makes two views of one epoch. If two coordinators did,
    # the first claim wins, because nothing tells the views apart.
    if group is None or group.view is None:
        if ended is not None and claim.epoch <= ended:
            return Refused(f"its group ended with epoch {ended}")
        return HowToReturn.RESTORE
    view = group.view
    if claim.epoch > view.epoch:
        return HowToReturn.RESTORE
    if claim.epoch < view.epoch and group.place_of(claim.ask.id) is not None:
        return HowToReturn.TAKE_SEAT
    if claim.epoch < view.epoch:
        return Refused(
            group.removed.get(claim.ask.id, f"it is of epoch {claim.epoch}")
            + f", and the group has gone on to epoch {view.epoch}"
        )
    if claim.digest != view.digest or not _is(view, claim):
        return Refused(
            f"epoch {view.epoch} has other members here: two coordinators have served this group"
        )
    if claim.rank in group.lost:
        return Refused(f"it was ruled lost: {group.lost[claim.rank]}")
    if claim.rank in group.left:
        return Refused("it had left")
    return HowToReturn.TAKE_SEAT


def check_view(claim: Rejoin, view: EpochView) -> str | None:
    """Say what is wrong with the view of a claim; None if nothing is."""
    if (view.group, view.epoch, view.digest) != (claim.ask.group, claim.epoch, claim.digest):
        return "the view is not the one that was announced"
    if [member.rank for member in view.members] != list(range(len(view.members))):
        return "the members of a view are sorted by rank, from 0"
    if len({member.id for member in view.members}) != len(view.members):
        return "a view has a member id twice"
    return None if _is(view, claim) else f"rank {claim.rank} of the view is another member"


def _is(view: EpochView, claim: Rejoin) -> bool:
    return claim.rank < len(view.members) and view.members[claim.rank].id == claim.ask.id
