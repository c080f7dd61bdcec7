"""What a member knows of its membership, to tell a coordinator that comes back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from aiodist.control.dial import ForeignServiceError
from aiodist.errors import ProtocolError
from aiodist.wire.limits import MAX_MEMBERS
from aiodist.wire.messages import EpochView, JoinRequest, Message, Welcome
from aiodist.wire.recovery import BallotResult, Heard, NextView, Void, Vote
from aiodist.wire.returning import MAX_HEARD, Rejoin


class Standing:
    """A membership, over all of its epochs. `view` is that of the newest."""

    def __init__(self, ask: JoinRequest, view: EpochView) -> None:
        self._ask = ask
        self._heard: OrderedDict[tuple[bytes, int], BallotResult | Void] = OrderedDict()
        self.take(view)

    def take(self, view: EpochView) -> None:
        """Take in a newer view. Raises ProtocolError if this member is not in it."""
        try:
            self.rank = view.ranks[self._ask.id]
        except KeyError:
            raise ProtocolError("a view without this member") from None
        self.view = view
        self._lost: set[int] = set()
        self._left: set[int] = set()

    def after(self, change: NextView) -> EpochView:
        """Return the view after this one. Raises ProtocolError if `change` does not fit."""
        try:
            return change.after(self.view)
        except ValueError as error:
            raise ProtocolError(f"the coordinator sends {error}") from None

    def news(self, epoch: int, ranks: tuple[int, ...], *, lost: bool) -> tuple[int, ...]:
        """Note that `ranks` are gone. Returns those of them that are news."""
        if epoch != self.view.epoch:
            return ranks
        # A loss may be told twice: by the coordinator that saw it, and by its successor, which
        # tells all ranks that are gone. The rank must hear of it once.
        news = {*ranks} - self._lost - self._left
        (self._lost if lost else self._left).update(news)
        return tuple(sorted(news))

    def hears(self, vote: Message | None, reply: Message) -> None:
        """Note the outcome of a vote."""
        if isinstance(vote, Vote) and isinstance(reply, (BallotResult, Void)):
            self._heard[vote.context, vote.number] = reply
            if len(self._heard) > MAX_HEARD:
                self._heard.popitem(last=False)

    def claim(self, *, with_view: bool) -> Rejoin:
        """Return what this member tells a coordinator of itself."""
        return Rejoin(
            self._ask,
            self.rank,
            self.view.epoch,
            self.view.digest,
            tuple(sorted(self._lost)),
            tuple(sorted(self._left)),
            self.view if with_view else None,
            tuple(_newest(self._heard.items())),
        )


def _newest(heard: Iterable[tuple[tuple[bytes, int], BallotResult | Void]]) -> list[Heard]:
    """Return the newest outcomes, with no more ids in all than a view may have members."""
    told: list[Heard] = []
    ids = 0
    for (context, number), outcome in reversed(list(heard)):
        if isinstance(outcome, BallotResult):
            ids += len(outcome.members)
            one = Heard(context, number, verdict=outcome)
        else:
            ids += len(outcome.details)
            one = Heard(context, number, void=outcome)
        if ids > MAX_MEMBERS:
            break
        told.insert(0, one)
    return told


def check_successor(address: str, before: Welcome, welcome: Welcome) -> bool:
    """Tell whether a coordinator has the state of the one before.

    It has if it is the same one, or was started from its state file. Raises ForeignServiceError for
    a coordinator that cannot have taken its place.
    """
    if welcome.coordinator == before.coordinator:
        if welcome.incarnation >= before.incarnation:
            return True
        what = f"a stale one, its start {welcome.incarnation} of {before.incarnation}"
    elif welcome.incarnation == 1:
        return False
    else:
        what = "a foreign one, with a state file of its own"
    raise ForeignServiceError(
        f"the coordinator at {address} is {what}: expected {before.coordinator[:8]}…, or one that "
        "starts from nothing. Check the path given as --state"
    )
