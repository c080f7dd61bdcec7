"""What the calls of a member of an averager contribute, call by call."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import aiodist
from aiodist.averaging import parts
from aiodist.averaging.parts import AverageCall, AverageSettings, MemberPart, RunningRound
from aiodist.wire.averaging import AverageLacks, AverageRefused, AverageWithdrawn, Outcome, Reached


class Ways:
    """A member. `said`: what its coordinator would be told."""

    id = "me"

    def __init__(self) -> None:
        self.said: list[Any] = []

    def say(self, message: object) -> None:
        self.said.append(message)

    def ask(self, message: object) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    def meet(self, members: object, *words: object) -> None: ...

    def part(self, group: object) -> None: ...


def part_that_carries() -> MemberPart:
    ways: Any = Ways()
    return MemberPart("", ways, AverageSettings(None, sums=True, carry=True, keep=3), {"me"})


def form_of(digest: bytes = b"") -> Any:
    return SimpleNamespace(digest=digest, text=digest.decode(), names=["float32"])


def call_of(part: MemberPart, number: int, form: bytes = b"") -> AverageCall:
    part.taken()
    included = part.left_over()
    done = asyncio.get_running_loop().create_future()
    vectors: Any = [np.full(1, number, np.float32)]
    call = AverageCall(number, form_of(form), vectors, 1.0, done, included)
    part.begin(call)
    return call


async def withdrawn(part: MemberPart, call: AverageCall, *, decided: bool = False) -> bool:
    """Whether a call is withdrawn, if the coordinator answers that it is `decided`, or not."""
    part.give_up(call).set_result(AverageWithdrawn(decided, 2, ()))
    await asyncio.sleep(0)
    return call.is_withdrawn


def outcome(round: int, *ids: str) -> Outcome:
    weights = tuple(1.0 for _ in ids)
    return Outcome("", round, digest(round - 1), digest(round), ids, ids, weights)


def digest(round: int) -> bytes:
    return b"%d" % round


def test_what_a_call_includes_that_was_given_up_is_not_in_the_next_call(run):
    async def main():
        part = part_that_carries()
        late = call_of(part, 1)
        part.take(outcome(1, "other"), [], None, form_of())
        assert part.left_over() == [late.vectors]
        given_up = call_of(part, 2)
        assert list(given_up.included) == [late.vectors]
        part.give_up(given_up)
        assert list(call_of(part, 3).included) == []  # because the second one may still count

    run(main())


def test_a_first_call_that_was_decided_on_stays_in_that_round_if_its_member_is_lost(run):
    """Otherwise it would count twice, because it may be in the result of that round."""

    async def main():
        part = part_that_carries()
        ways: Any = part.ways
        call = call_of(part, 1)
        part.begun[4] = (1, digest(3))
        part.expelled()
        part.again()
        assert [offer.after for offer in ways.said] == [None, Reached(3, digest(3))]
        part.fetched(outcome(4, "me", "other"), [])
        assert not call.done.result().late
        assert part.reached == part.after == Reached(4, digest(4))

    run(main())


def test_a_result_with_an_earlier_call_is_late_for_the_next_one(run):
    """The earlier call counted under an id that its member has lost, and then failed."""

    async def main():
        part = part_that_carries()
        call_of(part, 1)
        part.begun[4] = (1, digest(3))
        part.expelled()
        part.refused(AverageRefused("", 1, "too old", stale=5))
        call = call_of(part, 2)
        part.fetched(outcome(4, "me", "other"), [])
        assert call.done.result().late
        assert part.left_over() == [call.vectors]

    run(main())


def test_a_result_of_another_history_is_not_taken(run):
    """The coordinator gave it before it knew of that. It answers the offer."""

    async def main():
        part = part_that_carries()
        ways: Any = part.ways
        part.start_at(Reached(3, b"other"))
        call = call_of(part, 1)
        for round in 3, 4, 5:
            part.fetched(outcome(round, "other"), [])
        assert not call.done.done()
        assert [offer.after for offer in ways.said] == [Reached(3, b"other")] * 2

    run(main())


def test_the_state_of_another_member_ends_what_was_before(run):
    async def main():
        part = part_that_carries()
        call_of(part, 1)
        part.begun[4] = (1, digest(3))
        part.start_at(Reached(7, digest(7)))
        assert part.after == Reached(7, digest(7))

    run(main())


@pytest.mark.parametrize("knows", [False, True])
def test_a_call_that_was_decided_on_is_not_withdrawn(run, knows):
    """A coordinator that was restarted says that it can be, because it does not know better."""

    async def main():
        part = part_that_carries()
        call_of(part, 1)
        part.take(outcome(1, "other"), [], None, form_of())
        call = call_of(part, 2)
        if not knows:
            part.begun[2] = (2, digest(1))
        assert not await withdrawn(part, call, decided=knows)
        assert list(call_of(part, 3).included) == []  # because the first one is in that round

    run(main())


def test_a_call_whose_round_is_recorded_is_not_withdrawn(run):
    """The coordinator has forgotten the calls of that round. The program must not call again."""

    async def main():
        part = part_that_carries()
        call = call_of(part, 1)
        part.give_up(call)
        part._counted(1)
        part.take(outcome(1, "me", "other"), [], 1, form_of())
        assert not await withdrawn(part, call)

    run(main())


def decision(round: int, begun: int) -> Any:
    members = [SimpleNamespace(id="me"), SimpleNamespace(id="other")]
    return SimpleNamespace(
        round=round,
        parent=digest(round - 1),
        before=Reached(round - 1, digest(round - 1)),
        begun=begun,
        attempt=begun,
        members=members,
        remaining=(0, 1),
        weights=(1.0, 1.0),
        calls=(1, 1),
    )


def test_the_transfer_of_one_round_does_not_go_on_in_the_next(run):
    """A coordinator that was restarted may count the attempts from 1 again."""

    async def main():
        part = part_that_carries()
        transfer = SimpleNamespace(close=lambda: None)
        part.running = RunningRound(decision(3, 1), *cast("Any", (None, transfer, None)))
        part.decided(decision(4, 1))
        assert part.running is None

    run(main())


@pytest.mark.parametrize("left_out", [False, True])
def test_a_call_whose_decision_holds_no_longer_may_be_withdrawn(run, left_out):
    async def main():
        part = part_that_carries()
        call = call_of(part, 1)
        part.begun[4] = (1, digest(3))
        if left_out:
            said = decision(4, 1)
            said.remaining = (1,)
            part.decided(said)
        else:
            part.reopened(4)
        assert part.after is None
        assert await withdrawn(part, call)

    run(main())


def test_a_call_that_was_given_up_and_left_out_may_still_count(run, monkeypatch):
    """Too few others remain, so the round opens again, with all that the coordinator has."""
    transfer = SimpleNamespace(begin=lambda attempt, remaining: None, close=lambda: None)
    monkeypatch.setattr(parts, "Transfer", lambda *values, **options: transfer)

    async def main():
        part = part_that_carries()
        call = call_of(part, 1)
        part.decided(decision(1, 1))
        part.give_up(call)
        said = decision(1, 1)
        said.attempt, said.remaining = 2, (1,)
        part.decided(said)
        assert part.running is None
        assert part.left_over() == []
        part.decided(decision(1, 3))
        assert part.running is not None
        assert part.begun == {1: (1, digest(0))}

    run(main())


def test_a_decision_about_a_call_of_which_nothing_is_left(run):
    """The coordinator leaves that call out, and takes the next one."""

    async def main():
        part = part_that_carries()
        ways: Any = part.ways
        assert await withdrawn(part, call_of(part, 1))
        said = decision(1, 1)
        part.decided(said)
        assert ways.said[-1] == AverageLacks("", 1, said.attempt)
        second = call_of(part, 2)
        said.attempt, said.remaining = 2, (1,)
        offered = ways.said[-1]
        ways.said.clear()
        part.decided(said)
        assert ways.said == [offered]
        assert not second.done.done()
        part.take(outcome(1, "other"), [], None, form_of())
        part.decided(decision(1, 1))  # of a coordinator that does not know of that result yet
        assert ways.said == [offered]

    run(main())


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_call_waits_until_the_one_before_has_taken_its_result(run, cancelled):
    """That one may have been cancelled in the same turn of the loop. Its result is due first."""

    async def main():
        part = part_that_carries()
        ways: Any = part.ways
        first = call_of(part, 1)
        part.take(outcome(1, "me", "other"), [], 1, form_of())
        ways.said.clear()
        done = asyncio.get_running_loop().create_future()
        second = AverageCall(2, form_of(), [np.full(1, 2, np.float32)], 1.0, done)
        part.begin(second)
        assert ways.said == []
        settled = first.done.result()
        assert settled is not None
        if cancelled:
            part.give_back(settled)
            found = second.done.result()
            assert found is not None
            assert found.late
            assert found.outcome == settled.outcome
            assert ways.said == []
            assert part.left_over() == [second.vectors]
        else:
            part.taken()
            assert [offer.after for offer in ways.said] == [Reached(1, digest(1))]
        assert part.reached == Reached(1, digest(1))

    run(main())


def test_a_call_of_another_form_gets_no_result_and_is_not_carried_over(run):
    """The earlier call was given up, and the coordinator has not refused the later one yet."""

    async def main():
        part = part_that_carries()
        part.give_up(call_of(part, 1, b"one"))
        wrong = call_of(part, 2, b"other")
        part.take(outcome(1, "me", "other"), [], 1, form_of(b"one"))
        with pytest.raises(aiodist.MismatchError, match="are one, but this call gives other"):
            await wrong.done
        assert part.left_over() == []
        assert call_of(part, 3, b"one").done.result().late

    run(main())


def test_what_codings_have_lost_is_of_one_form(run, monkeypatch):
    """The first round opens again, and its member gives up. The part may take another form then."""
    transfer = SimpleNamespace(begin=lambda attempt, remaining: None, close=lambda: None)
    monkeypatch.setattr(parts, "Transfer", lambda *values, **options: transfer)

    async def main():
        part = part_that_carries()
        part.settings.codec = aiodist.codecs.int8(error_feedback=True)
        sizes: list[int] = []
        for number, form in enumerate([b"one", b"one", b"other"], 1):
            call = call_of(part, number)
            call.form.digest = form
            call.vectors = [np.zeros(number, np.float32)]
            said = decision(1, number)
            said.calls = (number, 1)
            part.decided(said)
            assert part.residuals is not None
            assert part.residuals.contributions[0] is not None
            sizes.append(part.residuals.contributions[0].size)
            part.reopened(1)
            await withdrawn(part, call)
        assert sizes == [1, 1, 3]  # the second one goes on with what was lost before

    run(main())


def test_an_error_of_the_codec_does_not_fail_a_later_call(run, monkeypatch):
    """The call in the round was given up. The later one is for the coordinator's next answer."""

    def broken(attempt: int, remaining: object) -> None:
        raise OSError("the codec broke")

    transfer = SimpleNamespace(begin=broken, close=lambda: None)
    monkeypatch.setattr(parts, "Transfer", lambda *values, **options: transfer)

    async def main():
        part = part_that_carries()
        ways: Any = part.ways
        part.give_up(call_of(part, 1))
        later = call_of(part, 2)
        part.decided(decision(1, 1))
        assert ways.said[-1] == AverageLacks("", 1, 1)
        assert part.running is None
        assert list(part.offers.values()) == [later]
        assert not later.done.done()

    run(main())


