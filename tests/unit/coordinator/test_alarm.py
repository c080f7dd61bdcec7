"""The coordinator's timer: in time, and lenient once it was late itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aiodist.coordinator.alarm import GRACE_SECONDS, LATE_SECONDS, Alarm


class Clock:
    """A loop that is nothing but timers."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> Any:
        timer = (when, call)
        self.timers.append(timer)

        class Handle:
            def cancel(handle) -> None:
                self.timers.remove(timer)

        return Handle()

    def fire(self, late: float = 0.0) -> None:
        when, call = self.timers.pop(0)
        self.now = when + late
        call()


@pytest.fixture
def made() -> tuple[Clock, Alarm, list[float]]:
    clock, rung = Clock(), []
    return clock, Alarm(clock, lambda: rung.append(clock.now)), rung


def test_it_rings_by_the_earliest_time(made: Any) -> None:
    clock, alarm, rung = made
    for when in (110.0, 105.0, 120.0):
        alarm.ring_by(when)
    assert [when for when, _ in clock.timers] == [105.0]
    clock.fire()
    assert rung == [105.0]
    assert clock.timers == []


def test_one_that_is_late_itself_waits_until_all_is_read(made: Any) -> None:
    clock, alarm, rung = made
    alarm.ring_by(105.0)
    clock.fire(late=LATE_SECONDS + 0.01)
    assert rung == []
    [(when, _)] = clock.timers
    assert when == clock.now + GRACE_SECONDS
    clock.fire(late=LATE_SECONDS)
    assert rung == [when + LATE_SECONDS]


def test_messages_do_not_put_it_off(made: Any) -> None:
    """With each of them it is told of what is overdue."""
    clock, alarm, rung = made
    alarm.ring_by(105.0)
    clock.fire(late=LATE_SECONDS + 0.01)
    over, step = clock.now + GRACE_SECONDS, GRACE_SECONDS / 10
    while not rung and clock.now < over + GRACE_SECONDS:
        alarm.ring_by(105.0)
        while clock.timers and clock.timers[0][0] <= clock.now and not rung:
            clock.fire(late=clock.now - clock.timers[0][0])
        clock.now += step
    assert len(rung) == 1
    assert over <= rung[0] <= over + step
    alarm.ring_by(130.0)
    clock.fire(late=LATE_SECONDS + 0.01)  # the next time it is lenient again
    assert len(rung) == 1


def test_one_that_is_always_late_rings(made: Any) -> None:
    clock, alarm, rung = made
    alarm.ring_by(105.0)
    clock.fire(late=5.0)
    clock.fire(late=5.0)  # what has come meanwhile is read before it rings
    assert rung == []
    clock.fire(late=5.0)
    assert rung == [clock.now]


def test_one_that_is_called_off_does_not_ring(made: Any) -> None:
    clock, alarm, _ = made
    alarm.ring_by(105.0)
    alarm.cancel()
    alarm.cancel()
    assert clock.timers == []
    alarm.ring_by(130.0)  # later than the one before, which is forgotten
    assert [when for when, _ in clock.timers] == [130.0]
