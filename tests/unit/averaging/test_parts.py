"""What a member of an averager carries over, call by call."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np

from aiodist.averaging.parts import AverageCall, AverageSettings, MemberPart
from aiodist.wire.averaging import Outcome


class Quiet:
    """A member whose coordinator is told nothing."""

    id = "me"

    def say(self, message: object) -> None: ...


def part_that_carries() -> MemberPart:
    ways: Any = Quiet()
    return MemberPart("", ways, AverageSettings(None, sums=True, carry=True, keep=3), {"me"})


def call_of(part: MemberPart, number: int) -> AverageCall:
    form: Any = SimpleNamespace(digest=b"")
    included = part.left_over()
    done = asyncio.get_running_loop().create_future()
    call = AverageCall(number, form, [np.full(1, number, np.float32)], 1.0, done, included)
    part.begin(call)
    return call


def outcome(round: int, *ids: str) -> Outcome:
    return Outcome("", round, ids, ids, tuple(1.0 for _ in ids))


def test_what_a_call_includes_that_was_given_up_is_not_in_the_next_call(run):
    async def main():
        part = part_that_carries()
        late = call_of(part, 1)
        part.take(outcome(1, "other"), [], None)
        assert part.left_over() == [late.vectors]
        given_up = call_of(part, 2)
        assert list(given_up.included) == [late.vectors]
        part.give_up(given_up)
        assert list(call_of(part, 3).included) == []  # because the second one may still count

    run(main())


def test_a_call_that_was_given_up_is_carried_over_if_its_round_has_another_result(run):
    async def main():
        part = part_that_carries()
        given_up = call_of(part, 1)
        part.give_up(given_up)
        late = call_of(part, 2)
        part.take(outcome(1, "other"), [], None)
        assert late.done.result().late
        assert part.left_over() == [given_up.vectors, late.vectors]

    run(main())
