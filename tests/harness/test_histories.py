"""Histories of the store: how they are recorded, written for checkers of others, and judged."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from exports import edn, promela
from recording import Op, record
from spin import IS_HERE, is_linearizable

WRITTEN = Op(0, "write", (1,), 0.0, 1.0, 1)
HISTORIES = {
    "a read of what was written": ([WRITTEN, Op(1, "read", (), 2.0, 3.0, 1)], True),
    "a stale read": ([WRITTEN, Op(1, "read", (), 2.0, 3.0, 0)], False),
    "a read beside a write": ([WRITTEN, Op(1, "read", (), 0.5, 3.0, 0)], True),
    "a write without an answer that took effect": (
        [Op(0, "write", (2,), 0.0), Op(1, "read", (), 1.0, 2.0, 2)],
        True,
    ),
    "one that took effect and was lost again": (
        [
            Op(0, "write", (2,), 0.0),
            Op(1, "read", (), 1.0, 2.0, 2),
            Op(1, "read", (), 3.0, 4.0, 0),
        ],
        False,
    ),
    "two that both set the same value": (
        [WRITTEN, Op(1, "cas", (1, 2), 2.0, 4.0, 1), Op(2, "cas", (1, 3), 3.0, 5.0, 1)],
        False,
    ),
    "one of two": (
        [WRITTEN, Op(1, "cas", (1, 2), 2.0, 4.0, 1), Op(2, "cas", (1, 3), 3.0, 5.0, 0)],
        True,
    ),
}
needs_spin = pytest.mark.skipif(not IS_HERE, reason="Spin is not installed, or there is no gcc")


def test_the_format_of_knossos() -> None:
    history = [
        WRITTEN,
        Op(1, "cas", (1, 2), 0.5, 2.0, 0),
        Op(2, "read", (), 3.0, 4.0, 1),
        Op(3, "write", (4,), 3.5),
    ]
    assert edn(history).splitlines() == [
        "[{:process 0, :type :invoke, :f :write, :value 1}",
        " {:process 1, :type :invoke, :f :cas, :value [1 2]}",
        " {:process 0, :type :ok, :f :write, :value 1}",
        " {:process 1, :type :fail, :f :cas, :value [1 2]}",
        " {:process 2, :type :invoke, :f :read, :value nil}",
        " {:process 3, :type :invoke, :f :write, :value 4}",
        " {:process 2, :type :ok, :f :read, :value 1}",
        " {:process 3, :type :info, :f :write, :value 4}]",
    ]


def test_a_call_may_take_effect_once_those_before_it_have() -> None:
    model = promela([WRITTEN, Op(1, "read", (), 2.0, 3.0, 1)])
    assert ":: atomic { !done1 && done0 && value == 1 -> done1 = true }" in model
    assert ":: done0 && done1 -> assert(false)" in model


def test_a_seed_gives_one_history_in_which_each_client_has_one_call_at_a_time() -> None:
    history = record(3)
    assert history == record(3)
    for client in range(4):
        own = [op for op in history if op.client == client]
        assert all(a.ended is not None and a.ended <= b.begun for a, b in itertools.pairwise(own))


@needs_spin
@pytest.mark.parametrize("name", HISTORIES)
def test_what_spin_says_of_known_histories(name: str, tmp_path: Path) -> None:
    history, expected = HISTORIES[name]
    assert is_linearizable(history, tmp_path) == expected


@needs_spin
@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_the_store_is_linearizable(seed: int, tmp_path: Path) -> None:
    assert is_linearizable(record(seed), tmp_path)
