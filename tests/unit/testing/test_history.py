"""Histories: what is noted of operations, and that each kind of wrong is seen in them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from aiodist.errors import PeerLostError
from aiodist.testing.history import History, digest_of
from aiodist.trace import Scope


class Work:
    def __init__(self, op: str, seq: int | None, tag: object) -> None:
        self.op, self.seq, self.tag = op, seq, tag


class Ranks:
    """Two ranks, each a process of its own, that do what a test says; every step takes a second."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.running = ""
        self.history = History(lambda: self.clock, lambda: self.running)

    def hook(self, rank: int, point: str, work: Work, value: Any = None) -> None:
        self.running = f"rank {rank}"
        self.history(Scope("g", 1, rank, 2, b"id"), point, work, value)
        self.clock += 1

    def start(
        self, rank: int, op: str = "all_reduce", seq: int | None = 0, tag: Any = None
    ) -> Work:
        work = Work(op, seq, tag)
        self.hook(rank, "start", work)
        return work

    def does(self, rank: int, value: Any, op: str = "all_reduce", **given: Any) -> None:
        self.hook(rank, "before_complete", self.start(rank, op, **given), value)

    def problems(self, **given: Any) -> list[str]:
        return self.history.problems(**given)


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_what_is_noted(ranks: Ranks) -> None:
    work = ranks.start(1, seq=None, tag="t")
    work.seq = 3
    ranks.hook(1, "entered", work)
    (entry,) = ranks.history.entries
    assert (entry.process, entry.op, entry.tag, entry.seq) == ("rank 1", "all_reduce", "t", 3)
    assert (entry.end, entry.started, entry.ended) == ("start", 0.0, None)
    work.tag = "received"
    ranks.hook(1, "before_complete", work, 5)
    assert (entry.end, entry.ended, entry.tag) == ("done", 2.0, "received")
    assert entry.digest == digest_of(5)
    ranks.hook(1, "failed", work, ValueError())  # its end was noted
    assert (entry.end, entry.error) == ("done", None)
    assert ranks.problems() == []


@pytest.mark.parametrize(
    ("point", "error"), [("failed", PeerLostError("", ranks=[1])), ("cancelled", None)]
)
def test_other_ends(ranks: Ranks, point: str, error: Any) -> None:
    ranks.hook(0, point, ranks.start(0), error)
    (entry,) = ranks.history.entries
    assert (entry.end, entry.error, entry.digest) == (point, error, "")
    assert ranks.problems() == []


def test_what_a_dead_process_does_is_not_noted(ranks: Ranks) -> None:
    history = History(lambda: 0.0, lambda: "")
    history(Scope("g", 1, 0, 2, b"id"), "start", Work("scan", 0, None), None)
    assert history.entries == []


@pytest.mark.parametrize(
    ("op", "seq", "values", "wrong"),
    [
        ("all_reduce", 0, (1, 1), False),
        ("all_reduce", 0, (1, 2), True),
        ("broadcast", 7, (1, 2), True),
        ("scan", 0, (1, 2), False),
        ("all_reduce", None, (1, 2), False),
    ],
)
def test_different_values_of_one_collective(
    ranks: Ranks, op: str, seq: int | None, values: tuple[int, int], wrong: bool
) -> None:
    for rank, value in enumerate(values):
        ranks.does(rank, value, op, seq=seq)
    found = ranks.problems()
    assert len(found) == wrong
    assert all("ranks completed with different values" in one for one in found)


def test_only_what_was_done_has_a_value(ranks: Ranks) -> None:
    ranks.does(0, 1)
    ranks.hook(1, "cancelled", ranks.start(1))
    assert ranks.problems() == []


@pytest.mark.parametrize(
    ("seqs", "tags", "op", "wrong"),
    [
        ((0, 1), (None, None), "scan", False),
        ((0, 0), (None, None), "scan", True),
        ((0, 0), (1, "1"), "scan", False),
        ((0, 0), (1, True), "scan", False),
        ((-1, -1), (None, None), "scan", False),
        ((None, None), (None, None), "scan", False),
        ((0, 0), (None, None), "recv", False),
    ],
)
def test_one_number_for_two_operations(
    ranks: Ranks, seqs: Any, tags: Any, op: str, wrong: bool
) -> None:
    for seq, tag in zip(seqs, tags, strict=True):
        ranks.does(0, None, op, seq=seq, tag=tag)
    found = ranks.problems()
    assert len(found) == wrong
    assert all("one number for two operations" in one for one in found)


