"""Who is waited for in a roll call, and when its answer is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiodist.engine.roll_call import RollCall, marked, unmarked
from aiodist.shared_memory.board import ON_DEVICE


class Group:
    """One of three ranks."""

    size = 3

    def __init__(self) -> None:
        self.called: list[Any] = []

    def call_roll(self, op: Any) -> None:
        self.called.append(op)


class Lane:
    """A lane that rank 1 shares with `others`. `there`: whether they have all entered."""

    def __init__(self, *others: int, on_devices: bool) -> None:
        self.others = others
        self.there = False
        self.board = SimpleNamespace(all_on_devices=lambda seq: self.there and on_devices)

    def wait_for(self, peers: Any, publishes: int) -> bool:
        return self.there


def operation(lane: Lane | None) -> Any:
    return SimpleNamespace(lane=lane, place=ON_DEVICE, roll={}, seq=4, advance=lambda: None)


def begun(lane: Lane | None) -> tuple[Group, Any, RollCall]:
    group, op = Group(), operation(lane)
    roll_call = RollCall(group)
    roll_call.belong(op)
    return group, op, roll_call


def test_the_mark() -> None:
    assert unmarked(marked(b"all_reduce(SUM, float32[3])")) == b"all_reduce(SUM, float32[3])"
    assert unmarked(b"barrier()") == b"barrier()"


def test_all_are_waited_for_as_long_as_theirs_are_on_devices() -> None:
    group, op, roll_call = begun(None)
    assert group.called == [op]
    assert not roll_call.run()
    op.roll[2] = True
    assert not roll_call.run()
    op.roll[0] = True
    assert roll_call.run()
    assert roll_call.all_on_devices


def test_one_with_an_array_of_the_host_is_enough() -> None:
    _, op, roll_call = begun(None)
    op.roll[2] = False
    assert roll_call.run()
    assert not roll_call.all_on_devices


@pytest.mark.parametrize("on_devices", [False, True])
def test_on_a_lane_of_all_ranks_nothing_is_sent(on_devices: bool) -> None:
    lane = Lane(0, 2, on_devices=on_devices)
    group, op, roll_call = begun(lane)
    assert op.place == 0  # its array is not in memory that all ranks see
    assert not roll_call.run()
    lane.there = True
    assert roll_call.run()
    assert roll_call.all_on_devices is on_devices
    assert not group.called


def test_a_lane_of_some_ranks_is_not_asked() -> None:
    lane = Lane(0, on_devices=True)
    lane.there = True
    group, op, roll_call = begun(lane)
    assert group.called == [op]
    assert not roll_call.run()
