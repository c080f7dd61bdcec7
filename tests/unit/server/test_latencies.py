"""How long operations take."""

from __future__ import annotations

import json

import pytest

from aiodist.coordinator.totals import Latency
from aiodist.wire.counts import SECONDS
from aiodist_server.history import MOST_POINTS, WINDOW
from aiodist_server.latencies import MOST_ROWS, Latencies, quantile


def counts(**buckets: int) -> list[int]:
    """``counts(b3=5)``: five operations in the bucket of the bound 3."""
    return [buckets.get(f"b{index}", 0) for index in range(len(SECONDS) + 1)]


@pytest.mark.parametrize(
    ("buckets", "share", "seconds"),
    [
        ({}, 0.5, None),
        ({"b0": 4}, 0.5, SECONDS[0] / 2),
        ({"b3": 4}, 1.0, SECONDS[3]),
        ({"b3": 4}, 0.5, SECONDS[2] * 2),
        ({"b1": 50, "b4": 50}, 0.5, SECONDS[1]),
        ({"b1": 50, "b4": 50}, 0.75, SECONDS[3] * 2),
        ({"b1": 1, "b11": 9}, 0.5, SECONDS[-1]),
    ],
)
def test_quantiles(buckets: dict[str, int], share: float, seconds: float | None) -> None:
    found = quantile(counts(**buckets), share)
    assert found == (None if seconds is None else pytest.approx(seconds, rel=0.01))


def test_a_point_is_of_what_ended_since_the_one_before() -> None:
    totals = {
        ("all_reduce", 0): Latency(counts(b2=10)),
        ("barrier", 0): Latency(counts()),
        ("recv", 0): Latency(counts(b9=1000)),
        ("get", 0): Latency(counts(b9=4)),
        ("other", 0): Latency(counts(b9=3)),  # as sendrecv
    }
    known = Latencies()
    known.take({}, 8.0, counted=True)
    known.take(totals, 10.0, counted=True)
    totals["barrier", 0] = Latency(counts(b5=10))
    known.take(totals, 12.0, counted=True)
    known.take(totals, 14.0, counted=True)
    told = json.loads(json.dumps(known.plain(totals, 20.0)))
    assert told["series"]["ago"] == [10.0, 8.0, 6.0]
    first, second, third = told["series"]["median"]
    assert (first, second) == (pytest.approx(SECONDS[1] * 2), pytest.approx(SECONDS[4] * 2))
    assert third is told["series"]["most"][2] is None
    assert [(row["op"], row["size"], row["count"]) for row in told["rows"]] == [
        ("recv", "1KiB", 1000), ("all_reduce", "1KiB", 10), ("barrier", "1KiB", 10),
        ("get", "1KiB", 4), ("other", "1KiB", 3),
    ]  # fmt: skip


def test_what_ended_while_members_were_not_asked_makes_no_point() -> None:
    known = Latencies()
    for now, (ended, counted) in enumerate([(1, 1), (2, 1), (2, 0), (9, 0), (9, 1), (9, 1)]):
        totals = {("all_reduce", 0): Latency(counts(b2=ended))}
        known.take(totals, float(now), counted=bool(counted))
    series = known.plain(totals, 6.0)["series"]
    assert series["ago"] == [5.0, 1.0]
    assert series["median"] == [pytest.approx(SECONDS[1] * 2), None]


def test_there_is_nothing_before_members_measure() -> None:
    known = Latencies()
    known.take({}, 10.0, counted=True)
    assert known.plain({}, 12.0) == {"series": {"ago": [], "median": [], "most": []}, "rows": []}


def test_it_is_bounded() -> None:
    known = Latencies()
    totals = {(f"op{number}", 0): Latency(counts(b2=number)) for number in range(40)}
    for now in range(-1, 2 * MOST_POINTS):
        known.take(totals, float(now), counted=True)
    told = known.plain(totals, 2.0 * MOST_POINTS)
    assert len(told["series"]["ago"]) == MOST_POINTS
    assert [row["op"] for row in told["rows"]] == [f"op{39 - n}" for n in range(MOST_ROWS)]
    assert known.plain(totals, 2.0 * MOST_POINTS + WINDOW)["series"]["ago"] == []