def test_a_call_that_was_given_up_is_not_carried_over_but_what_it_included_is(run):
    """The program has given it up, and sees in the result of its round that it does not count."""

    async def main():
        part = part_that_carries()
        first = call_of(part, 1)
        part.take(outcome(1, "other"), [], None, form_of())
        given_up = call_of(part, 2)
        assert list(given_up.included) == [first.vectors]
        assert not await withdrawn(part, given_up, decided=True)
        late = call_of(part, 3)
        assert list(late.included) == []
        part.fetched(outcome(2, "other"), [])
        assert late.done.result().late
        assert part.left_over() == [first.vectors, late.vectors]

    run(main())


@pytest.mark.parametrize("decided", [False, True])
def test_a_result_for_an_earlier_call_does_not_end_one_that_is_in_a_later_round(run, decided):
    """It would be carried over as late, and so count twice, or the later round would wait for it
    for ever. So it is offered for the earlier round, which takes it out of an open one."""

    async def main():
        part = part_that_carries()
        ways: Any = part.ways
        call = call_of(part, 2)
        if decided:
            part.begun[2] = (2, digest(1))
        part.fetched(outcome(1, "other"), [])
        assert not call.done.done()
        assert part.left_over() == []
        after = Reached(int(decided), digest(int(decided)))
        assert [offer.after for offer in ways.said] == [None, after]
        part.fetched(outcome(1, "other"), [])
        assert call.done.done() is not decided

    run(main())
