"""What each rank is in, by one answer."""

from __future__ import annotations

import pytest
from surveyed import doing, finding, group, member, wait

from aiodist_server.states import SEVERITY, State, states


def test_who_works_and_who_waits_a_little_has_nothing_to_tell() -> None:
    short = member(1, doing=doing(waits=[wait(0.4)]))
    assert states(group(member(0), short)) == {}


def test_what_there_is_to_tell() -> None:
    places = ["train.py:3 in step", "train.py:9 in main"]
    found = states(
        group(
            member(0, doing=None, silent=7.0),
            member(1, doing=doing(busy=3.0, places=places)),
            # It has waited for the time since it said so as well.
            member(2, doing=doing(waits=[wait(0.6)], age=0.5)),
            member(3, doing=doing(waits=[wait(5.0, missing=""), wait(2.0)], places=places)),
            member(4, doing=doing(waits=[wait(5.0, missing="", lacking="the key x")])),
        )
    )
    assert found == {
        0: State("silent", 7.0, "no answer"),
        1: State("busy", 3.0, "its event loop does not turn at train.py:3 in step"),
        2: State("waits", 1.1, "in barrier #3, for rank 2"),
        3: State("idle", 5.0, "in barrier #3 at train.py:3 in step"),
        4: State("waits", 5.0, "in barrier #3, the key x"),
    }
    assert {state.kind for state in found.values()} < set(SEVERITY)


@pytest.mark.parametrize(("deadlock", "verb"), [(False, "holds up"), (True, "in a deadlock")])
def test_a_culprit_is_nothing_else(deadlock: bool, verb: str) -> None:
    plain = group(member(2, doing=None), findings=[finding(2, deadlock=deadlock)])
    assert states(plain)[2] == State("culprit", 4.0, f"{verb}: ranks 0-1 in barrier #3")


def test_nobody_is_to_blame_for_what_is_lacking() -> None:
    plain = group(member(0), findings=[finding(lacking="nobody sets x")])
    assert states(plain) == {}
