"""A wait of more than 10 s is logged once: which operation, for whom, and which line of the
program waits."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist.rank import whereabouts
from aiodist.testing import Conditions, Simulation

AWAY = 40.0


def simulated(size: int = 2, **options: Any) -> Simulation:
    conditions = Conditions(delay=(20e-6, 200e-6), loss=0.0)
    return Simulation(size, seed=1, conditions=conditions, **options)


def told(caplog: pytest.LogCaptureFixture, logger: str) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == logger and record.levelno == logging.WARNING
    ]


def waits(
    caplog: pytest.LogCaptureFixture,
    program: Callable[[aiodist.Group], Awaitable[Any]],
    size: int = 2,
    **options: Any,
) -> tuple[list[str], list[str]]:
    """What the ranks have logged, and what the coordinator has, while the last rank does something
    else for a while before it runs `program`."""

    async def main(group: aiodist.Group) -> None:
        await group.barrier()
        if group.rank == group.size - 1:
            await asyncio.sleep(AWAY)
        await program(group)

    outcomes = simulated(size, **options).run(main)
    assert outcomes == [None] * size
    return told(caplog, "aiodist.group"), told(caplog, "aiodist.coordinator")


def test_a_collective_that_waits(caplog: pytest.LogCaptureFixture) -> None:
    async def program(group: aiodist.Group) -> None:
        await group.all_reduce(np.ones(3), tag="loss")  # here

    ranks, coordinator = waits(caplog, program, 3)
    assert len(ranks) == 2
    for text in ranks:
        assert text.startswith("group 'world' epoch 1: all_reduce tag 'loss' #0 has waited for 1")
        assert " s for rank 2 (in no operation at simulation/test_long_waits.py:" in text
        line = program.__code__.co_firstlineno + 1
        assert text.endswith(f"; at simulation/test_long_waits.py:{line} in {program.__qualname__}")
    begin, end = coordinator
    assert begin.startswith("stalled: group=world, seconds=1")
    assert "what=all_reduce tag 'loss' #0, missing=rank 2, why=rank 2: in no operation" in begin
    assert end.startswith("stall over: group=world, seconds=")
    assert AWAY <= float(end.rpartition("=")[2]) < AWAY + 5


async def agree(group: aiodist.Group) -> None:
    await group.agree(True)


async def rendezvous(group: aiodist.Group) -> None:
    await (await group.rendezvous()).barrier()


async def split(group: aiodist.Group) -> None:
    await (await group.split(0)).barrier()


async def send(group: aiodist.Group) -> None:
    """A message that nobody takes."""
    if group.rank == 0:
        await group.send(np.ones(10_000_000, np.uint8), 1)
    else:
        await group.recv(src=0)


async def store(group: aiodist.Group) -> None:
    if group.rank == 0:
        await group.store.wait("weights")
    else:
        await group.store.set("weights", b"")


@pytest.mark.parametrize(
    ("program", "begin"),
    [
        (agree, "agree #0 has waited for 10 s for rank 1 (in no operation"),
        (rendezvous, "rendezvous #0 has waited for 10 s for rank 1 (in no operation"),
        (split, "split #0 has waited for 1"),
        (send, "send tag 0 has waited for 1"),
        (store, "store.wait('weights') has waited for 10 s"),
    ],
)
def test_whatever_has_a_deadline(
    caplog: pytest.LogCaptureFixture, program: Callable[[Any], Any], begin: str
) -> None:
    [text], [first, last] = waits(caplog, program)
    assert text.startswith(f"group 'world' epoch 1: {begin}")
    if program is not store:
        assert "rank 1 (in no operation" in text
    assert "; at simulation/test_long_waits.py:" in text
    assert first.startswith("stalled: ")
    assert last.startswith("stall over: ")


def test_a_rank_that_cannot_say_why_it_waits_stays(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> str:
        raise ZeroDivisionError

    async def program(group: aiodist.Group) -> None:
        await group.barrier()

    monkeypatch.setattr(whereabouts, "of_work", fails)
    waits(caplog, program)
    assert "group 'world': no news of a long wait" in caplog.messages


@pytest.mark.parametrize("length", [3, 500_000])
def test_a_window_whose_owner_is_busy(caplog: pytest.LogCaptureFixture, length: int) -> None:
    """It names the call of the program, and not the messages for it."""

    async def main(group: aiodist.Group) -> None:
        async with await group.expose(np.zeros(length)) as window:
            await window.fence()
            if group.rank == 0:
                await window.put(1, ..., np.ones(length))  # here
            else:
                simulation.network.later_by(AWAY, simulation.nodes[1].resume)
                simulation.nodes[1].block()

    simulation = simulated()
    simulation.run(main)
    [text] = told(caplog, "aiodist.group")
    begin, _ = told(caplog, "aiodist.coordinator")
    assert text.startswith("group 'world/expose' epoch 1: put has waited for 1")
    assert " s for rank 1 (" in text
    line = main.__code__.co_firstlineno + 4
    assert text.endswith(f"; at simulation/test_long_waits.py:{line} in {main.__qualname__}")
    assert "what=put, missing=rank 1" in begin


async def receive(group: aiodist.Group) -> None:
    if group.rank == 0:
        await group.recv()
    else:
        await group.send(1, 0)


async def probe(group: aiodist.Group) -> None:
    if group.rank == 0:
        await group.probe()
        await group.recv()
    else:
        await group.send(1, 0)


async def endless(group: aiodist.Group) -> None:
    await group.barrier(timeout=math.inf)


@pytest.mark.parametrize("program", [receive, probe, endless])
def test_what_may_wait_for_ever_is_no_stall(
    caplog: pytest.LogCaptureFixture, program: Callable[[Any], Any]
) -> None:
    assert waits(caplog, program) == ([], [])


def test_data_on_a_slow_way_is_no_stall(caplog: pytest.LogCaptureFixture) -> None:
    async def program(group: aiodist.Group) -> None:
        await group.broadcast(np.ones(3_000_000, np.uint8))
        if group.rank == 0:
            await group.send(np.ones(3_000_000, np.uint8), 1)
        else:
            await group.recv()

    conditions = Conditions(delay=(20e-6, 200e-6), loss=0.0, rate=150_000)
    outcomes = Simulation(2, seed=1, conditions=conditions).run(program)
    assert outcomes == [None, None]
    assert told(caplog, "aiodist.group") == []


@pytest.mark.parametrize("late", [0, 1])
def test_a_message_on_a_slow_way_was_matched_though_its_deadline_is_over(late: int) -> None:
    async def program(group: aiodist.Group) -> None:
        timeout = 3.0 if group.rank == late else math.inf
        if group.rank == 0:
            work = group.send(np.ones(3_000_000, np.uint8), 1, timeout=timeout)
        else:
            work = group.recv(timeout=timeout)
        if group.rank == late:
            with pytest.raises(
                aiodist.CollectiveTimeoutError,
                match=r"^not completed( by rank 1 \(.*\))? within 3 s",
            ):
                await work
        await group.barrier()
        work.cancel()

    conditions = Conditions(delay=(20e-6, 200e-6), loss=0.0, rate=150_000)
    assert Simulation(2, seed=1, conditions=conditions).run(program) == [None, None]


def test_each_is_told_once_and_many_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def program(group: aiodist.Group) -> None:
        await asyncio.gather(*(group.all_reduce(1, tag=tag) for tag in range(50)))

    [text], [_, _] = waits(caplog, program)
    assert "; 49 more of this rank wait, too; at " in text


def test_a_coordinator_that_is_away_is_said_to_be_so(caplog: pytest.LogCaptureFixture) -> None:
    simulation = simulated(1, durable=True)

    async def program(group: aiodist.Group) -> None:
        simulation.restart_coordinator(AWAY)
        await asyncio.sleep(1.0)
        await group.store.get("key")

    assert simulation.run(program) == [None]
    text = next(one for one in told(caplog, "aiodist.group") if "store.get" in one)
    assert "store.get('key') has waited for 10 s; the coordinator is away: no coordinator a" in text


def test_a_join_that_waits_for_a_rank(caplog: pytest.LogCaptureFixture) -> None:
    simulation = simulated(2)

    async def join(rank: int) -> None:
        await asyncio.sleep(AWAY * rank)
        async with simulation.connecting(rank, timeout=300.0) as group:
            await group.barrier()

    assert simulation.play({0: join(0), 1: join(1)}) == [None, None]
    [text] = told(caplog, "aiodist.session")
    assert text.startswith(
        "group 'world': waiting to join for 10 s: the group is not complete: 1 of 2 have joined; "
        "missing: rank 1; at "
    )
    begin, end = told(caplog, "aiodist.coordinator")
    assert "what=join, why=the group is not complete: 1 of 2 have joined; missing: rank 1" in begin
    assert end.startswith("stall over: ")


def test_a_join_that_waits_for_the_coordinator(caplog: pytest.LogCaptureFixture) -> None:
    simulation = simulated(1)

    async def join() -> None:
        simulation.restart_coordinator(AWAY)
        async with simulation.connecting(0, timeout=300.0) as group:
            await group.barrier()

    assert simulation.play({0: join()}) == [None]
    [text] = told(caplog, "aiodist.control")
    assert text.startswith("no coordinator answered at tcp://10.0.0.1:29500 for 1")
    assert "Trying until 300 s are over; at " in text


def test_a_join_that_gives_up_names_its_timeout_and_not_the_time_that_was_left() -> None:
    simulation = simulated(1)

    async def main() -> None:
        simulation.restart_coordinator(3.0)
        with pytest.raises(aiodist.JoinTimeoutError, match="gave up joining after 4 s: the group"):
            await aiodist.connect(simulation.address, rank=0, size=2, timeout=4.0)

    assert simulation.play({0: main()}) == [None]
