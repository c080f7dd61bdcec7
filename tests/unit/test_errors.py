"""Errors: what they are, what they say, and that they survive a way to another process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from aiodist import errors

WHERE: dict[str, Any] = {"group": "g", "epoch": 2, "op": "scan", "tag": "t", "seq": 0}

OWN: dict[str, dict[str, Any]] = {
    "JoinTimeoutError": {"missing": (1, 3)},
    "PeerLostError": {"ranks": (0, 2)},
    "CollectiveTimeoutError": {"missing": (1,), "last_seen": {1: "in barrier()"}},
    "CollectiveAbortedError": {"rank": 1, "reason": "cancelled"},
    "QuorumLostError": {"present": 1, "quorum": 2},
    "StaleError": {"round": 7},
    "MismatchError": {"calls": {0: "scan(1)", 1: "scan(2)"}},
}
"""The fields of those that have some of their own."""

ALL = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type)),
    key=lambda kind: kind.__name__,
)
KINDS = [kind for kind in ALL if issubclass(kind, errors.AiodistError)]


def made(kind: type[errors.AiodistError]) -> errors.AiodistError:
    return kind("what was wrong", **OWN.get(kind.__name__, {}), **WHERE)


def test_each_is_in_the_tree_of_the_docstring() -> None:
    assert errors.__doc__ is not None
    for kind in KINDS:
        assert kind.__name__ in errors.__doc__


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_it_arrives_as_it_was(kind: type[errors.AiodistError], way: Any) -> None:
    error, arrived = made(kind), way(made(kind))
    assert type(arrived) is kind
    assert vars(arrived) == vars(error)
    assert (str(arrived), arrived.args) == (str(error), error.args)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ({}, "why"),
        ({"group": "g"}, "why [group 'g']"),
        ({"epoch": 0}, "why [epoch 0]"),
        ({"op": "scan"}, "why [scan]"),
        ({"tag": 0}, "why [tag 0]"),
        ({"tag": b"made"}, "why"),  # aiodist's own
        ({"seq": 0}, "why [#0]"),
        (WHERE, "why [group 'g', epoch 2, scan, tag 't', #0]"),
    ],
)
def test_the_text_says_where(where: dict[str, Any], text: str) -> None:
    assert str(errors.AiodistError("why", **where)) == text


def test_ranks_ascend_and_are_named_once() -> None:
    assert errors.PeerLostError("", ranks=[3, 1, 3]).ranks == (1, 3)
    assert errors.GroupRevokedError("").ranks == ()
    assert errors.JoinTimeoutError("", missing=[2, 0, 2]).missing == (0, 2)
    late = errors.CollectiveTimeoutError("", missing=iter([1, 0, 1]))
    assert (late.missing, late.last_seen) == ((0, 1), {})


def test_what_is_given_is_copied() -> None:
    calls, seen = {0: "a"}, {1: "b"}
    mismatch = errors.MismatchError("", calls=calls)
    late = errors.CollectiveTimeoutError("", last_seen=seen)
    calls.clear()
    seen.clear()
    assert (mismatch.calls, late.last_seen) == ({0: "a"}, {1: "b"})


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.JoinTimeoutError, TimeoutError),
        (errors.CollectiveTimeoutError, TimeoutError),
        (errors.MessageTooLargeError, ValueError),
    ],
)
def test_some_are_builtin_errors_as_well(kind: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(kind, builtin)


GROUP = ExceptionGroup(
    "two", [ValueError("no"), ExceptionGroup("one", [KeyError(), OSError("no")])]
)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("no"), "ValueError: no"),
        (ValueError(), "ValueError"),
        (RuntimeError("CUDA error\nFor debugging\n"), "RuntimeError: CUDA error For debugging"),
        (GROUP, "ValueError: no; KeyError; OSError: no"),
        (ExceptionGroup("the same", [ValueError("no"), ValueError("no")]), "ValueError: no"),
        (BaseExceptionGroup("any", [KeyboardInterrupt()]), "KeyboardInterrupt"),
    ],
)
def test_an_exception_in_words_is_its_leaves(error: BaseException, words: str) -> None:
    assert errors.in_words(error) == words


def test_words_may_leave_out_where_it_was() -> None:
    error = errors.AiodistError("why", group="g")
    assert errors.in_words(error) == "AiodistError: why [group 'g']"
    assert errors.in_words(error, located=False) == "AiodistError: why"


def test_groups_may_be_nested_at_any_depth() -> None:
    error: Exception = ValueError("no")
    for _ in range(5000):
        error = ExceptionGroup("one", [error])
    assert errors.in_words(error) == "ValueError: no"


def test_all_steps_are_taken_despite_errors() -> None:
    taken: list[str] = []

    def step(name: str, error: Exception | None = None) -> None:
        taken.append(name)
        if error is not None:
            raise error

    first = KeyError("first")
    with pytest.raises(KeyError) as raised:
        errors.despite_errors(
            lambda: step("a", first), lambda: step("b", ValueError()), lambda: step("c")
        )
    assert raised.value is first
    assert taken == ["a", "b", "c"]
    errors.despite_errors(lambda: step("d"))


def test_an_exception_without_text_is_told_by_its_class() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert errors.in_words(BrokenError()) == "BrokenError"