def test_an_operation_that_never_ends(ranks: Ranks) -> None:
    ranks.start(0)
    ranks.start(1)
    assert len(ranks.problems()) == 2
    (one,) = ranks.problems(is_alive=lambda process: process == "rank 1")
    assert one.startswith("never ended: ") and "rank 1 of 'g'" in one


@pytest.mark.parametrize(
    ("seconds", "stopped", "late"), [(1.0, 0.0, False), (0.5, 0.0, True), (0.5, 0.5, False)]
)
def test_an_end_after_the_deadline(
    ranks: Ranks, seconds: float, stopped: float, late: bool
) -> None:
    work = ranks.start(0)
    ranks.history.expect(work, seconds)
    ranks.hook(0, "before_complete", work)
    found = ranks.problems(stopped=lambda process: stopped)
    assert [one.partition(":")[0] for one in found] == [
        "ended 0.500000 s after its deadline"
    ] * late


def test_a_deadline_of_what_has_ended_is_met(ranks: Ranks) -> None:
    work = ranks.start(0)
    ranks.hook(0, "cancelled", work)
    ranks.history.expect(work, 0.0)
    assert ranks.problems() == []


def test_errors_that_no_contract_mentions(ranks: Ranks) -> None:
    ranks.hook(0, "failed", ranks.start(0), ValueError("why"))
    (one,) = ranks.problems()
    assert one.startswith("an error that is not one of aiodist's: ") and "why" in one


def test_the_digest_is_that_of_all_that_happened(ranks: Ranks) -> None:
    digests = {ranks.history.digest()}
    work = ranks.start(0)
    digests.add(ranks.history.digest())
    ranks.hook(0, "before_complete", work, 1)
    digests.add(ranks.history.digest())
    assert len(digests) == 3


def test_a_value_is_named_by_dtype_and_content() -> None:
    values = [
        1,
        1.0,
        "1",
        np.ones(2),
        np.ones(3),
        np.ones(2, np.float32),
        np.zeros(2),
        [1, 2],
        [2, 1],
        {"a": 1},
        None,
        [[1], 2],
        [1, [2]],
        [True, None],
        {True: None},
        [],
        {},
        [[], {}],
        [np.ones(2), [1]],
        [[np.ones(2), 1]],
    ]
    assert len({digest_of(value) for value in values}) == len(values)
    assert digest_of(np.ones(2)) == digest_of(np.ones(4)[::2])
    long, other = np.zeros(5000), np.zeros(5000)
    other[2500] = 1  # which its text does not show
    assert digest_of(long) != digest_of(other)


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (np.ones((2, 3)), [np.ones(3), np.ones(3)]),
        (np.ones(3), torch.ones(3, dtype=torch.float64)),
        ([np.ones(3), 1], (np.ones(3), 1)),
        ({"a": (1, ())}, {"a": [1, []]}),
        ([np.ones(1), np.ones(2)], np.ones(3)),  # of different ranks
    ],
)
def test_the_form_of_a_value_does_not_count(value: Any, other: Any) -> None:
    assert digest_of(value) == digest_of(other)


class Envelope(NamedTuple):
    source: int
    tag: object


def test_an_envelope_is_named_by_its_fields() -> None:
    digests = {digest_of(Envelope(*fields)) for fields in [(0, "t"), (1, "t"), (0, "u")]}
    assert len(digests) == 3


class Config:
    def __init__(self) -> None:
        self.kind = "kind"  # one string with the name, until it was pickled


@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: Envelope(0, value)], ids="ab")
def test_objects_that_were_pickled_have_the_same_digest(wrap: Callable[[Any], Any]) -> None:
    config = Config()
    copy = pickle.loads(pickle.dumps(config))
    assert pickle.dumps(copy) != pickle.dumps(config)
    assert digest_of(wrap(copy)) == digest_of(wrap(config))
    endless: list[Any] = []
    endless.append(endless)
    assert digest_of(wrap(endless)) == type(wrap(endless)).__name__  # it cannot travel
    arrays = [{"by": config, "more": [array]} for array in (np.ones(3), np.zeros(3))]
    assert digest_of(wrap(arrays[0])) != digest_of(wrap(arrays[1]))
