"""Rounds that were decided again: the coordinator knows which members have another history."""

from __future__ import annotations

import pytest
from averager_members import Members, back, restarted

from aiodist.membership.histories import RETURN_WINDOW
from aiodist.wire import averaging as a
from aiodist.wire.messages import Leave


def recorded(members: Members, *numbers: int, call: int = 1, after: int | None = None) -> a.Outcome:
    """These contribute to a round, and hold its result."""
    for number in numbers:
        members.say(number, members.offered(call, after))
    members.world.pass_time(1.0)
    decision = members.told(numbers[0])[-1]
    assert isinstance(decision, a.AverageDecision)
    members.hold(decision, *numbers)
    done = members.told(numbers[0])[-1]
    assert isinstance(done, a.AverageDone)
    for number in numbers:
        members.told(number)
    return done.outcome


def parted(members: Members) -> tuple[a.Outcome, a.Outcome, a.AverageDecision]:
    """Members 1 and 2 have a second round. They are away, and another coordinator decides on that
    round for 3 and 4."""
    members.enter(1, 2, 3, 4)
    first = recorded(members, 1, 2, 3, 4)
    second = recorded(members, 1, 2, call=2, after=1)
    restarted(members, file=False)
    for number in 3, 4:
        back(members, number, outcomes=(first,))
        members.say(number, members.offered(2, 1))
    members.world.pass_time(RETURN_WINDOW)
    *_, again = members.told(3)
    assert isinstance(again, a.AverageDecision)
    assert (again.round, again.parent) == (2, first.digest)
    return first, second, again


def offered_after(outcome: a.Outcome, call: int = 9) -> a.AverageOffer:
    return a.AverageOffer("", call, outcome.reached, 1.0, b"f", "float32[3]")


def test_members_with_the_result_come_back_before_it_is_recorded_again(members: Members) -> None:
    _, second, _ = parted(members)
    back(members, 1, outcomes=(second,))
    [fetch] = members.told(3)
    assert isinstance(fetch, a.AverageFetch)
    assert fetch.outcome == second


def test_members_with_the_result_come_back_after_it_is_recorded_again(members: Members) -> None:
    first, second, again = parted(members)
    members.hold(again, 3, 4)
    for number in 3, 4:
        members.told(number)
    outcomes = (first, second)
    assert len(back(members, 1, outcomes=outcomes, state=(second.reached,))) == 1
    assert members.told(1, members.asked(99)) == [a.AverageElected(False)]
    [refused] = members.told(1, offered_after(second))
    assert isinstance(refused, a.AverageRefused)
    assert refused.stale == 2
    assert "decided again without" in refused.text
    assert members.told(3) == []  # the others are not disturbed
    # With the state of another member it is one of them.
    assert members.told(3, members.asked(2)) == [a.AverageElected(True)]
    assert members.told(1, members.offered(10, 2)) == []
    members.say(3, Leave())
    assert members.told(1, members.asked(2))[-1] == a.AverageElected(True)


def test_a_member_that_follows_a_decision_of_another_history(members: Members) -> None:
    members.enter(1, 2, 3, 4)
    first = recorded(members, 1, 2, 3, 4)
    second = recorded(members, 1, 2, call=2, after=1)
    for number in 1, 2:
        members.say(number, members.offered(3, 2))
    members.world.pass_time(1.0)
    third = members.told(1)[-1]
    assert isinstance(third, a.AverageDecision)
    restarted(members, file=False)
    for number in 3, 4:
        back(members, number, outcomes=(first,))
    members.world.pass_time(RETURN_WINDOW)
    recorded(members, 3, 4, call=2, after=1)
    told = back(members, 1, outcomes=(first, second), decisions=(third,))
    assert told[-1] == a.AverageReopened("", 3)
    [refused] = members.told(1, offered_after(second))
    assert isinstance(refused, a.AverageRefused)
    assert refused.stale == 2


@pytest.mark.parametrize("state", [True, False])
def test_of_two_histories_that_come_back_the_longer_one_goes_on(
    members: Members, *, state: bool
) -> None:
    first, second, again = parted(members)
    members.hold(again, 3, 4)
    other = members.told(3)[-1]
    assert isinstance(other, a.AverageDone)
    third = recorded(members, 3, 4, call=3, after=2)
    restarted(members, file=False)
    back(members, 1, outcomes=(first, second), state=(second.reached,) if state else None)
    if state:
        members.enter(5)
        assert isinstance(members.told(5, a.AverageWantState())[-1], a.AverageFetch)
        members.told(1)
    assert members.told(1, offered_after(second)) == []
    back(members, 3, outcomes=(other.outcome, third))
    refused = members.told(1)[-1]
    assert isinstance(refused, a.AverageRefused)
    assert (refused.call, refused.stale) == (9, 3)
    members.enter(6)
    assert members.told(6, a.AverageWantState()) == []  # no member has the state any more
    [fetch] = members.told(6, members.offered(1, 2))
    assert isinstance(fetch, a.AverageFetch)
    assert (fetch.source.id, fetch.outcome) == ("id3", third)


