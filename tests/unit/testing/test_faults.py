"""Faults come true once, at their point, rank and operation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiodist.testing.faults import FaultInjector
from aiodist.trace import Scope

WORK: Any = SimpleNamespace(op="all_reduce")


def scope(rank: int) -> Scope:
    return Scope("group", 1, rank, 3, b"id")


def test_a_fault_happens_once_and_where_it_was_asked_for() -> None:
    done: list[Any] = []
    faults = FaultInjector(lambda *what: done.append(what), 3)
    fault = faults.fail_at(1, "all_reduce", "entered", "stop", nth=1, seconds=2.0)
    faults(scope(0), "entered", WORK, None)
    faults(scope(1), "phase", WORK, None)
    faults(scope(1), "entered", SimpleNamespace(op="barrier"), None)
    faults(scope(1), "entered", WORK, None)  # the first time
    assert not done and not fault.happened
    faults(scope(1), "entered", WORK, None)
    faults(scope(1), "entered", WORK, None)
    assert done == [("stop", 1, WORK, 2.0)] and fault.happened


def test_functions_are_called_and_exceptions_raised() -> None:
    called: list[Any] = []
    faults = FaultInjector(lambda *what: called.append("named"), 3)
    faults.fail_at(0, "all_reduce", "start", called.append)
    faults(scope(0), "start", WORK, None)
    assert called == [WORK]
    faults.fail_at(0, "all_reduce", "phase", RuntimeError("injected"))
    with pytest.raises(RuntimeError, match="injected"):
        faults(scope(0), "phase", WORK, None)
    with pytest.raises(ValueError, match="'phase' only"):
        faults.fail_at(0, "all_reduce", "start", RuntimeError())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("all_reduce", "bogus"), "an all_reduce comes to .*'entered', .* not to 'bogus'"),
        (("nonsense", "start"), "op is one of 'accumulate', .* not 'nonsense'$"),
        (("isend", "start"), "not 'isend': its operation is 'send'"),
        (("send", "entered"), "a send comes to the points .* not to 'entered'"),
        (("recv", "phase", RuntimeError()), "a recv comes to the points .* not to 'phase'"),
        (("get", "phase"), "a get comes to the points .* not to 'phase'"),
        (("barrier", "start", "explode"), "action is 'block', .* not 'explode'"),
        (("barrier", "start", None), "an exception or a function, not None"),
        (("barrier", "start", ["kill"]), r"an exception or a function, not \['kill'\]"),
        (("barrier", "phase", ValueError), "an exception or a function, not <class"),
    ],
)
def test_what_could_never_happen_is_refused(arguments: tuple[Any, ...], text: str) -> None:
    faults = FaultInjector(lambda *what: None, 3)
    with pytest.raises((ValueError, TypeError), match=text):
        faults.fail_at(0, *arguments)
    with pytest.raises(ValueError, match="rank=3 is not a rank"):
        faults.fail_at(3, "barrier", "start")
    assert not faults.faults


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nth": -1}, "nth is at least 0, the first time, not -1"),
        ({"nth": 1.5}, "nth is an int, not 1.5"),
        ({"seconds": -1}, "seconds is more than 0 seconds, not -1"),
        ({"seconds": "1"}, "seconds is a number of seconds, not '1'"),
    ],
    ids=str,
)
def test_numbers_that_mean_nothing_are_refused(options: dict[str, Any], text: str) -> None:
    faults = FaultInjector(lambda *what: None, 3)
    with pytest.raises((ValueError, TypeError), match=text):
        faults.fail_at(0, "barrier", "start", "stop", **options)
    assert not faults.faults
