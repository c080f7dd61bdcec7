"""Messages that go through the host: copies of one section while others are on their way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from standin import StandinDevice, hold

import aiodist
from aiodist import Group
from aiodist.devices import sections

Devices = Callable[[int], list[StandinDevice]]

SECTION = 1000
DATA = np.random.default_rng(5).random(10 * SECTION // 8 + 7)
"""Eleven sections."""


class Copies:
    """Counts the copies of a device, and holds it up before one of them."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, device: StandinDevice, stop: int | None = None
    ) -> None:
        self.queued = 0
        self.gate: threading.Event | None = None
        ordinary = device.copy

        def copy(stream: Any, into: Any, source: Any) -> None:
            if self.queued == stop:
                self.gate = hold(stream)
            self.queued += 1
            ordinary(stream, into, source)

        monkeypatch.setattr(device, "copy", copy)

    def go_on(self) -> None:
        assert self.gate is not None
        self.gate.set()


@pytest.fixture
def two(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> list[StandinDevice]:
    monkeypatch.setattr(sections, "SECTION", SECTION)
    return devices(2)


async def turn(groups: list[Group]) -> None:
    await asyncio.gather(*(g.barrier(tag="turn") for g in groups))


async def under_way(groups: list[Group], away: Copies, there: Copies) -> None:
    """Until the sender's device is held up, and something is on its way to the receiver's."""
    while away.gate is None or there.queued < 3:
        await turn(groups)


async def test_copies_go_on_while_sections_travel(
    two: list[StandinDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender's device is held up at the fifth section: by then most of the four before it are
    on the receiver's device."""
    out = two[1].put(np.zeros_like(DATA))
    x = two[0].put(DATA)
    away, there = Copies(monkeypatch, two[0], 4), Copies(monkeypatch, two[1])
    async with aiodist.local(2, transports=("inproc",)) as groups:
        sending, receiving = groups[0].send(x, 1), groups[1].recv(out=out)
        await under_way(groups, away, there)
        assert away.queued == 5
        assert not sending.done() and not receiving.done()
        away.go_on()
        await asyncio.gather(sending, receiving)
        np.testing.assert_array_equal(two[1].get(out), DATA)
        assert away.queued == 11


async def test_trees_with_arrays_of_all_kinds(two: list[StandinDevice]) -> None:
    wide = np.arange(600.0).reshape(20, 30)
    async with aiodist.local(2, transports=("inproc",)) as groups:
        for turned in (False, True):
            tree = {
                "a": two[0].put(DATA),
                "host": np.arange(5000),
                "none": two[0].put(np.zeros(0)),
                "b": [two[0].put(np.arange(7, dtype=np.int16)), two[0].put(wide).T],
                "c": two[0].put(np.float32(3).reshape(())),
            }
            out = {
                "a": np.zeros_like(DATA),
                "host": two[1].put(np.zeros(5000, np.int64)),
                "none": two[1].put(np.zeros(0)),
                "b": [
                    two[1].put(np.zeros(7, np.int16)),
                    two[1].put(np.zeros((20, 30))).T if turned else two[1].put(np.zeros((30, 20))),
                ],
                "c": two[1].put(np.zeros((), np.float32)),
            }
            _, got = await asyncio.gather(groups[0].send(tree, 1), groups[1].recv(out=out))
            np.testing.assert_array_equal(got["a"], DATA)
            np.testing.assert_array_equal(two[1].get(got["host"]), np.arange(5000))
            np.testing.assert_array_equal(two[1].get(got["b"][0]), np.arange(7))
            np.testing.assert_array_equal(two[1].get(got["b"][1]), wide.T)
            np.testing.assert_array_equal(two[1].get(got["c"]), 3)


async def test_between_a_device_and_a_rank_without_one(
    two: list[StandinDevice],
) -> None:
    async with aiodist.local(2, transports=("inproc",)) as groups:
        x, out = two[0].put(DATA), np.zeros_like(DATA)
        await asyncio.gather(groups[0].send(x, 1), groups[1].recv(out=out))
        np.testing.assert_array_equal(out, DATA)
        _, got = await asyncio.gather(groups[0].send(x, 1), groups[1].recv())
        np.testing.assert_array_equal(got, DATA)
        back = two[0].put(np.zeros_like(DATA))
        await asyncio.gather(groups[1].send(-DATA, 0), groups[0].recv(out=back))
        np.testing.assert_array_equal(two[0].get(back), -DATA)


async def test_a_receive_is_cancelled_between_sections(
    two: list[StandinDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, again = two[1].put(np.zeros_like(DATA)), two[1].put(np.zeros_like(DATA))
    x = two[0].put(DATA)
    away, there = Copies(monkeypatch, two[0], 6), Copies(monkeypatch, two[1])
    async with aiodist.local(2, transports=("inproc",)) as groups:
        sending, receiving = groups[0].send(x, 1), groups[1].recv(out=out)
        await under_way(groups, away, there)
        receiving.cancel()
        two[1].fill(out, 7.0)
        away.go_on()
        np.testing.assert_array_equal(two[1].get(out), np.full_like(DATA, 7.0))
        await asyncio.gather(sending, groups[1].recv(out=again))
        np.testing.assert_array_equal(two[1].get(again), DATA)
        np.testing.assert_array_equal(two[1].get(out), np.full_like(DATA, 7.0))


async def test_a_send_is_cancelled_between_sections(
    two: list[StandinDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its receive gets the next message; or is given up itself, and leaves its array alone."""
    out = two[1].put(np.zeros_like(DATA))
    xs = [two[0].put(DATA), two[0].put(-DATA)]
    for ends in ("next", "cancelled"):
        away, there = Copies(monkeypatch, two[0], 4), Copies(monkeypatch, two[1])
        async with aiodist.local(2, transports=("inproc",)) as groups:
            sending, receiving = groups[0].send(xs[0], 1), groups[1].recv(out=out)
            await under_way(groups, away, there)
            gate = hold(groups[1]._context.device_memory.stream(two[1]))
            sending.cancel()
            two[0].fill(xs[0], 9.0)
            away.go_on()
            await turn(groups)
            if ends == "next":
                gate.set()
                await asyncio.gather(groups[0].send(xs[1], 1), receiving)
                np.testing.assert_array_equal(two[1].get(out), -DATA)
                xs[0] = two[0].put(DATA)
            else:
                receiving.cancel()
                two[1].fill(out, 7.0)
                gate.set()
                np.testing.assert_array_equal(two[1].get(out), np.full_like(DATA, 7.0))


async def test_the_sender_is_lost_between_sections(
    two: list[StandinDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, x = two[1].put(np.zeros_like(DATA)), two[0].put(DATA)
    away, there = Copies(monkeypatch, two[0], 4), Copies(monkeypatch, two[1])
    async with aiodist.local(2, transports=("inproc",)) as groups:
        sending, receiving = groups[0].send(x, 1), groups[1].recv(out=out)
        await under_way(groups, away, there)
        groups[0].abort()
        for work in (sending, receiving):
            with pytest.raises(aiodist.AiodistError):
                await work
        two[1].fill(out, 7.0)
        away.go_on()
        np.testing.assert_array_equal(two[1].get(out), np.full_like(DATA, 7.0))
