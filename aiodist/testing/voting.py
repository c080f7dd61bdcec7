"""How ranks of random programs go on after a loss, and whether they agree."""

from __future__ import annotations

from random import Random

from aiodist.errors import AiodistError, CollectiveTimeoutError
from aiodist.group import Group
from aiodist.testing.judge import Judge

PATIENCE = 600.0
"""Seconds that a vote may take, because ranks come to it from operations that have deadlines."""


class Voting:
    """What all ranks of a run heard. Each verdict and each view has to be the same for all."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._verdicts: dict[tuple[bytes, int], bool] = {}
        self._views: dict[tuple[str, int], tuple[str, ...]] = {}

    def see(self, group: Group) -> None:
        """Note that a rank is in this epoch of a group."""
        ids = tuple(member.id for member in group.members)
        known = self._views.setdefault((group.name, group.epoch), ids)
        if known != ids and not self._may_be_two:
            self._judge.problems.append(f"{group!r} has other members elsewhere: {ids}, {known}")

    @property
    def _may_be_two(self) -> bool:
        """Whether two groups may have served under one name, for a moment: see the guarantees."""
        # A coordinator that comes back without its state file knows only the members that have come
        # back. It may form a group of these while others are still cut off.
        return self._judge.disturbed and not self._judge.scenario.durable

    async def go_on(
        self, group: Group, move: str, has_failed: bool, chooser: Random
    ) -> Group | None:
        """Return the next epoch of `group`, by "shrink" or "rendezvous"; None if this rank is
        out."""
        # Half of the ranks that have seen a failure revoke, and the others go straight to the vote.
        # Both must work: ranks that still wait in operations come to the vote by a deadline, or by
        # the revoke.
        if has_failed and chooser.random() < 0.5:
            group.revoke()
        what = "agree"
        try:
            await self._agree(group, not has_failed)
            what = move
            if move == "shrink":
                following = await group.shrink(timeout=PATIENCE)
            else:
                following = await group.rendezvous(min_size=1, timeout=PATIENCE)
        except AiodistError as error:
            if isinstance(error, CollectiveTimeoutError):
                self._judge.problems.append(f"{group!r}: {what} hangs: {error!r}")
            self._judge.blame(group, error, what, expected=False)
            await self._leave(group)
            return None
        self.see(following)
        if following.epoch <= group.epoch:
            self._judge.problems.append(f"{following!r} comes after {group!r}")
        return following

    async def _agree(self, group: Group, flag: bool) -> None:
        verdict = await group.agree(flag, timeout=PATIENCE)
        key = (group._context.id, group._recovery._number)
        if self._verdicts.setdefault(key, verdict) != verdict:
            self._judge.problems.append(f"{group!r}: agree gave True and False")
        if verdict and not flag:
            self._judge.problems.append(f"{group!r}: agree gave True against this rank's vote")

    async def _leave(self, group: Group) -> None:
        group.abort("it cannot go on")
        await group._actor.gone()
