"""Timers of the state machine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiodist.membership.timers import Timers


def test_keys_come_out_in_order_of_their_deadline() -> None:
    timers: Timers[str] = Timers()
    assert timers.next() is None
    timers.set("late", 3.0)
    timers.set("early", 1.0)
    timers.set("middle", 2.0)
    assert timers.next() == 1.0
    assert timers.pop_due(0.5) == []
    assert timers.pop_due(2.0) == ["early", "middle"]
    assert timers.next() == 3.0


def test_a_deadline_moves_both_ways_and_goes() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 5.0)
    timers.set("a", 9.0)
    assert timers.next() == 9.0
    timers.set("a", 2.0)
    assert timers.next() == 2.0
    timers.cancel("a")
    timers.cancel("unknown")
    assert timers.next() is None
    assert timers.pop_due(100.0) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.none() | st.integers(0, 20), st.booleans()), max_size=60
    )
)
def test_the_heap_agrees_with_a_plain_dict(steps: list[tuple[int, int | None, bool]]) -> None:
    timers: Timers[int] = Timers()
    model: dict[int, float] = {}
    for key, when, pop in steps:
        if when is None:
            timers.cancel(key)
            model.pop(key, None)
        elif pop:
            due = sorted(one for one, at in model.items() if at <= when)
            popped = timers.pop_due(when)
            assert sorted(popped) == due
            deadlines = [model.pop(one) for one in popped]
            assert deadlines == sorted(deadlines)
        else:
            timers.set(key, when)
            model[key] = when
        assert timers.next() == min(model.values(), default=None)


def test_cancelled_keys_do_not_pile_up() -> None:
    timers: Timers[int] = Timers()
    timers.set(-1, 1.0)
    for key in range(1000):
        timers.set(key, 1e9)
        timers.cancel(key)
    assert len(timers._heap) <= 100
    assert timers.next() == 1.0
