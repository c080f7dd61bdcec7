"""Loans: kept until the last view is gone, or its holder; for good where nobody can say."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from aiodist.devices import shares
from aiodist.devices.shares import HELD, KEPT, RELEASED, Shares
from aiodist.errors import ProtocolError


@pytest.fixture(autouse=True)
def for_good(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    kept: list[Any] = []
    monkeypatch.setattr(shares, "_for_good", kept)
    yield kept


@pytest.fixture
def said() -> list[tuple[int, int, int]]:
    return []


@pytest.fixture
def rank(said: list[tuple[int, int, int]]) -> Shares:
    loop: Any = SimpleNamespace(
        is_closed=lambda: False, call_soon_threadsafe=lambda call, *args: call(*args)
    )

    def failed(then: Any, error: Exception) -> None:
        raise error

    return Shares(loop, lambda *word: said.append(word), lambda events, then: then(), failed)


def test_a_loan_lasts_until_all_have_returned_it(rank: Shares) -> None:
    number = rank.lend("memory", {1, 2})
    rank.heard(1, RELEASED, number)
    rank.heard(1, RELEASED, number)
    assert number in rank._lent
    rank.rank_lost(2)
    assert not rank._lent


def test_the_last_view_that_goes_returns_it(rank: Shares, said: list[Any]) -> None:
    holder = rank.borrow(1, 7, [])
    view = [holder]
    del holder
    gc.collect()
    assert not said
    view.clear()
    gc.collect()
    assert said == [(1, RELEASED, 7)]


def test_who_never_got_it_says_so(rank: Shares, said: list[Any]) -> None:
    kept = rank.borrow(1, 7, [])
    rank.heard(1, HELD, 7)
    rank.heard(1, HELD, 8)
    assert said == [(1, RELEASED, 8)]
    assert kept is not None


def test_at_the_end_of_the_group_all_is_kept_for_good(
    rank: Shares, said: list[Any], for_good: list[Any]
) -> None:
    rank.lend("memory", {1})
    view = rank.borrow(2, 9, [])
    rank.close()
    assert said == [(2, KEPT, 9)]
    assert for_good == ["memory"]
    del view
    gc.collect()
    assert len(said) == 1


def test_memory_that_a_leaver_uses_is_kept(rank: Shares, for_good: list[Any]) -> None:
    number = rank.lend("memory", {1})
    rank.heard(1, KEPT, number)
    rank.rank_lost(1)
    assert for_good == ["memory"]


def test_other_words_are_refused(rank: Shares) -> None:
    with pytest.raises(ProtocolError, match="rank 1 says 99"):
        rank.heard(1, 99, 0)
