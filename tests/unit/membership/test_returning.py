"""Whether a member may come back: a decision on its claim and on what is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aiodist.membership.group import GroupState, Size
from aiodist.membership.returning import HowToReturn, Refused, check_view, judge
from aiodist.membership.store import KeyValueStore
from aiodist.wire.messages import EpochView, JoinRequest, MemberInfo
from aiodist.wire.returning import Rejoin


def view(*ids: str, epoch: int = 5) -> EpochView:
    return EpochView(
        "g",
        epoch,
        tuple([MemberInfo(rank, one, "", 1, "", {}, 0.0, "", ()) for rank, one in enumerate(ids)]),
    )


def claim(of: EpochView, own: str = "a") -> Rejoin:
    ask = JoinRequest(group="g", id=own, size=2)
    return Rejoin(ask, of.ranks.get(own, 0), of.epoch, of.digest, (), ())


def group(of: EpochView | None) -> GroupState:
    made = GroupState("g", "", Size(True, 2, 2, 0.0), "", KeyValueStore(lambda key, seconds: None))
    if of is not None:
        made.install(of)
    return made


KNOWN = view("a", "b")


def test_the_higher_epoch_is_right() -> None:
    assert judge(group(KNOWN), None, claim(view("a", "b", epoch=6))) is HowToReturn.RESTORE
    assert judge(group(KNOWN), None, claim(view("a", "c", epoch=4))) is HowToReturn.TAKE_SEAT
    assert isinstance(judge(group(KNOWN), None, claim(view("c", epoch=4), "c")), Refused)


def test_a_group_that_ended_does_not_come_back() -> None:
    for known in (None, group(None)):
        assert judge(known, None, claim(KNOWN)) is HowToReturn.RESTORE
        assert judge(known, 4, claim(KNOWN)) is HowToReturn.RESTORE
        assert judge(known, 5, claim(KNOWN)) == Refused("its group ended with epoch 5")


def test_two_views_of_one_epoch_are_of_two_coordinators() -> None:
    way = judge(group(KNOWN), None, claim(view("a", "c")))
    assert isinstance(way, Refused)
    assert "two coordinators" in way.reason


def test_who_is_gone_stays_gone() -> None:
    known = group(KNOWN)
    assert judge(known, None, claim(KNOWN)) is HowToReturn.TAKE_SEAT
    known.lost[0] = "silence"
    assert judge(known, None, claim(KNOWN)) == Refused("it was ruled lost: silence")
    known.lost, known.left = {}, {0}
    assert judge(known, None, claim(KNOWN)) == Refused("it had left")


@pytest.mark.parametrize(
    ("told", "wrong"),
    [
        (KNOWN, None),
        (view("a", "b", epoch=6), "not the one that was announced"),
        (view("b", "a"), "not the one that was announced"),
        (replace(KNOWN, group="other"), "not the one that was announced"),
    ],
)
def test_a_view_has_to_be_the_one_that_was_announced(told: EpochView, wrong: str | None) -> None:
    said = check_view(claim(KNOWN), told)
    assert said == wrong if wrong is None else wrong in str(said)


def test_a_view_has_to_make_sense() -> None:
    twice, gaps = view("a", "a"), view("a", "b")
    gaps = replace(gaps, members=(gaps.members[0], replace(gaps.members[1], rank=2)))
    assert "twice" in str(check_view(claim(twice), twice))
    assert "sorted by rank" in str(check_view(claim(gaps), gaps))
    assert "is another member" in str(check_view(replace(claim(KNOWN), rank=1), KNOWN))
