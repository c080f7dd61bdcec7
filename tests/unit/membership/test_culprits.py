"""Who holds up the others, from what all say that they are doing."""

from __future__ import annotations

import pytest

from aiodist.membership.culprits import LEAST, Doing, Finding, Held, PendingOperation, find
from aiodist.wire.activity import bits_of

IDLE = Doing()
STUCK = Doing(is_stuck=True)


def collective(
    *missing: int, seq: int = 57, seconds: float = 12.0, tag: str = "None"
) -> PendingOperation:
    what = f"all_reduce #{seq}"
    return PendingOperation((b"context1", tag, seq), what, seconds, bits_of(missing))


def message(*peers: int, seconds: float = 12.0) -> PendingOperation:
    return PendingOperation((b"context1", "0", None), "recv tag 0", seconds, bits_of(peers))


def waits(*waiting: PendingOperation) -> Doing:
    return Doing(waiting)


def held(*ranks: int, what: str = "all_reduce #57", seconds: float = 12.0) -> Held:
    return Held(what, ranks, seconds)


@pytest.mark.parametrize("culprit", [IDLE, STUCK, None, waits(message()), waits(collective(seq=3))])
def test_the_rank_that_has_not_entered(culprit: Doing | None) -> None:
    doings = {0: waits(collective(3)), 1: waits(collective(0, 3)), 2: waits(collective(1, 3))}
    assert find({**doings, 3: culprit}) == [Finding((3,), (held(0, 1, 2),))]


def test_nothing_is_wrong_while_nobody_waits_for_long() -> None:
    short = collective(1, seconds=LEAST / 2)
    assert find({0: waits(short), 1: IDLE}) == []
    assert find({0: IDLE, 1: STUCK}) == []
    assert find({}) == []


def test_a_chain_leads_to_its_end() -> None:
    doings = {0: waits(collective(1)), 1: waits(message(2, seconds=15.0)), 2: STUCK}
    assert find(doings) == [
        Finding((2,), (held(0), held(1, what="recv tag 0", seconds=15.0))),
    ]


def test_several_culprits_of_the_same_wait_are_one_finding() -> None:
    doings = {0: waits(collective(1, 2)), 1: IDLE, 2: None}
    assert find(doings) == [Finding((1, 2), (held(0),))]


def test_who_holds_up_more_comes_first() -> None:
    doings = {
        0: waits(message(4)),
        1: waits(collective(5)),
        2: waits(collective(5)),
        4: IDLE,
        5: IDLE,
    }
    assert [finding.culprits for finding in find(doings)] == [(5,), (4,)]


def test_ranks_in_different_collectives_wait_for_each_other() -> None:
    there, here = collective(1, seq=4, tag="'a'"), collective(0, seq=5, tag="'b'")
    [finding] = find({0: waits(there), 1: waits(here), 2: IDLE})
    assert finding.deadlock
    assert finding.culprits == (0, 1)
    assert [one.what for one in finding.held] == ["all_reduce #4", "all_reduce #5"]


def test_who_waits_for_a_deadlock_belongs_to_it() -> None:
    doings = {0: waits(message(1)), 1: waits(message(0)), 2: waits(message(0))}
    [finding] = find(doings)
    assert finding.deadlock
    assert finding.culprits == (0, 1, 2)


def test_all_have_entered_and_one_loop_does_not_turn() -> None:
    doings = {0: waits(collective()), 1: STUCK, 2: waits(collective())}
    assert find(doings) == [Finding((1,), (held(0, 2),))]
    # With all loops turning, it is under way.
    assert find({0: waits(collective()), 1: waits(collective())}) == []


def test_a_rank_waits_neither_for_itself_nor_for_those_who_are_gone() -> None:
    assert find({0: waits(collective(0, 9)), 1: waits(collective(9))}) == []


def test_a_receive_from_anyone_accuses_nobody() -> None:
    assert find({0: waits(message()), 1: STUCK}) == []


def test_thousands_of_ranks() -> None:
    half = range(2048, 4096)
    doings: dict[int, Doing | None] = dict.fromkeys(half)
    doings |= {rank: waits(collective(*half)) for rank in range(2048)}
    [finding] = find(doings)
    assert finding.culprits == tuple(half)
    assert finding.held == (held(*range(2048)),)
