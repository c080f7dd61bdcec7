"""How the loop finds that a device is done: closely at first, then by a timer, and never late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aiodist.devices import waiting
from aiodist.devices.waiting import Looks, Settled


class Loop:
    """A clock, and what is to be called when."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, call: Callable[[], None]) -> Any:
        self.calls.append((delay, call))
        return self

    def call_soon(self, call: Callable[[], None]) -> Any:
        return self.call_later(0.0, call)

    def cancel(self) -> None:
        self.calls.clear()

    def turn(self) -> float:
        """Does what is to be done next, and returns how long that took to come."""
        ((delay, call),) = self.calls
        self.calls.clear()
        self.now += delay
        call()
        return delay


class Event:
    handle = b""

    def __init__(self) -> None:
        self.is_done = False
        self.error: Exception | None = None

    def done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.is_done


def test_what_is_done_is_not_waited_for() -> None:
    loop: Any = Loop()
    assert Looks(loop, [], lambda: None).look()
    assert not loop.calls


def test_it_looks_in_every_turn_and_then_by_a_timer() -> None:
    loop: Any = Loop()
    events, told = [Event(), Event()], []
    looks = Looks(loop, events, lambda: told.append(loop.now))
    assert not looks.look()
    assert loop.turn() == 0.0
    loop.now = waiting.CLOSELY
    assert loop.turn() == 0.0
    assert loop.turn() == waiting.LOOK
    events[0].is_done = True
    assert loop.turn() == waiting.LOOK
    assert not told  # one of them is not enough
    events[1].is_done = True
    loop.turn()
    assert told == [loop.now]
    assert not loop.calls


def test_who_has_stopped_is_told_nothing() -> None:
    loop: Any = Loop()
    looks = Looks(loop, [Event()], pytest.fail)
    looks.look()
    looks.stop()
    looks.stop()
    assert not loop.calls


def test_a_pause_of_a_program_resumes_when_the_device_is_there() -> None:
    loop: Any = Loop()
    event = Event()
    pause = Settled(loop, event, alone=True)
    resumed: list[bool] = []
    pause.resume = lambda: resumed.append(True)
    assert pause.alone
    assert not pause.run()
    event.is_done = True
    loop.turn()
    assert resumed == [True]
    assert pause.run()


def test_a_pause_of_a_program_raises_what_the_device_has_raised_once() -> None:
    loop: Any = Loop()
    event = Event()
    pause = Settled(loop, event)
    resumed: list[bool] = []
    pause.resume = lambda: resumed.append(True)
    assert not pause.run()
    event.error = RuntimeError("illegal memory access")
    loop.turn()
    assert resumed == [True]
    event.error = None
    with pytest.raises(RuntimeError, match="illegal memory access"):
        pause.run()
    assert not loop.calls
