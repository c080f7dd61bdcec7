"""What a Work fails with whose operation another rank gave up for a loss that it believes in."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from aiodist.engine.failures import BELIEVED, LOST, Verdict
from aiodist.engine.hearsay import Hearsay
from aiodist.errors import GroupClosedError, PeerLostError
from aiodist.links.peer import CLOSED, LEFT, InOrder
from aiodist.work import Work

DIED = "its process has ended"
WHERE = {"group": "g", "epoch": 1, "op": "all_reduce", "tag": None, "seq": 8}
BELIEF = Verdict(BELIEVED, "rank 0 is lost: connection lost", rank=1, details={0: ""})
ACCUSATION = Verdict(LOST, "rank 2 is lost: no sign of life", rank=1, details={2: ""})


class Group:
    """Rank 2 of three, to whom rank 1 has said `verdict`."""

    def __init__(self, lost: dict[int, str], verdict: Verdict = BELIEF) -> None:
        self.lost = lost
        self.expects, self.is_away = True, False
        endpoint = SimpleNamespace(
            owner=SimpleNamespace(
                expects_ruling=lambda later: self.expects or (later and self.is_away)
            ),
            lease=60.0,
        )
        loop = asyncio.get_running_loop()
        party: Any = SimpleNamespace(rank=2, loop=loop, endpoint=endpoint, lost=lambda: self.lost)
        self.hearsay = Hearsay(party)
        self.work: Work[Any] = Work.begin(loop, "all_reduce", None)
        self.hearsay.fail(self.work, verdict, verdict.error(2, "", WHERE), WHERE)

    @property
    def named(self) -> dict[int, str]:
        """Whom its Work names, and why."""
        with pytest.raises(PeerLostError) as caught:
            self.work.result()
        return dict.fromkeys(caught.value.ranks, caught.value.message)


@pytest.mark.parametrize("goes", [CLOSED, LEFT])
@pytest.mark.parametrize("first", [True, False])
async def test_who_believed_it_and_goes_is_not_named_in_place_of_the_dead(
    goes: InOrder, first: bool
) -> None:
    group = Group({1: goes} if first else {})
    group.lost = {1: goes}
    group.hearsay.review()
    assert not group.work.done()
    group.lost = {0: DIED, 1: goes}
    group.hearsay.review()
    assert group.named == {0: f"rank 0 is lost: {DIED}"}


async def test_who_believed_it_and_is_turned_out_is_named() -> None:
    group = Group({})
    group.lost = {1: "it was silent"}
    group.hearsay.review()
    assert group.named == {1: "rank 1 is lost: it was silent"}


async def test_its_belief_counts_where_nobody_will_rule() -> None:
    group = Group({})
    group.lost = {1: CLOSED}
    group.expects = False
    group.hearsay.review()
    assert group.named == {0: BELIEF.text}


@pytest.mark.parametrize("reason", [LOST, BELIEVED])
async def test_who_is_said_to_be_lost_itself_hears_of_it_from_the_coordinator(reason: str) -> None:
    """Else it would name the rank that said so, which lives."""
    accusation = ACCUSATION._replace(reason=reason)
    group = Group({}, accusation)
    assert not group.work.done()
    group.hearsay.close(GroupClosedError("no longer a member"))
    with pytest.raises(GroupClosedError, match="no longer a member"):
        group.work.result()
    group = Group({}, accusation)
    group.lost = {1: "it was silent"}  # it is the other one
    group.hearsay.review()
    assert group.named == {1: "rank 1 is lost: it was silent"}
    group = Group({}, accusation)
    group.expects, group.is_away = False, True
    group.hearsay.review()
    assert group.work.done() == (reason == BELIEVED)  # a fact is the word of the coordinator
    group.is_away = False
    group.hearsay.review()
    assert group.named == {1: "rank 1 has lost the connection to this rank"}


@pytest.mark.parametrize(("peer", "reason"), [(0, LOST), (1, BELIEVED), (2, LOST), (3, LOST)])
def test_a_rank_believes_in_a_loss_while_it_doubts_that(peer: int, reason: str) -> None:
    """3 is a rank of the parent, which this group does not have."""
    party: Any = SimpleNamespace(endpoint=SimpleNamespace(doubted={3}), ranks=(5, 3, 0))
    verdict = Verdict(LOST, "rank x is lost", rank=2, details={peer: ""})
    assert Hearsay(party).own(verdict) == verdict._replace(reason=reason)
