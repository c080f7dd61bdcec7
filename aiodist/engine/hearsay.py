"""What another rank says about a loss, if it only knows of a broken link.

If two living ranks cannot reach each other, each takes the other for lost and tells all ranks so.
The coordinator removes one of them. So a rank that hears of such a loss waits for the ruling, and
then names the rank that was removed::

    rank 1 ───── x ───── rank 2        both report the broken link to the coordinator
      │                    │           rank 1 tells 0: I gave up, 2 is lost, I believe
      └────── rank 0 ──────┘           rank 2 tells 0: I gave up, 1 is lost, I believe
                 │                     rank 0 withdraws the operation, and waits
            coordinator                rules after 0.5 s: 2 is removed
                                       rank 0 fails: rank 2 is lost

**Which losses are facts?** All ranks believe the coordinator, because it alone decides which ranks
are members. They also believe a rank that says that it leaves, and an operating system that says
that a process has ended or that nothing listens at its address. These losses are facts (`LOST`), so
operations fail at once.

A broken link is a fact only for its two ends. They fail at once, because they cannot go on, and
each names the other one. To all other ranks they only say `BELIEVED`. A rank that is itself said to
be lost waits in both cases: the coordinator may have removed it, and will say so. If the loss is a
fact, it also waits for a coordinator that is away. If that word does not come, the sender of the
verdict is lost for this rank.

**What does not wait?** The operation does not. It is withdrawn as soon as the verdict comes, so its
memory belongs to the user, and the other ranks have heard. Only the Work is held until it can name
the lost rank.

**Why does no Work wait for ever?** A Work is held while a ruling is expected. That ends in one of
these ways:

* The coordinator rules 0.5 s after the first report (`membership.recovery.RULING_SECONDS`). It
  tells all members which of the two ends is lost, and they look at their held Works again
  (`review`).
* The rank that gave up may close the group, or leave, as soon as its own call has failed. That does
  not count as a ruling, because it leaves only because of the loss. Otherwise others would name the
  rank that lived. If the other end has died, the link to it breaks on this rank as well, a moment
  later.
* If the coordinator goes away, no ruling on a belief is expected, and the Works fail with what was
  heard. If the group ends here, they fail with that error.
* In every other case a timer of one lease ends the wait. For example, the coordinator may be
  waiting for members to come back.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from aiodist.engine.failures import BELIEVED, LOST, Verdict
from aiodist.errors import AiodistError, PeerLostError
from aiodist.links.party import Party
from aiodist.links.peer import LEFT, InOrder
from aiodist.work import Work

Where = Mapping[str, Any]
"""The group, epoch, op, tag and seq of an error."""


class Hearsay:
    """The Works of one context that fail by a belief of another rank, once the lost rank is
    known."""

    def __init__(self, party: Party) -> None:
        self._party = party
        self._held: dict[Work[Any], tuple[Verdict, AiodistError, Where]] = {}

    @property
    def held(self) -> list[Work[Any]]:
        """The Works that wait for the coordinator's ruling."""
        return list(self._held)

    def own(self, verdict: Verdict) -> Verdict:
        """Return what this rank tells the others: a loss that it only believes in is marked so."""
        doubted, ranks = self._party.endpoint.doubted, self._party.ranks
        # Numbers behind the last rank are ranks of the parent, see `deriving._in_part`.
        lost = [ranks[peer] for peer in verdict.details if peer < len(ranks)]
        if verdict.reason == LOST and not doubted.isdisjoint(lost):
            return verdict._replace(reason=BELIEVED)
        return verdict

    def fail(self, work: Work[Any], verdict: Verdict, error: AiodistError, where: Where) -> None:
        """Fail `work`, whose operation is withdrawn, by a verdict of another rank. `error` has its
        words.

        If the verdict is only a belief, or says that this rank is lost, `work` fails once the
        coordinator has ruled. If there is no ruling within a lease, it fails with `error`.
        """
        party = self._party
        is_accused = verdict.reason == LOST and party.rank in verdict.details
        if verdict.reason != BELIEVED and not is_accused:
            work.fail(error)
            return
        # The operation is over. A cancellation has nothing to tell the others, and only ends the
        # wait.
        work._on_cancel = self._withdrawn
        self._held[work] = verdict, error, where
        self.review()
        if work in self._held:
            timer = party.loop.call_later(party.endpoint.lease, self._expire, work)
            work.add_done_callback(lambda _: timer.cancel())

    def review(self) -> None:
        """Fail the held Works whose lost rank is known now, or all of them if no ruling will
        come."""
        owner = self._party.endpoint.owner
        for work, (verdict, error, where) in list(self._held.items()):
            ruled = self._ruled(verdict, where)
            # A rank that says for a fact that this one is lost has it from the coordinator. If the
            # coordinator has removed this rank, it is away from here until it says so.
            is_expected = owner.expects_ruling(later=verdict.reason == LOST)
            if ruled is not None or not is_expected:
                del self._held[work]
                work.fail(ruled or error)

    def close(self, error: AiodistError) -> None:
        """Fail all held Works, because the group has ended here."""
        held, self._held = self._held, {}
        for work in held:
            work.fail(copy.copy(error))

    def _expire(self, work: Work[Any]) -> None:
        """Fail `work` with what was heard, because there was no ruling in time."""
        if work in self._held:
            _, error, _ = self._held.pop(work)
            work.fail(error)

    def _withdrawn(self, work: Work[Any]) -> None:
        self._held.pop(work, None)

    def _ruled(self, verdict: Verdict, where: Where) -> PeerLostError | None:
        """Return the error if one of the two ranks is known to be lost, else None."""
        lost = self._party.lost()
        gone = [peer for peer in verdict.details if peer in lost]
        if not gone and not isinstance(lost.get(verdict.rank, LEFT), InOrder):
            gone = [verdict.rank]
        if not gone:
            return None
        text = "; ".join(f"rank {peer} is lost: {lost[peer]}" for peer in gone)
        return PeerLostError(text, ranks=gone, **where)
