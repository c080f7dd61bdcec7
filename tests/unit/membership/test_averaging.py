"""Averagers at the coordinator: what members are told, and what outlives a restart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from averager_members import LEASE, RULES, Members, back, outcome, restarted

from aiodist.membership import averaging
from aiodist.membership.histories import RETURN_WINDOW
from aiodist.wire import averaging as a
from aiodist.wire.messages import Evicted, Failed, Failure, JoinRequest, Leave
from aiodist.wire.recovery import Unreachable
from aiodist.wire.returning import Rejoin


def test_a_round_from_the_first_offer_to_the_record(members: Members) -> None:
    assert members.enter(1, 2) == a.AverageEntered(1)
    decision = members.close(1, 2)
    assert [info.id for info in decision.members] == ["id1", "id2"]
    assert (decision.round, decision.remaining, decision.calls) == (1, (0, 1), (1, 1))
    members.hold(decision, 1)
    assert members.told(1) == []
    members.hold(decision, 2)
    [done] = members.told(1)
    assert isinstance(done, a.AverageDone)
    said = done.outcome
    assert (said.round, said.parent, said.ids, said.names) == (1, b"", ("id1", "id2"), ("m1", "m2"))
    assert members.told(2) == [done]


def test_only_members_of_an_averager_have_rounds(members: Members) -> None:
    world = members.world
    failed = world.say(9, members.offered(1, None))
    assert isinstance(failed, Failed)
    assert failed.kind is Failure.NOT_A_MEMBER
    world.say(8, JoinRequest(group="other", id="id8", size=1))
    failed = world.say(8, a.AverageEnter(RULES, ("",), 1, (None,)))
    assert isinstance(failed, Failed)
    assert "only members of an averager" in failed.text


@pytest.mark.parametrize(
    "rules",
    [
        a.Rules(3, 1.0, "AVG", ""),
        a.Rules(2, None, "AVG", ""),
        a.Rules(2, 1.0, "SUM", ""),
        a.Rules(2, 1.0, "AVG", "int8"),
    ],
)
def test_rules_that_differ_are_refused(members: Members, rules: a.Rules) -> None:
    members.enter(1)
    failed = members.enter(2, rules=rules)
    assert isinstance(failed, Failed)
    assert failed.kind is Failure.MISMATCH
    assert str(rules) in failed.text
    assert str(RULES) in failed.text


def enter_as_m1(members: Members, number: int, rules: a.Rules = RULES) -> Any:
    members.world.say(number, replace(members.ask(number), name="m1"))
    return members.world.say(number, members.entrance(rules=rules))


def test_a_second_live_member_of_a_name_is_refused(members: Members) -> None:
    members.enter(1)
    members.join(2)
    failed = enter_as_m1(members, 3)
    assert isinstance(failed, Failed)
    assert failed.kind is Failure.INVALID
    assert "'outer' has a member named 'm1' already (pid 0 on )" in failed.text
    assert failed.text.endswith("until the other one is lost")
    members.world.cut(1)
    assert isinstance(members.world.say(3, members.entrance()), a.AverageEntered)


@pytest.mark.parametrize("rules", [RULES, a.Rules(3, 1.0, "AVG", "")])
def test_an_averager_that_died_waits_one_lease_for_its_members(
    members: Members, rules: a.Rules
) -> None:
    members.enter(1, 2)
    members.world.pass_time(100.0)
    failed = enter_as_m1(members, 3, rules)
    assert failed.text.endswith("none of its members is heard, and they are lost in 6 s at most")
    members.world.pass_time(LEASE)
    assert isinstance(enter_as_m1(members, 4, rules), a.AverageEntered)


def test_values_of_another_form_fail_for_that_member_alone(members: Members) -> None:
    members.enter(1, 2)
    assert members.offer(1) == []
    [refused] = members.offer(2, form=b"g", text="float32[4]")
    assert isinstance(refused, a.AverageRefused)
    assert "float32[3]" in refused.text
    assert "float32[4]" in refused.text
    assert refused.stale is None
    assert members.told(1) == []
    [decision] = members.offer(2, call=2)
    assert isinstance(decision, a.AverageDecision)


@pytest.mark.parametrize("shared", [0, 500])
def test_a_refusal_shows_where_forms_differ(members: Members, shared: int) -> None:
    members.enter(1, 2)
    same = "x" * shared
    members.offer(1, text=f"{same}{{'a': float32[3]}}" + "y" * 400)
    [refused] = members.offer(2, form=b"g", text=f"{same}{{'b': float32[3]}}" + "y" * 400)
    assert "of the averager 'outer'" in refused.text
    assert "x{'a': float32[3]}" in refused.text.replace("are {", "are x{")
    assert "x{'b': float32[3]}" in refused.text.replace("gives {", "gives x{")
    assert "in all rounds of a part" in refused.text
    assert len(refused.text) < 1000


def test_a_wrong_first_call_that_is_over_is_forgotten(members: Members) -> None:
    members.enter(1, 2)
    members.offer(1, form=b"g", text="float32[4]")
    assert isinstance(members.offer(2)[0], a.AverageRefused)
    assert members.told(1, a.AverageWithdraw("", 1)) == [a.AverageWithdrawn(False, 2, ("m2",))]
    members.hold(members.close(1, 2, call=2), 1, 2)
    assert isinstance(members.told(2)[0], a.AverageDone)


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_the_form_of_a_recorded_round_stays(members: Members, restarts: int) -> None:
    members.enter(1, 2)
    members.hold(members.close(1, 2), 1, 2)
    for _ in range(restarts):
        restarted(members, file=True)
    if restarts:
        back(members, 1)
    members.told(1)
    [refused] = members.offer(1, call=2, after=1, form=b"g", text="float32[4]")
    assert isinstance(refused, a.AverageRefused)
    assert "float32[3], but this member gives float32[4]" in refused.text


def test_a_part_that_the_member_does_not_take_part_in_is_refused(members: Members) -> None:
    members.enter(1)
    [refused] = members.offer(1, part="other")
    assert isinstance(refused, a.AverageRefused)


def test_parts_have_rounds_of_their_own(members: Members) -> None:
    members.enter(1, 2, parts=("x", "y"))
    members.enter(3, parts=("y",))
    members.offer(1, part="y")
    members.offer(1, part="x")
    [decision] = members.offer(2, part="x")  # member 3 holds up the rounds of y alone
    assert isinstance(decision, a.AverageDecision)
    assert decision.part == "x"


def test_a_late_member_fetches_the_result_from_one_that_holds_it(members: Members) -> None:
    members.enter(1, 2, 3)
    members.offer(1)
    members.offer(2)
    members.world.pass_time(1.0)
    decision = members.told(1)[-1]
    assert isinstance(decision, a.AverageDecision)
    assert members.offer(3, after=0) == []
    members.hold(decision, 1, 2)
    members.world.mail.pop(2, None)
    [done, serve] = members.told(1)
    assert isinstance(done, a.AverageDone)
    [fetch] = members.told(3)
    assert isinstance(serve, a.AverageServe)
    assert isinstance(fetch, a.AverageFetch)
    assert fetch.source.id == "id1"
    assert serve.target.id == "id3"
    assert fetch.ticket == serve.ticket
    # The one that serves it dies: another one does.
    members.world.cut(1)
    [gone, serve] = members.told(2)
    assert gone == a.AverageGone(("id1",))
    assert isinstance(serve, a.AverageServe)
    [gone, fetch] = members.told(3)
    assert isinstance(fetch, a.AverageFetch)
    assert fetch.ticket == serve.ticket
    assert members.told(3, a.AverageFetched(fetch.ticket)) == []
    members.world.cut(2)
    assert members.told(3) == [a.AverageGone(("id2",))]
    [part] = members.world.machine.status()["averagers"][0]["parts"]
    assert part["rounds"][0]["late"] == {"m3": 0.0}
    assert part["late"] == {"m3": (1, 0.0)}


def test_a_source_that_was_away_hears_what_it_is_to_give(members: Members) -> None:
    """After a restart, the one that needs the result comes back before its source."""
    members.enter(1, 2)
    members.hold(members.close(1, 2), 1, 2)
    members.enter(3)
    members.say(2, Leave())
    restarted(members, file=True)
    back(members, 3)
    [first] = members.offer(3, after=0)
    assert isinstance(first, a.AverageFetch)
    *_, serve = back(members, 1)
    [fetch] = members.told(3)
    assert isinstance(serve, a.AverageServe)
    assert isinstance(fetch, a.AverageFetch)
    assert first.ticket != fetch.ticket == serve.ticket
    assert members.told(3, a.AverageFetched(fetch.ticket)) == []


def test_a_source_that_cannot_give_a_result_says_so(members: Members) -> None:
    members.enter(1, 2)
    members.hold(members.close(1, 2), 1, 2)
    members.enter(3)
    [fetch] = members.offer(3, after=0)
    assert isinstance(fetch, a.AverageFetch)
    source = int(fetch.source.id.removeprefix("id"))
    members.say(source, a.AverageFetched(fetch.ticket, failed=True))
    [again] = members.told(3)
    assert isinstance(again, a.AverageFetch)
    assert again.source.id == f"id{3 - source}"
    members.say(2, a.AverageFetched(fetch.ticket, failed=True))  # that one is over
    assert members.told(3) == []


def test_a_source_that_fails_is_not_asked_again(members: Members) -> None:
    members.enter(1, 2, 3)
    for number in (1, 2):
        members.offer(number)
    members.world.pass_time(1.0)
    decision = members.told(1)[-1]
    assert isinstance(decision, a.AverageDecision)
    members.hold(decision, 1, 2)
    [fetch] = members.offer(3, after=0)
    assert isinstance(fetch, a.AverageFetch)
    [again] = members.told(3, a.AverageFetched(fetch.ticket, failed=True))
    assert isinstance(again, a.AverageFetch)
    assert again.source.id != fetch.source.id
    [refused] = members.told(3, a.AverageFetched(again.ticket, failed=True))
    assert isinstance(refused, a.AverageRefused)
    assert refused.stale == 1


def test_a_member_that_missed_too_many_rounds_is_stale(members: Members) -> None:
    members.enter(1, 2, 3)
    for round in (1, 2):
        for number in (1, 2):
            members.offer(number, call=round, after=round - 1)
        members.world.pass_time(1.0)
        decision = members.told(1)[-1]
        assert isinstance(decision, a.AverageDecision)
        members.hold(decision, 1, 2)
        members.told(1)
    [refused] = members.offer(3, after=0)
    assert isinstance(refused, a.AverageRefused)
    assert refused.stale == 2
    [fetch] = members.offer(3, after=1)
    assert isinstance(fetch, a.AverageFetch)
    assert fetch.outcome is not None
    assert fetch.outcome.round == 2


def test_withdrawing_says_who_is_missing(members: Members) -> None:
    members.enter(1, 2, 3, rules=a.Rules(3, 1.0, "AVG", ""))
    members.offer(1)
    members.offer(2)
    for number in (1, 2):  # m1 has contributed while m2 waited
        answers = members.told(number, a.AverageWithdraw("", 1))
        assert answers == [a.AverageWithdrawn(False, 3, ("m3",))]
    members.offer(1, call=2)
    missing = a.AverageWithdrawn(False, 3, ("m2", "m3"))
    assert members.told(1, a.AverageWithdraw("", 2)) == [missing]
    assert members.told(1, a.AverageWithdraw("unknown", 1)) == [a.AverageWithdrawn(False, 3, ())]


def test_a_member_that_dies_in_a_round_is_left_out(members: Members) -> None:
    members.enter(1, 2, 3)
    first = members.close(1, 2, 3)
    members.world.cut(3)
    gone, second = members.told(1)
    assert gone == a.AverageGone(("id3",))
    assert isinstance(second, a.AverageDecision)
    assert (second.remaining, second.begun) == ((0, 1), first.attempt)
    assert [info.id for info in second.members] == ["id1", "id2", "id3"]
    members.world.cut(2)
    gone, reopened = members.told(1)
    assert reopened == a.AverageReopened("", 1)


def test_a_silent_member_is_lost_after_its_lease(members: Members) -> None:
    members.enter(1, 2)
    for _ in range(8):
        members.world.pass_time(1.0)
        members.told(1, members.offered(1, None))
    assert "lost" in members.world.notes
    assert [one["name"] for one in members.world.machine.status()["averagers"][0]["members"]] == [
        "m1"
    ]


def test_a_member_that_others_cannot_reach_is_evicted(members: Members) -> None:
    members.enter(1, 2)
    members.told(1, Unreachable("id2", "no link"))
    [evicted] = members.told(2)
    assert isinstance(evicted, Evicted)
    assert "no link" in evicted.reason


def test_the_last_member_takes_the_averager_with_it(members: Members) -> None:
    members.enter(1)
    members.world.say(1, Leave())
    assert members.world.machine.status()["averagers"] == []
    assert members.world.machine.is_empty


def test_a_member_that_comes_with_the_state_gives_it(members: Members) -> None:
    members.enter(1, state=(a.Reached(0, b""),))
    members.enter(2)
    [fetch] = members.told(2, a.AverageWantState())
    assert isinstance(fetch, a.AverageFetch)
    assert fetch.source.id == "id1"
    members.told(1)
    members.say(1, a.AverageFetched(fetch.ticket, failed=True))  # no other member has the state
    assert members.told(2) == []
    [again] = members.told(2, a.AverageFetched(fetch.ticket, failed=True))
    assert isinstance(again, a.AverageFetch)


def test_a_member_that_enters_again_hears_that_its_round_is_recorded(members: Members) -> None:
    members.enter(1, 2)
    decision = members.close(1, 2)
    members.hold(decision, 1, 2)
    [done] = members.told(1)
    enter = a.AverageEnter(RULES, ("",), 1, (None,), decisions=(decision,))
    assert members.told(1, enter) == [a.AverageEntered(1), done]


def test_status_shows_the_last_rounds(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging, "SHOWN", 1)
    members.enter(1, 2)
    for after in None, 1:
        members.hold(members.close(1, 2, after=after), 1, 2)
        members.told(1)
        members.told(2)
    [averager] = members.world.machine.status()["averagers"]
    assert [one["round"] for one in averager["parts"][0]["rounds"]] == [2]


def test_a_member_that_repeats_its_offer_is_not_late(members: Members) -> None:
    members.enter(1, 2)
    members.hold(members.close(1, 2), 1, 2)
    for number in 1, 2:
        members.told(number)
    decision = members.close(1, 2, call=2, after=1)
    members.offer(1, call=2, after=1)
    members.hold(decision, 1, 2)
    members.offer(2, call=2, after=1)
    [part] = members.world.machine.status()["averagers"][0]["parts"]
    assert part["round"] == 2
    assert part["late"] == {}


def test_who_was_left_out_hears_of_no_later_attempt(members: Members) -> None:
    members.enter(1, 2, 3, 4)
    members.close(1, 2, 3, 4)
    for number in 4, 3:
        members.told(1)
        members.world.cut(number)
    *_, decision = members.told(1)
    assert isinstance(decision, a.AverageDecision)
    assert decision.remaining == (0, 1)


def test_a_member_that_is_not_there_cannot_be_accused(members: Members) -> None:
    members.enter(1, 2)
    members.say(1, Unreachable("id9", "no link"))
    assert members.told(2) == []


def test_one_member_is_elected_for_the_state(members: Members) -> None:
    members.enter(1, 2, 3)
    assert members.told(3, a.AverageWantState()) == []
    assert members.told(1, members.asked(0)) == [a.AverageElected(True)]
    assert members.told(2, members.asked(0)) == [a.AverageElected(False)]
    [serve] = members.told(1, members.kept(0))
    [fetch] = members.told(3)
    assert isinstance(fetch, a.AverageFetch)
    assert isinstance(serve, a.AverageServe)
    assert fetch.part is None
    members.world.cut(1)
    members.told(3)
    members.told(2)
    assert members.told(2, members.asked(0)) == [a.AverageElected(True)]
    members.told(2, members.kept(0))
    [fetch] = members.told(3)
    assert isinstance(fetch, a.AverageFetch)
    assert fetch.source.id == "id2"
    members.told(3, a.AverageFetched(fetch.ticket))
    assert members.told(2, members.kept(0)) == [] == members.told(3)


def test_a_member_that_is_ahead_takes_the_place_of_the_elected_one(members: Members) -> None:
    """A slow member was the first to ask. A new member could not go on from its state."""
    members.enter(1, 2, 3, parts=("a", "b"), keep=20, reached=(members.reached(12),) * 2)
    assert members.told(1, members.asked(2)) == [a.AverageElected(True)]
    assert members.told(1, members.kept(2)) == []
    assert members.told(2, members.asked(4)) == [a.AverageElected(False)]
    assert members.told(2, members.asked(5)) == [a.AverageElected(True)]
    [fetch] = members.told(3, a.AverageWantState())
    assert isinstance(fetch, a.AverageFetch)
    assert fetch.source.id == "id1"  # until the other one has said that it has its state
    assert members.told(1, members.asked(4))[-1] == a.AverageElected(False)
    assert members.told(2, members.kept(5)) == []
    [again] = members.told(3, a.AverageFetched(fetch.ticket, failed=True))
    assert isinstance(again, a.AverageFetch)
    assert again.source.id == "id2"
    members.told(2, members.asked(9))
    assert members.told(1, members.asked(11)) == [a.AverageElected(False)]


def test_the_newest_state_is_given_and_another_one_if_its_source_fails(members: Members) -> None:
    members.enter(1, 2, 3, 4, keep=20, reached=(members.reached(12),))
    for number, round in (1, 11), (2, 12), (3, 12):
        assert members.told(number, members.kept(round)) == []
    [first] = members.told(4, a.AverageWantState())
    [second] = members.told(4, a.AverageFetched(first.ticket, failed=True))
    assert {first.source.id, second.source.id} == {"id2", "id3"}
    for number in 2, 3:
        assert members.told(number, a.AverageStateKept(None))[0].target.id == "id4"
    [third] = members.told(4, a.AverageFetched(second.ticket, failed=True))
    assert third.source.id == "id1"
    members.told(1, a.AverageStateKept(None))
    assert members.told(4, a.AverageFetched(third.ticket, failed=True)) == []


def test_no_member_is_told_to_fetch_from_itself(members: Members) -> None:
    members.enter(1, 2)
    assert members.told(1, a.AverageWantState()) == []
    assert members.told(1, members.kept(0)) == []
    members.told(2, members.kept(0))
    [fetch] = members.told(1)
    assert fetch.source.id == "id2"


@pytest.mark.parametrize(
    ("rounds", "source"), [((0, 0), "id1"), ((2, 0), "id1"), ((2, 1), "id2"), ((2, 2), "id2")]
)
def test_the_state_is_newest_in_the_parts_of_its_receiver_and_of_all_of_them_if_possible(
    members: Members, rounds: tuple[int, int], source: str
) -> None:
    reached = members.reached(3)
    members.enter(1, parts=("a", "x"), keep=9, reached=(reached,) * 2, state=(reached,) * 2)
    members.enter(3, parts=("a", "b"), keep=9, reached=(reached, reached))
    [fetch] = members.told(3, a.AverageWantState())
    assert fetch.source.id == "id1"  # better than none
    members.told(3, a.AverageWantState(wanted=False))
    older = tuple(map(members.reached, rounds))
    members.enter(2, parts=("b", "a"), keep=9, reached=older, state=older)
    [fetch] = members.told(3, a.AverageWantState())
    assert fetch.source.id == source


def test_a_state_that_is_too_old_is_not_given(members: Members) -> None:
    members.enter(1, 2, 3, keep=2, reached=(members.reached(12),))
    assert members.told(1, members.asked(9)) == [a.AverageElected(False)]
    assert members.told(1, members.kept(9)) == []
    assert members.told(2, members.kept(10)) == []
    assert members.told(1, members.asked(10)) == [a.AverageElected(False)]
    [fetch] = members.told(3, a.AverageWantState())
    assert fetch.source.id == "id2"
    members.enter(4, reached=(members.reached(13),))
    assert members.told(3, a.AverageFetched(fetch.ticket, failed=True)) == []
    assert members.told(1, members.asked(11)) == [a.AverageElected(True)]


def test_a_decision_outlives_the_coordinator_in_its_file(members: Members) -> None:
    members.enter(1, 2, 3)
    decision = members.close(1, 2, 3)
    members.hold(decision, 1, 2)
    restarted(members, file=True)
    for number in (1, 2, 3):
        _, again = back(members, number)
        assert again == decision
    members.hold(decision, 1, 2, 3)
    [done] = members.told(3)
    assert isinstance(done, a.AverageDone)
    assert done.outcome.ids == ("id1", "id2", "id3")
    # What is recorded stays recorded.
    restarted(members, file=True)
    assert back(members, 1, decisions=(decision,))[-1] == done
    # Who does not come back is gone after its lease, and held up a round until then.
    back(members, 2)
    for number in (1, 2):
        members.offer(number, call=2, after=1)
    assert members.told(1) == []
    members.world.pass_time(1.0)
    assert isinstance(members.told(1)[-1], a.AverageDecision)


def test_a_second_decision_outlives_the_coordinator_in_its_file(members: Members) -> None:
    members.enter(1, 2, 3)
    first = members.close(1, 2, 3)
    members.say(3, Leave())
    second = next(one for one in members.told(1) if isinstance(one, a.AverageDecision))
    assert (second.attempt, second.remaining) == (first.attempt + 1, (0, 1))
    restarted(members, file=True)
    # Both are told the second one again. By the first, they would wait for the one that is gone.
    assert second in back(members, 1)
    assert second in back(members, 2)
    members.hold(second, 1, 2)
    assert any(isinstance(one, a.AverageDone) for one in members.told(1))


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_reopened_round_is_open_after_a_restart(members: Members, *, snapshot: bool) -> None:
    members.enter(1, 2)
    members.close(1, 2)
    members.world.cut(2)
    restarted(members, file=True, snapshot=snapshot)
    [entered] = back(members, 1)
    assert isinstance(entered, a.AverageEntered)
    members.enter(3)
    members.offer(1)
    [decision] = members.offer(3)
    assert isinstance(decision, a.AverageDecision)
    assert (decision.round, decision.attempt) == (1, 2)


def test_members_bring_a_decision_to_a_coordinator_that_knows_nothing(members: Members) -> None:
    members.rules = a.Rules(2, 60.0, "AVG", "")
    members.enter(1, 2, 3)
    decision = members.close(1, 2, 3)
    restarted(members, file=False)
    back(members, 1, decisions=(decision,))
    back(members, 2, decisions=(decision,))
    members.hold(decision, 1, 2)
    members.world.pass_time(RETURN_WINDOW / 2)
    assert members.told(1) == []  # the third one may still come
    members.world.pass_time(RETURN_WINDOW / 2)
    [second] = members.told(1)
    assert isinstance(second, a.AverageDecision)
    assert second.remaining == (0, 1)
    assert second.attempt > decision.attempt


def test_members_bring_a_record_to_a_coordinator_that_knows_nothing(members: Members) -> None:
    members.enter(1, 2)
    decision = members.close(1, 2)
    members.hold(decision, 1, 2)
    [done] = members.told(1)
    assert isinstance(done, a.AverageDone)
    restarted(members, file=False)
    [_, again] = back(members, 2, decisions=(decision,))
    assert again == decision  # it has not heard that this is over
    back(members, 1, outcomes=(done.outcome,))
    assert done in members.told(2)


def left_out(members: Members) -> tuple[a.AverageDecision, a.AverageDone]:
    """Member 3 of three is behind. It has not heard that the others went on without it."""
    members.enter(1, 2, 3)
    first = members.close(1, 2, 3)
    got = a.AverageProgress("", 1, first.attempt, (0, 1), (0, 1))
    for number in (1, 2):
        members.say(number, got)
    members.world.pass_time(1.0)
    second = members.told(1)[-1]
    assert isinstance(second, a.AverageDecision)
    assert second.remaining == (0, 1)
    members.hold(second, 1, 2)
    [done] = [one for one in members.told(1) if isinstance(one, a.AverageDone)]
    return first, done


@pytest.mark.parametrize("file", [True, False])
def test_a_member_that_was_left_out_before_a_restart_gets_the_result(
    members: Members, *, file: bool
) -> None:
    first, done = left_out(members)
    restarted(members, file=file)
    for number in (1, 2):
        back(members, number, outcomes=(done.outcome,))
    *_, fetch = back(members, 3, decisions=(first,))
    assert isinstance(fetch, a.AverageFetch)
    assert fetch.outcome == done.outcome


def test_the_member_that_was_left_out_comes_back_before_those_that_know(members: Members) -> None:
    first, done = left_out(members)
    restarted(members, file=False)
    assert back(members, 3, decisions=(first,))[-1] == first
    back(members, 1, outcomes=(done.outcome,))
    [fetch] = members.told(3)
    assert isinstance(fetch, a.AverageFetch)
    assert fetch.outcome == done.outcome


def test_a_member_is_behind_a_decision_of_the_round_after(members: Members) -> None:
    """Whether it contributed to its round is only known when another one comes back."""
    first, done = left_out(members)
    for number in (1, 2):
        members.offer(number, call=2, after=1)
    members.world.pass_time(1.0)
    next_one = members.told(1)[-1]
    assert isinstance(next_one, a.AverageDecision)
    assert next_one.round == 2
    restarted(members, file=False)
    back(members, 3, decisions=(first,))
    back(members, 2, decisions=(next_one,))
    assert members.told(3) == []
    back(members, 1, decisions=(next_one,), outcomes=(done.outcome,))
    [fetch] = members.told(3)
    assert isinstance(fetch, a.AverageFetch)
    assert fetch.outcome == done.outcome


def test_a_result_that_nobody_brings_back_is_stale(members: Members) -> None:
    members.enter(1, 2, 3)
    restarted(members, file=False)
    back(members, 3, reached=(members.reached(4),))
    assert members.offer(3, after=4) == []
    back(members, 1, outcomes=(outcome(6, 1, 2),))
    assert members.told(3) == []
    members.world.pass_time(RETURN_WINDOW)
    [refused] = members.told(3)
    assert isinstance(refused, a.AverageRefused)
    assert refused.stale == 6


def test_a_result_of_the_same_number_that_nobody_else_knew_is_given_to_nobody(
    members: Members,
) -> None:
    """Without a state file, all that knew of a round may be away while it is decided anew."""
    members.enter(1, 2)
    members.hold(members.close(1, 2), 1, 2)
    members.enter(3, outcomes=(outcome(1, 3),))
    members.say(1, Leave())
    members.enter(4)
    [fetch] = members.offer(4, after=0)
    assert isinstance(fetch, a.AverageFetch)
    assert fetch.source.id == "id2"
    members.say(2, Leave())
    *_, refused = members.told(4)
    assert isinstance(refused, a.AverageRefused)


def test_what_was_asked_before_entering_again_has_an_answer(members: Members) -> None:
    members.enter(1)
    restarted(members, file=False)
    view = members.views[1]
    members.world.say(1, Rejoin(members.ask(1), 0, view.epoch, view.digest, (), (), view))
    assert members.told(1, a.AverageWithdraw("", 1)) == [a.AverageWithdrawn(False, 0, ())]
    assert members.told(1, members.asked(0)) == [a.AverageElected(False)]
    assert members.told(1, members.offered(1, None)) == []


def test_progress_of_a_decision_that_is_over_is_nothing(members: Members) -> None:
    members.enter(1, 2)
    assert members.told(1, a.AverageProgress("", 1, 1, (0,), (0,))) == []
    members.close(1, 2)
    assert members.told(1, a.AverageProgress("", 1, 1, (7,), ())) == []
    assert members.told(1, a.AverageProgress("unknown", 1, 1, (), ())) == []
