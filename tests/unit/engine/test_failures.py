"""What the others hear of a mismatch."""

from __future__ import annotations

import pytest

from aiodist.engine.failures import Verdict, mismatch_text, verdict_of
from aiodist.errors import MismatchError

WHERE = {"group": "g", "epoch": 1, "op": "broadcast"}


def told(error: MismatchError, own_rank: int, own_call: str) -> MismatchError:
    verdict, _ = Verdict.parse([*verdict_of(error, 0).fields(), []], 3)
    heard = verdict.error(own_rank, own_call, WHERE)
    assert isinstance(heard, MismatchError)
    return heard


def test_who_hears_of_calls_that_differ_adds_its_own() -> None:
    calls = {0: "barrier()", 1: "gather(dst=0)"}
    heard = told(MismatchError(mismatch_text(calls), calls=calls), 2, "barrier()")
    assert heard.calls == {**calls, 2: "barrier()"}
    assert heard.message == mismatch_text(heard.calls)


@pytest.mark.parametrize("rank", [1, 2])
def test_who_hears_that_a_value_does_not_fit_has_called_nothing_else(rank: int) -> None:
    """A table of calls would show it, and mark its call, as one that differs."""
    text = "rank 0 sent what does not fit x of rank 1: it is float64[2], not float64[3]"
    calls = {0: "float64[3]", 1: "x=float64[2]"}
    heard = told(MismatchError(text, calls=calls), rank, "broadcast(src=0)")
    assert heard.message == text
    assert heard.calls == calls
