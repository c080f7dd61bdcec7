"""What may be sent to peers that may not have entered a collective yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiodist.engine.calls import MAX_UNSOLICITED, Calls
from aiodist.wire import kinds


class Said:
    """A group of three of which only what it says counts; and an operation of it."""

    may_send = Calls.may_send
    goes_unasked = Calls.goes_unasked
    refund = Calls.refund

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.party = SimpleNamespace(say=lambda *words: self.said.append(words))
        self._unsolicited = [0, 0, 0]


@pytest.fixture
def calls() -> Any:
    return Said()


def operation(seq: int) -> Any:
    return SimpleNamespace(tag=None, seq=seq, unsolicited={}, knocked=set())


def test_the_first_frames_go_unasked_and_the_rest_waits(calls: Any) -> None:
    op = operation(0)
    assert calls.may_send(op, 1, MAX_UNSOLICITED + 1)  # one of any size: else nothing ever went
    assert not calls.may_send(op, 1, 1)
    assert calls.may_send(op, 2, 1)
    calls.refund(op, 1)
    assert calls.may_send(op, 1, 1)


def test_what_has_gone_is_counted_whatever_it_was(calls: Any) -> None:
    op = operation(-1)  # it has no number yet
    calls.goes_unasked(op, 1, MAX_UNSOLICITED)
    calls.goes_unasked(op, 1, 1)
    assert not calls.said
    assert not calls.may_send(operation(0), 1, 1)
    calls.refund(op, 1)
    assert calls.may_send(operation(1), 1, 1)


def test_who_waits_knocks_once_at_each_peer(calls: Any) -> None:
    first, second = operation(0), operation(1)
    for peer in (1, 2):
        calls.may_send(first, peer, MAX_UNSOLICITED)
    for _ in range(3):  # each time that its links are looked at
        assert not calls.may_send(second, 1, 1)
        assert not calls.may_send(second, 2, 1)
    assert calls.said == [(1, kinds.KNOCK, None, 1), (2, kinds.KNOCK, None, 1)]
    assert not calls.may_send(first, 1, 1)
    assert calls.said[2:] == [(1, kinds.KNOCK, None, 0)]
