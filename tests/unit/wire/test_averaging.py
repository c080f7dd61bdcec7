"""What a member of an averager says when it enters."""

from __future__ import annotations

from typing import Any

import pytest

from aiodist.wire import averaging as wire
from aiodist.wire import codec
from aiodist.wire.limits import MAX_BODY

RULES = wire.Rules(1, None, "AVG", "")
DIGEST = bytes(8)


def enter(members: int, parts: int, rounds: int, **fields: Any) -> wire.AverageEnter:
    """The message of a member that holds the results of so many rounds in each part."""
    ids = tuple(f"{number:032}" for number in range(members))
    known = [
        [
            wire.Outcome(f"part {part}", round, DIGEST, DIGEST, ids, ids, (1.0,) * members)
            for round in range(1, rounds + 1)
        ]
        for part in range(parts)
    ]
    names = tuple(f"part {part}" for part in range(parts))
    return wire.AverageEnter(RULES, names, 1, (None,) * parts, **fields).telling(known)


@pytest.mark.parametrize(("members", "parts", "rounds"), [(1, 1, 2), (1, 1000, 5), (300, 16, 3)])
def test_a_member_tells_of_all_results_that_it_holds(members: int, parts: int, rounds: int) -> None:
    message = enter(members, parts, rounds)
    assert len(message.outcomes) == parts * rounds
    codec.encode_message(message)


@pytest.mark.parametrize(("members", "parts", "rounds"), [(100, 16, 32), (1000, 24, 2)])
def test_a_member_tells_of_the_newest_results_if_there_is_no_room_for_all(
    members: int, parts: int, rounds: int
) -> None:
    message = enter(members, parts, rounds, gone=("x" * 32,) * 1000)
    told: dict[str, list[int]] = {}
    for one in message.outcomes:
        told.setdefault(one.part, []).append(one.round)
    fewest = min(len(of_part) for of_part in told.values())
    assert len(told) == parts and fewest < rounds
    for of_part in told.values():
        assert len(of_part) in (fewest, fewest + 1)
        assert of_part == list(range(rounds, rounds - len(of_part), -1))
    nbytes = len(codec.encode_body(message))
    assert MAX_BODY - 1.1 * nbytes / len(message.outcomes) < nbytes <= MAX_BODY


def test_a_member_without_results_tells_of_none() -> None:
    assert enter(0, 2, 0).outcomes == ()
