"""What another rank says of a loss, where it has nothing but a broken link to go by.

Two ranks that live and cannot reach each other each take the other for lost, and say so to all. The
coordinator turns one of them out. So who hears of such a loss waits for its word, and names the one
that is: not whom the loser believes to be::

    rank 1 ───── x ───── rank 2        both report the broken link to the coordinator
      │                    │           rank 1 tells 0: I gave up, 2 is lost, I believe
      └────── rank 0 ──────┘           rank 2 tells 0: I gave up, 1 is lost, I believe
                 │                     rank 0 withdraws the operation, and waits
            coordinator                rules after 0.5 s: 2 is turned out
                                       rank 0 fails: rank 2 is lost

**Who believes whom.** The coordinator is believed by all, for it alone decides who is a member; so
is a rank that says itself that it goes, and the system that says that a process has ended, or that
nobody listens where it was. These losses are facts (`LOST`), and whoever hears of them fails at
once. A link that is not there any more is a fact only to its two ends. They fail at once, too, for
they cannot go on in any case, and each names the other one; but to all others they say no more than
`BELIEVED`. A rank that is itself said to be lost knows better, and does not wait: what it lost is
the rank that said so.

**What does not wait.** The operation: it is withdrawn when the verdict comes, so its memory is the
user's, and the other ranks have heard. Only the Work is held, which is to say who is lost.

**Why nobody waits for ever.** A Work is held while a ruling is to be expected, and that ends:

* The coordinator rules 0.5 s after the first report (`membership.recovery.RULING_SECONDS`), and one
  of the two ends is lost then, or had been lost before. All members are told of each of these, and
  look again at the Works that they hold (`review`).
* The loser may close the group, or leave, as soon as its own call has failed. That is no ruling: it
  goes because of the loss, and who hears of both would otherwise name the rank that lived. Where
  the other end has died, this rank has a link to it that breaks as well, a moment later.
* If the coordinator goes away, no ruling is expected, and what was heard is what the Works fail
  with. If the group ends here, they fail with that.
* In whatever other case (the coordinator waits for members that may come back to it, say) a timer
  of one lease ends it.
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
"""Group, epoch, op, tag and seq of an error."""


class Hearsay:
    """The Works of one context that fail by what another rank believes, once it is known."""

    def __init__(self, party: Party) -> None:
        self._party = party
        self._held: dict[Work[Any], tuple[Verdict, AiodistError, Where]] = {}

    @property
    def held(self) -> list[Work[Any]]:
        """The Works that wait for the coordinator's word."""
        return list(self._held)

    def own(self, verdict: Verdict) -> Verdict:
        """What this rank tells the others: a loss that it only believes in is none yet."""
        doubted, ranks = self._party.endpoint.doubted, self._party.ranks
        if verdict.reason == LOST and any(ranks[peer] in doubted for peer in verdict.details):
            return verdict._replace(reason=BELIEVED)
        return verdict

    def fail(self, work: Work[Any], verdict: Verdict, error: AiodistError, where: Where) -> None:
        """`work`, which is withdrawn, fails by a verdict of another rank, whose words are `error`.
        If that is no more than its belief, it fails once the coordinator has ruled: or by these
        words, if it does not within a lease."""
        party = self._party
        if verdict.reason != BELIEVED or party.rank in verdict.details:
            work.fail(error)
            return
        # The operation is over, so a cancellation has nothing to tell the others: it only ends the
        # wait for the ruling.
        work._on_cancel = self._withdrawn
        self._held[work] = verdict, error, where
        self.review()
        if work in self._held:
            timer = party.loop.call_later(party.endpoint.lease, self._expire, work)
            work.add_done_callback(lambda _: timer.cancel())

    def review(self) -> None:
        """Who is lost is known better now, or never will be."""
        is_expected = self._party.endpoint.expects_ruling()
        for work, (verdict, error, where) in list(self._held.items()):
            ruled = self._ruled(verdict, where)
            if ruled is not None or not is_expected:
                del self._held[work]
                work.fail(ruled or error)

    def close(self, error: AiodistError) -> None:
        """The group has ended here."""
        held, self._held = self._held, {}
        for work in held:
            work.fail(copy.copy(error))

    def _expire(self, work: Work[Any]) -> None:
        """There was no ruling."""
        if work in self._held:
            _, error, _ = self._held.pop(work)
            work.fail(error)

    def _withdrawn(self, work: Work[Any]) -> None:
        self._held.pop(work, None)

    def _ruled(self, verdict: Verdict, where: Where) -> PeerLostError | None:
        """What to say where one of the two is known to be lost."""
        lost = self._party.lost()
        gone = [peer for peer in verdict.details if peer in lost]
        if not gone and not isinstance(lost.get(verdict.rank, LEFT), InOrder):
            gone = [verdict.rank]
        if not gone:
            return None
        text = "; ".join(f"rank {peer} is lost: {lost[peer]}" for peer in gone)
        return PeerLostError(text, ranks=gone, **where)
