"""Profiles of costs: what is written, said, read, and which counts."""

from __future__ import annotations

import math

import pytest

from aiodist.schedules.costs import (
    FASTEST,
    LEAST,
    MOST,
    ONE_HOST_TCP,
    Costs,
    agreed,
    parse,
    said,
    said_trip,
    written,
)

FAR = ONE_HOST_TCP._replace(alpha=0.02)
FARTHER = ONE_HOST_TCP._replace(alpha=0.3, connection=0.0, gamma=0.0)
GOOD = written(FAR)


@pytest.mark.parametrize(
    "costs", [ONE_HOST_TCP, FAR, FARTHER, Costs(1, 2, 3, 4, 5, 6), Costs(1, 2, 3, 4, 5, 6, 0.1)]
)
def test_what_is_written_and_said_is_read_exactly(costs: Costs) -> None:
    assert parse(written(costs, "of this network\n\n7 ranks")) == costs
    assert agreed([(said(costs),)]) == costs
    assert len(said(costs)) < 256  # as an address may be long


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "alpha, beta, connection, frame, gamma, grant is missing"),
        (GOOD.replace("gamma", "delta"), "delta, gamma is missing, or is none of these"),
        (f"{GOOD}more = 1.0", "more is missing, or is none of these"),
        ("alpha", "Expected '=' after a key"),
        *[
            (GOOD.replace(repr(FAR.alpha), value), f"alpha = {value}.*expected seconds")
            for value in ("'a'", "-1e-06", "nan", "inf", repr(MOST * 2))
        ],
        (GOOD.replace(repr(FAR.alpha), "true"), "alpha = True"),
        (written(FAR._replace(beta=0.0)), rf"beta = 0\.0.*from {LEAST:g}"),
        (written(FAR._replace(frame=LEAST / 2)), "frame = 5e-16"),
    ],
)
def test_what_is_no_profile_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        parse(text)


def test_a_number_of_seconds_may_be_whole() -> None:
    assert parse(GOOD.replace(repr(FAR.alpha), "1")).alpha == 1.0


@pytest.mark.parametrize(
    ("members", "costs"),
    [
        ([], ONE_HOST_TCP),
        ([("tcp://10.0.0.1:1",), ()], ONE_HOST_TCP),
        ([("tcp://10.0.0.1:1",), ("user:1", said(FAR)), (said(FARTHER),)], FAR),
        ([(said(FARTHER),), (said(FAR),)], FARTHER),
        ([("costs:1,2,3",), ("costs:a,b,c,d,e,f",), (said(FAR),)], FAR),
        ([("costs:" + ",".join(["0.0"] * 6),)], ONE_HOST_TCP),
        ([(said(FAR._replace(alpha=math.inf)),)], ONE_HOST_TCP),
    ],
)
def test_the_profile_of_the_lowest_rank_that_has_one_counts(
    members: list[tuple[str, ...]], costs: Costs
) -> None:
    assert agreed(members) == costs


@pytest.mark.parametrize(
    ("members", "trip"),
    [
        ([("tcp://10.0.0.1:1",), ()], 0.0),
        ([(), (said_trip(0.02),)], 0.02),  # the coordinator is in the first of them
        ([(said_trip(0.02),), (said_trip(0.1),), ("user:1", said_trip(0.03))], 0.13),
        ([("trip:far",), ("trip:-1",), (said_trip(0.02),)], 0.02),
        ([(said_trip(math.inf),)], 0.0),
        ([("trip:nan",), (said_trip(0.02),)], 0.02),
        ([(said(FAR), said_trip(0.02))], 0.02),
        ([(said(FAR._replace(trip=0.5)),), (said_trip(0.02),)], 0.5),  # a profile knows better
        ([("costs:1,2,3,4,5,6,7,8",), (said_trip(0.02),)], 0.02),
    ],
)
def test_the_farthest_are_as_far_as_by_way_of_the_coordinator(
    members: list[tuple[str, ...]], trip: float
) -> None:
    found = agreed(members)
    assert found.trip == trip
    assert found.way == round(trip * FASTEST)
    assert found[:-1] in (ONE_HOST_TCP[:-1], FAR[:-1])
