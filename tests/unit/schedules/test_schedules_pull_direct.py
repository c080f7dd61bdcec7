"""Reductions where the arrays lie: each plan stands between its user's own accesses."""

from __future__ import annotations

import pytest

from aiodist.schedules import pull_direct
from aiodist.schedules.plan import OUT, SHARED, Await, Copy, Plan, Publish, Span, X
from aiodist.schedules.simulator import PlanError, contributors, simulate


def used(plan: Plan) -> Plan:
    """The user fills the array before, takes the result, and writes to the array again."""
    length, own = plan.shared, SHARED + plan.rank
    if not length:
        return plan
    mine, x, out = (Span(buffer, 0, length) for buffer in (own, X, OUT))
    steps = (Copy(mine, x), *plan.steps, Copy(out, mine), Copy(mine, x))
    return plan._replace(steps=steps)


@pytest.mark.parametrize("size", range(1, 18))
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
