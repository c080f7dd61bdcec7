"""What the others hear of a mismatch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiodist.engine.failures import (
    Verdict,
    mismatch_text,
    silent,
    stuck_text,
    timeout_text,
    verdict_of,
)
from aiodist.errors import AiodistError, CollectiveAbortedError, MismatchError, PeerLostError
from aiodist.wire import kinds
from aiodist.wire.frames import MAX_HEADER, pack_fields

WHERE = {"group": "g", "epoch": 1, "op": "broadcast"}
PARTY: Any = SimpleNamespace(rank=0, size=3, group="g", epoch=1)


def told(error: MismatchError, own_rank: int, own_call: str) -> MismatchError:
    verdict, _ = Verdict.parse([*verdict_of(error, PARTY).fields(), []], 3)
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


def test_a_rank_that_is_in_the_operation_has_not_missed_it() -> None:
    """Its link carries nothing, but it has told the coordinator."""
    seen = {1: "in all_reduce #0 for 3.5 s", 2: "in all_reduce #01 for 4.5 s"}
    text = timeout_text(5.0, [1, 2, 3], seen, "all_reduce #0")
    assert text == (
        "not entered within 5 s by rank 2 (in all_reduce #01 for 4.5 s), rank 3 (no answer); "
        "no word within 5 s from rank 1 (in all_reduce #0 for 3.5 s)"
    )
    assert timeout_text(5.0, [1], seen, "barrier #0").startswith("not entered within 5 s by rank 1")


def test_if_all_have_entered_those_are_named_that_do_not_answer() -> None:
    doing = {
        3: "no answer; its last sign of life came 3.1 s ago",
        1: "its event loop has not turned for at least 2.0 s",
        2: "in all_reduce #0 for 3.5 s",
        4: "in no operation (last: all_reduce #0 done)",
    }
    assert sorted(mute := silent(doing)) == [1, 3]
    assert stuck_text(5.0, mute, 2) == (
        "not done after 5 s, though all ranks have entered: rank 1 (its event loop has not turned "
        "for at least 2.0 s), rank 3 (no answer; its last sign of life came 3.1 s ago)"
    )
    assert stuck_text(5.0, {}, 2).endswith("have entered; data of rank 2 is missing")
    assert stuck_text(5.0, {}, None).endswith("though all ranks have entered")


def test_a_rank_of_this_group_is_named() -> None:
    tired = CollectiveAbortedError("gave up", rank=2, reason="tired", **WHERE)
    assert verdict_of(tired, PARTY) == Verdict("error", "tired", 2)


@pytest.mark.parametrize(
    "error",
    [
        CollectiveAbortedError("x", rank=2, reason="x", group="h", epoch=1),
        CollectiveAbortedError("x", rank=2, reason="x", group="g", epoch=2),
        CollectiveAbortedError("x", rank=3, reason="x", **WHERE),  # a twin of the same name
        PeerLostError("x", ranks=[2], group="h", epoch=1),
    ],
)
def test_ranks_of_another_group_are_not_named(error: AiodistError) -> None:
    assert verdict_of(error, PARTY) == Verdict("error", f"{type(error).__name__}: x", 0)


@pytest.mark.parametrize(
    ("ranks", "text"), [(4096, "in barrier tag '…' for 3 s"), (80, "x" * 1000), (2, "a" * 80_000)]
)
def test_a_verdict_fits_in_a_header_and_names_all_ranks(ranks: int, text: str) -> None:
    details = dict.fromkeys(range(1, ranks), text)
    fields = Verdict("timeout", "\N{GRINNING FACE}" * 2000, 0, details).fields()
    header = pack_fields(kinds.ABORT, b"x" * 16, "t" * 1024, 1 << 60, *fields, [*range(1, ranks)])
    assert len(header) <= MAX_HEADER
    heard, _ = Verdict.parse([*fields, []], ranks)
    assert list(heard.details) == list(details)
    assert all(text.startswith(seen[:-1]) and len(seen) > 1 for seen in heard.details.values())


def test_a_verdict_of_any_text_can_be_sent() -> None:
    """A file name that is not UTF-8 has lone surrogates."""
    for verdict in (Verdict("aborted", "\udcff", 0), Verdict("mismatch", "", 0, {1: "\udcff"})):
        pack_fields(*verdict.fields())


def test_equal_calls_that_are_too_long_to_be_told_do_not_differ() -> None:
    calls = {rank: "barrier()" if rank == 1 else f"split({'x' * 999})" for rank in range(99)}
    own = calls.pop(7)
    verdict = Verdict("mismatch", mismatch_text(calls), 0, calls)
    told, _ = Verdict.parse([*verdict.fields(), []], 100)
    heard = told.error(7, own, WHERE)
    assert isinstance(heard, MismatchError)
    assert heard.calls[7] == heard.calls[0]


def test_a_call_that_begins_as_another_differs() -> None:
    calls = {0: "broadcast(src=1", 1: "broadcast(src=10"}
    own = calls.pop(1)
    heard = Verdict("mismatch", mismatch_text(calls), 0, calls).error(1, own, WHERE)
    assert isinstance(heard, MismatchError)
    assert heard.calls == {0: "broadcast(src=1", 1: own}