def test_a_last_result_of_each_part_is_needed(members: Members) -> None:
    failed = members.enter(1, reached=())
    assert "1 parts, and 0 last results" in failed.text


def test_the_last_result_of_a_member_that_has_no_result_to_give(members: Members) -> None:
    """It took the state of another one, and no other one knows of that round."""
    members.enter(1, 2)
    restarted(members, file=False)
    for number in 1, 2:
        back(members, number, reached=(members.reached(7),))
        members.say(number, members.offered(1, 7))
    members.world.pass_time(RETURN_WINDOW)
    *_, decision = members.told(1)
    assert isinstance(decision, a.AverageDecision)
    assert (decision.round, decision.parent) == (8, b"7")


def away(members: Members) -> tuple[a.Outcome, a.Outcome]:
    """Four members have a first round, and two of them a second one."""
    members.enter(1, 2, 3, 4)
    return recorded(members, 1, 2, 3, 4), recorded(members, 1, 2, call=2, after=1)


@pytest.mark.parametrize("file", [None, "log", "snapshot"])
def test_the_others_go_back_if_all_that_had_the_last_result_are_lost(
    members: Members, file: str | None
) -> None:
    first, second = away(members)
    for number in 1, 2:
        members.world.cut(number)
    for number in 3, 4:
        members.told(number)
        assert members.offer(number, call=2, after=1) == []  # those that have it may come back
    members.world.pass_time(RETURN_WINDOW)
    assert members.told(3) == members.told(4) == [a.AverageReopened("", 2)]
    again = recorded(members, 3, 4, call=2, after=1)
    assert (again.round, again.parent) == (2, first.digest)
    assert again.digest != second.digest
    third = recorded(members, 3, 4, call=3, after=2)
    if file:
        restarted(members, file=True, snapshot=file == "snapshot")
        for number in 3, 4:
            back(members, number, outcomes=(third,))
    # One of those that were lost comes back.
    members.enter(5, outcomes=(second,))
    [refused] = members.told(5, offered_after(second))
    assert isinstance(refused, a.AverageRefused)
    assert refused.stale == 3
    assert recorded(members, 3, 4, call=4, after=3).parent == third.digest


def test_one_that_had_the_last_result_comes_back_in_time(members: Members) -> None:
    _, second = away(members)
    for number in 1, 2:
        members.world.cut(number)
    members.told(3)
    assert members.offer(3, call=2, after=1) == []
    members.enter(5, outcomes=(second,))
    [fetch] = members.told(3)
    assert isinstance(fetch, a.AverageFetch)
    assert (fetch.source.id, fetch.outcome) == ("id5", second)
    members.world.pass_time(RETURN_WINDOW)
    assert members.told(3) == []
    assert members.world.machine.status()["averagers"][0]["parts"][0]["round"] == 2


def test_one_that_had_the_last_result_comes_back_after_the_others_went_back(
    members: Members,
) -> None:
    """It is not too late, because they have no other result."""
    _, second = away(members)
    for number in 1, 2:
        members.world.cut(number)
    members.offer(3, call=2, after=1)
    members.world.pass_time(RETURN_WINDOW)
    assert members.told(3)[-1] == a.AverageReopened("", 2)
    members.enter(5, outcomes=(second,))
    assert members.told(3, members.offered(2, 1))[-1].outcome == second


def test_those_that_are_late_do_not_go_back_if_the_others_have_left(members: Members) -> None:
    """Those may have finished, and could not be told that they have another result."""
    away(members)
    for number in 1, 2:
        members.say(number, Leave())
    *_, refused = members.offer(3, call=2, after=1)
    assert isinstance(refused, a.AverageRefused)
    assert refused.stale == 2


@pytest.mark.parametrize("leave", [True, False])
def test_new_members_begin_with_round_1_if_no_other_one_is_left(
    members: Members, *, leave: bool
) -> None:
    members.enter(1, 2)
    recorded(members, 1, 2)
    members.enter(3, 4)
    for number in 1, 2:
        if leave:
            members.say(number, Leave())
        else:
            members.world.cut(number)
    for number in 3, 4:
        members.say(number, members.offered(1, None))
    members.world.pass_time(RETURN_WINDOW)
    decision = members.told(3)[-1]
    assert isinstance(decision, a.AverageDecision)
    assert (decision.round, decision.parent) == (1, b"")


def test_who_took_the_state_of_the_last_round_knows_it(members: Members) -> None:
    _, second = away(members)
    members.told(1, members.kept(2))
    members.enter(5)
    [fetch] = members.told(5, a.AverageWantState())
    assert isinstance(fetch, a.AverageFetch)
    members.say(5, a.AverageFetched(fetch.ticket))
    for number in 1, 2:
        members.world.cut(number)
    members.world.pass_time(RETURN_WINDOW)
    members.told(5)
    assert members.offer(5, after=2) == []
    *_, refused = members.offer(3, call=2, after=1)  # no member can give it the result
    assert isinstance(refused, a.AverageRefused)
    assert refused.stale == second.round
