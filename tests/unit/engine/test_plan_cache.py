"""What is kept, and for how long."""

from __future__ import annotations

from collections.abc import Callable

from aiodist.engine.phase import prepared
from aiodist.engine.plan_cache import MOST_PLAN_STEPS, cached_by_weight
from aiodist.schedules.plan import Copy, Plan, Span, X


def recording(most: int) -> tuple[Callable[[int], list[int]], list[int]]:
    """A function whose result for n weighs n, and the calls that were not answered from what is
    kept."""
    calls: list[int] = []

    @cached_by_weight(most, len)
    def make(n: int) -> list[int]:
        calls.append(n)
        return [n] * n

    return make, calls


def test_the_oldest_are_dropped_where_all_would_weigh_too_much() -> None:
    make, calls = recording(6)
    assert make(2) is make(2)
    for n in (1, 3, 2):  # six in all
        assert make(n) == [n] * n
    assert calls == [2, 1, 3]
    make(2)
    make(4)  # all have to go for that but the last
    assert calls == [2, 1, 3, 4]
    make(2)
    assert calls == [2, 1, 3, 4, 2]
    make(4)
    assert calls == [2, 1, 3, 4, 2]


def test_many_small_ones_are_kept() -> None:
    make, calls = recording(1000)
    for _ in range(3):
        for n in range(40):
            make(n)
    assert calls == list(range(40))


def test_the_last_one_is_kept_however_heavy_it_is() -> None:
    make, calls = recording(6)
    make(1)
    make(100)
    make(100)
    assert calls == [1, 100]
    make(1)
    make(100)
    assert calls == [1, 100, 1, 100]


def test_what_another_thread_has_made_meanwhile_counts_once() -> None:
    inner: list[int] = []

    @cached_by_weight(4, len)
    def make(n: int) -> list[int]:
        if n == 2 and not inner:
            inner.append(n)
            make(2)  # as if by another thread
        return [n] * n

    make(1)
    make(2)
    assert make(1) is make(1)
    first = make(1)
    make(2)
    assert make(1) is first, "its weight was counted twice"


def test_plans_are_kept_by_their_steps() -> None:
    """Those of small arrays, of which there may be hundreds, and few of huge ones."""
    made: list[int] = []

    def plan(count: int) -> Plan:
        made.append(count)
        return Plan("of the test", 0, 1, (Copy(Span(X, 0, 1), Span(X, 1, 2)),) * count, True)

    small = range(1, 201)
    for _ in range(2):
        for count in small:
            prepared(plan, count)
    assert made == list(small)
    prepared(plan, MOST_PLAN_STEPS)  # nothing else is kept beside it
    prepared(plan, 200)
    assert made == [*small, MOST_PLAN_STEPS, 200]
