"""Collectives where the arrays lie: each plan stands between its user's own accesses."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import sizes

from aiodist.schedules import pull_direct
from aiodist.schedules.plan import OUT, SHARED, Await, Copy, Plan, Publish, Span, Step, X
from aiodist.testing.plan_simulator import PlanError, contributors, simulate


def used(plan: Plan) -> Plan:
    """The user fills the array before, takes the result, and writes to the array again."""
    length, own = plan.shared, SHARED + plan.rank
    if not length:
        return plan
    mine, x, out = (Span(buffer, 0, length) for buffer in (own, X, OUT))
    steps = (Copy(mine, x), *plan.steps, Copy(out, mine), Copy(mine, x))
    return plan._replace(steps=steps)


@sizes
@pytest.mark.parametrize("length", [0, 1, 5, 37, 120])
@pytest.mark.parametrize("piece", [1, 3, 64])
def test_all_reduce(size: int, length: int, piece: int) -> None:
    plans = [used(pull_direct.all_reduce(rank, size, length, piece)) for rank in range(size)]
    assert len({plan.publishes for plan in plans}) == 1
    outcome = simulate(plans, inputs=[length] * size, outputs=[length] * size)
    for out in outcome.out:
        for at, value in enumerate(out):
            units = contributors(value)
            assert [(unit.rank, unit.at) for unit in units] == [(r, at) for r in range(size)]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_no_wait_can_be_left_out(count: int) -> None:
    plans = [used(pull_direct.all_reduce(rank, 3, 18, 3)) for rank in range(3)]
    awaits = [at for at, step in enumerate(plans[0].steps) if isinstance(step, Await)]
    assert len(awaits) == 4
    steps = list(plans[0].steps)
    del steps[awaits[count - 1]]
    plans[0] = plans[0]._replace(steps=tuple(steps))
    with pytest.raises(PlanError):
        simulate(plans, inputs=[18] * 3, outputs=[18] * 3)


def test_publishes_are_counted() -> None:
    plan = pull_direct.all_reduce(1, 4, 100, 7)
    assert plan.publishes == sum(isinstance(step, Publish) for step in plan.steps)


def shown(plan: Plan, length: int) -> Plan:
    """The user fills `length` units of the array before, and writes to it again."""
    fill = Copy(Span(SHARED + plan.rank, 0, length), Span(X, 0, length))
    steps = [*plan.steps]
    # That all have filled theirs is what a call of the collective tells the others.
    entered = [Publish(), Await(tuple(q for q in range(plan.size) if q != plan.rank), 1)]
    steps = [step if isinstance(step, Publish) else later(step) for step in steps]
    return plan._replace(
        steps=(*[fill][:length], *entered, *steps, *[fill][:length]), publishes=plan.publishes + 1
    )


def later(step: Step) -> Step:
    return Await(step.peers, step.count + 1) if isinstance(step, Await) else step


@given(bounds=st.lists(st.integers(0, 9), min_size=1, max_size=6), piece=st.integers(1, 5))
def test_reduce_scatter(bounds: list[int], piece: int) -> None:
    size = len(bounds)
    starts = [0, *accumulate(bounds)]
    total = starts[-1]
    plans = [
        shown(pull_direct.reduce_scatter(rank, size, starts, piece), total) for rank in range(size)
    ]
    outcome = simulate(plans, inputs=[total] * size, outputs=bounds)
    for rank, out in enumerate(outcome.out):
        for at, value in enumerate(out):
            units = contributors(value)
            assert [(u.rank, u.at) for u in units] == [(r, starts[rank] + at) for r in range(size)]


@given(data=st.data(), size=st.integers(1, 6), piece=st.integers(1, 5))
def test_take(data: st.DataObject, size: int, piece: int) -> None:
    lengths = [
        [0 if src == dst else data.draw(st.integers(0, 7)) for dst in range(size)]
        for src in range(size)
    ]
    sends = [[0, *accumulate(row)] for row in lengths]
    receives = [[0, *accumulate(column)] for column in zip(*lengths, strict=True)]
    longest = max(row[-1] for row in sends)
    plans = [
        shown(
            pull_direct.take(
                rank, size, [row[rank] for row in sends], receives[rank], longest, piece
            ),
            longest,
        )
        for rank in range(size)
    ]
    outcome = simulate(plans, inputs=[longest] * size, outputs=[bounds[-1] for bounds in receives])
    for rank, out in enumerate(outcome.out):
        expected = [
            (src, sends[src][rank] + at) for src in range(size) for at in range(lengths[src][rank])
        ]
        assert [(unit.rank, unit.at) for value in out for unit in contributors(value)] == expected


@pytest.mark.parametrize("left_out", [1, 2])
def test_no_wait_of_a_reader_can_be_left_out(left_out: int) -> None:
    """The first is that for the others' entry, the last that for their reading."""
    plans = [shown(pull_direct.reduce_scatter(rank, 3, (0, 4, 8, 12), 4), 12) for rank in range(3)]
    simulate(plans, inputs=[12] * 3, outputs=[4] * 3)
    steps = list(plans[0].steps)
    awaits = [at for at, step in enumerate(steps) if isinstance(step, Await) and step.peers]
    assert len(awaits) == 2
    del steps[awaits[left_out - 1]]
    plans[0] = plans[0]._replace(steps=tuple(steps))
    with pytest.raises(PlanError):
        simulate(plans, inputs=[12] * 3, outputs=[4] * 3)


def test_reading_long_arrays_pauses() -> None:
    plan = pull_direct.take(0, 3, (0, 0, 0), (0, 0, 10, 20), 10, 4)
    kinds = [type(step) for step in plan.steps]
    assert kinds == [Copy, Await] * 5 + [Copy, Publish, Await]
