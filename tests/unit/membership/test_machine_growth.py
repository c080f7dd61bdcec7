"""What members do all at once costs each of them the same, however many they are.

Counted are the steps of the interpreter: no time is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from aiodist.membership.effects import Disconnected, Event, Received, Tick
from aiodist.wire.messages import EpochView, JoinRequest
from aiodist.wire.recovery import Purpose, Unreachable, Vote, WatchWaiting
from aiodist.wire.returning import Rejoin

FEW, MANY = 16, 128

New = Callable[[], Any]
"""Makes a machine with its time and its mail in hand."""


def steps(act: Callable[[], None]) -> int:
    """How many steps the interpreter takes for it."""
    count = 0

    def on_step(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return on_step

    before = sys.gettrace()
    sys.settrace(on_step)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def ask_of(rank: int, n: int) -> JoinRequest:
    return JoinRequest(group="g", id=f"id-{rank}", rank=rank, size=n)


def formed(new: New, n: int) -> Any:
    world = new()
    for rank in range(n):
        step(world, Received(rank + 1, 1, ask_of(rank, n)))
    return world


def step(world: Any, event: Event) -> None:
    """One of the machine's: that of the mail is not counted."""
    world.machine.step(event, world.now)


def view_of(world: Any) -> EpochView:
    [group] = world.machine._groups.values()
    assert group.view is not None
    return group.view


def say_all(world: Any, message: Any, first: int = 1) -> Callable[[], None]:
    """All members say the same, as one act."""
    n = len(view_of(world).members)

    def act() -> None:
        for conn in range(first, n + 1):
            step(world, Received(conn, 2, message))

    return act


def join(new: New, n: int) -> Callable[[], None]:
    def act() -> None:
        formed(new, n)

    return act


def agree(new: New, n: int) -> Callable[[], None]:
    world = formed(new, n)
    return say_all(world, Vote(view_of(world).context, 0, Purpose.AGREE))


def agree_in_part(new: New, n: int) -> Callable[[], None]:
    voters = tuple([f"id-{rank}" for rank in range(n)])
    return say_all(formed(new, n), Vote(b"a part", 0, Purpose.AGREE, members=voters))


def agree_two_by_two(new: New, n: int) -> Callable[[], None]:
    world = formed(new, n)

    def act() -> None:
        for rank in [*range(0, n, 2), *range(1, n, 2)]:
            pair = tuple([f"id-{one}" for one in (rank & ~1, rank | 1)])
            vote = Vote(b"%d" % (rank // 2), 0, Purpose.AGREE, members=pair)
            step(world, Received(rank + 1, 2, vote))

    return act


def shrink(new: New, n: int) -> Callable[[], None]:
    world = formed(new, n)
    step(world, Disconnected(1, "it broke"))
    return say_all(world, Vote(view_of(world).context, 0, Purpose.SHRINK), 2)


def report(new: New, n: int) -> Callable[[], None]:
    """A rank that nobody can reach."""
    world = formed(new, n)

    def act() -> None:
        say_all(world, Unreachable("id-0", "reset"), 2)()
        world.now = 1.0
        step(world, Tick())

    return act


def watch_and_leave(new: New, n: int) -> Callable[[], None]:
    world = formed(new, n)
    say_all(world, WatchWaiting())()
    [group] = world.machine._groups.values()

    def act() -> None:
        for conn in range(1, n + 1):
            group.forget(conn)

    return act


def come_back(new: New, n: int) -> Callable[[], None]:
    view = view_of(formed(new, n))
    world = new()

    def act() -> None:
        for rank in range(n):
            known = view if rank == 0 else None
            claim = Rejoin(ask_of(rank, n), rank, view.epoch, view.digest, (), (), known)
            step(world, Received(rank + 1, 1, claim))

    return act


ALL = [
    join,
    agree,
    agree_in_part,
    agree_two_by_two,
    shrink,
    report,
    watch_and_leave,
    come_back,
]


@pytest.mark.parametrize("what", ALL)
def test_each_costs_the_same_among_many(
    world: Any, what: Callable[[New, int], Callable[[], None]]
) -> None:
    few, many = (steps(what(type(world), n)) / n for n in (FEW, MANY))
    assert many < 1.5 * few
