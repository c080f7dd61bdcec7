"""Polling: for how long, by a clock that counts looks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiodist.links import progress
from aiodist.links.progress import AGAIN, LONGEST, SHORTEST, Progress

STEP = 1e-6


class Clock:
    """Every look at it takes a microsecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += STEP
        return self.now


class Quiet:
    """A link on which nothing comes before it was looked at `patience` times."""

    def __init__(self, patience: float = float("inf")) -> None:
        self.looks = 0
        self.patience = patience
        self.answer = True

    def look_for(self, prefix: bytes, into: memoryview) -> bool | None:
        self.looks += 1
        return self.answer if self.looks > self.patience else None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "_clock", made)
    return made


def look(polling: Progress, link: Any) -> tuple[bool, int]:
    """Whether it came, and after how many looks."""
    assert not polling.is_due()
    polling._turned()
    assert not polling.is_due()
    return polling.look(link, b"", memoryview(b""), crowded=False), link.looks


async def test_looking_in_vain_gets_shorter_and_is_tried_again(clock: Clock) -> None:
    polling = Progress(asyncio.get_running_loop())
    looks = [look(polling, Quiet())[1] for _ in range(AGAIN + 2)]
    assert looks[0] == pytest.approx(LONGEST / STEP, abs=3)
    assert looks[1] == pytest.approx(LONGEST / STEP / 2, abs=3)
    assert looks[AGAIN - 1] == pytest.approx(SHORTEST / STEP, abs=3)
    assert looks[AGAIN] == pytest.approx(looks[0], abs=3)
    assert looks[AGAIN + 1] == pytest.approx(looks[AGAIN - 1], abs=3)


async def test_one_that_pays_makes_up_for_all(clock: Clock) -> None:
    polling = Progress(asyncio.get_running_loop())
    for _ in range(AGAIN - 1):
        assert look(polling, Quiet()) != (True, 1)
    assert look(polling, Quiet(3)) == (True, 4)
    assert look(polling, Quiet())[1] == pytest.approx(LONGEST / STEP, abs=3)


async def test_something_else_ends_it(clock: Clock) -> None:
    polling = Progress(asyncio.get_running_loop())
    link = Quiet(3)
    link.answer = False
    assert look(polling, link) == (False, 4)


async def test_the_loop_gets_its_turn(clock: Clock) -> None:
    polling = Progress(asyncio.get_running_loop())
    assert not polling.is_due()
    clock.now += progress.TURN
    assert polling.is_due()
    quiet: Any = Quiet()
    assert not polling.look(quiet, b"", memoryview(b""), crowded=False)
    await asyncio.sleep(0)
    assert not polling.is_due()


async def test_who_waits_for_long_lets_others_run(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    yields: list[float] = []
    monkeypatch.setattr(progress, "_yield", lambda: yields.append(clock.now))
    polling = Progress(asyncio.get_running_loop())
    began = clock.now
    assert look(polling, Quiet()) != (True, 1)
    assert yields[0] >= began + progress.ALONE
    crowd: Any = Quiet()
    yields.clear()
    began = clock.now
    assert not polling.look(crowd, b"", memoryview(b""), crowded=True)
    assert yields[0] < began + progress.ALONE
