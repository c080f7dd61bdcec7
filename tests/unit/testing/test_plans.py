from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.testing.plans import (
    KINDS,
    LASTING,
    NAMES,
    Planned,
    RunPlan,
    draw,
    parse,
    shrink,
    smaller,
)


@st.composite
def plans(draw: st.DrawFn) -> RunPlan:
    ranks = draw(st.integers(1, 4))
    faults = [
        Planned(
            kind,
            draw(st.integers(0, ranks - 1)),
            draw(st.integers(1, 20)),
            draw(st.sampled_from([0.0, 0.0004, 1.5e-05])),
            draw(st.sampled_from(LASTING.get(kind, (0.0,)))),
        )
        for kind in draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=4))
    ]
    return RunPlan(ranks, draw(st.integers(0, 999)), draw(st.booleans()), tuple(faults))


@given(plans())
def test_a_plan_can_be_written_and_read(plan: RunPlan) -> None:
    assert parse(str(plan)) == plan


@pytest.mark.parametrize(
    "text",
    ["", "ranks 2", "seed 1, ranks 2", "ranks 2, seed 1, kill", "ranks 2, seed 1, kill 2 at 1",
     "ranks 2, seed 1, kill 1 at 1, even network", "ranks 2, seed 1, eat 1 at 1"],
)  # fmt: skip
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a plan reads like 'ranks 3, |is no fault of 2 ranks"):
        parse(text)


def weight(plan: RunPlan) -> tuple[float, ...]:
    """Grows with what happens in a plan."""
    faults = plan.faults
    return (
        len(faults),
        plan.ranks,
        not plan.even,
        plan.seed,
        *(sum(getattr(fault, name) for fault in faults) for name in ("at", "after", "seconds")),
        sum(fault.kind == "unplug" for fault in faults),
        sum(fault.rank for fault in faults),
    )


@given(plans())
def test_smaller_plans_are_smaller(plan: RunPlan) -> None:
    for less in smaller(plan):
        assert less != plan
        assert all(a <= b for a, b in zip(weight(less), weight(plan), strict=True))
        assert all(fault.rank < less.ranks for fault in less.faults)


@given(plans())
def test_shrinking_ends_at_a_plan_that_has_no_smaller_one(plan: RunPlan) -> None:
    # It fails if a rank is killed at its third wait or later, and one is delayed at any.
    def fails(candidate: RunPlan) -> bool:
        killed = any(one.kind == "kill" and one.at >= 3 for one in candidate.faults)
        return killed and any(one.kind == "delay" for one in candidate.faults)

    if fails(plan):
        small, _ = shrink(plan, fails, 10_000)
        assert sorted(map(str, small.faults)) == ["delay 0 at 1 for 0.002", "kill 0 at 3"]
        assert (small.ranks, small.seed, small.even) == (1, 0, True)


def test_shrinking_stops_after_so_many_runs() -> None:
    runs = 0

    def fails(candidate: RunPlan) -> bool:
        nonlocal runs
        runs += 1
        return False

    shrink(draw(1, 7, NAMES, [50] * 7), fails, 5)
    assert runs == 5


def test_what_is_drawn_can_happen_and_leaves_a_rank_alive() -> None:
    seen: set[str] = set()
    for seed in range(500):
        plan = draw(seed, 3, NAMES, [4, 9, 0])
        assert plan == draw(seed, 3, NAMES, [4, 9, 0])
        seen |= {fault.kind for fault in plan.faults}
        killed = {fault.rank for fault in plan.faults if fault.kind in ("kill", "unplug")}
        assert len(killed) < 3
        for fault in plan.faults:
            assert 1 <= fault.at <= [4, 9, 1][fault.rank]
    assert seen == KINDS.keys()
    assert draw(3, 2, (), [1, 1]).faults == ()
