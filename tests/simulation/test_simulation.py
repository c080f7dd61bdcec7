"""Ranks on a simulated network: what is reported of them, and that it is the same every time."""

from __future__ import annotations

import asyncio
import itertools
import linecache
import os
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from seeds import seeds

import aiodist
from aiodist.composing import started
from aiodist.testing import Conditions, HangError, InvariantError, Killed, Simulation, explore
from aiodist.testing.__main__ import main, play
from aiodist.testing.scenario import scenario
from aiodist.testing.workload import Run
from aiodist.transports import bundle
from aiodist.work import Unseen


async def add(group: aiodist.Group, length: int = 1000) -> float:
    x = np.full(length, group.rank + 1.0)
    await group.barrier()
    await group.all_reduce(x)
    return float(x[0])


def test_ranks_work_in_no_time():
    simulation = Simulation(3)
    assert simulation.run(add) == [6.0, 6.0, 6.0]
    done = [entry for entry in simulation.history.entries if entry.op == "all_reduce"]
    assert [entry.end for entry in done] == ["done"] * 3
    assert len({entry.digest for entry in done}) == 1
    assert 0 < simulation.loop.time() < 10


@pytest.mark.parametrize("point", ["start", "entered", "phase", "before_complete"])
@pytest.mark.parametrize("action", ["kill", "unplug"])
def test_a_rank_that_dies_at_a_point_of_an_operation(point, action):
    simulation = Simulation(3, lease=5.0)
    fault = simulation.faults.fail_at(1, "all_reduce", point, action)
    # Of a small array it would have sent all that others need before anybody hears of the call.
    outcomes = simulation.run(partial(add, length=20_000))
    assert fault.happened
    assert isinstance(outcomes[1], Killed)
    for outcome in (outcomes[0], outcomes[2]):
        lost = isinstance(outcome, aiodist.PeerLostError) and outcome.ranks == (1,)
        assert lost or outcome == 6.0
    assert any(isinstance(outcome, aiodist.PeerLostError) for outcome in outcomes) or (
        point == "before_complete"
    )
    assert simulation.loop.time() < 5.0 + 2.0  # not at a deadline


def test_a_collective_that_is_called_after_a_loss_fails_at_once():
    async def program(group: aiodist.Group) -> float:
        loop = asyncio.get_running_loop()
        with pytest.raises(aiodist.PeerLostError):
            await group.all_reduce(np.ones(5))
        await asyncio.sleep(1.0 if group.rank == 2 else 20.0)
        start = loop.time()
        with pytest.raises(aiodist.PeerLostError):
            await group.barrier(tag="after")
        return loop.time() - start

    simulation = Simulation(4, lease=5.0)
    simulation.faults.fail_at(0, "all_reduce", "start", "kill")
    _, *waited = simulation.run(program)
    # Rank 2 hears from rank 1 first, which has not called it yet.
    assert max(waited) < 0.1


def test_votes_go_on_when_the_coordinator_is_restarted():
    async def program(group: aiodist.Group) -> tuple[int, int, bool, int]:
        for turn in range(3):
            group = await group.shrink()
            flag = await group.agree(group.rank != turn)
        return group.epoch, group.size, flag, await group.all_reduce(1)

    for durable in (True, False):
        for number in range(12):
            simulation = Simulation(3, seed=number, durable=durable)
            how = ("reset", "close", "silent")[number % 3]
            for at in (0.002, 0.003):
                when = at + number * 0.0004
                simulation.network.at(when, simulation.restart_coordinator, 0.001, how)
            outcomes = simulation.run(program)
            assert outcomes[0][0] >= 4
            assert outcomes == [outcomes[0]] * 3
            assert outcomes[0][1:] == (3, False, 3)


def test_a_cancel_at_a_point_of_an_operation():
    async def program(group: aiodist.Group) -> str:
        await group.barrier()
        await asyncio.sleep(group.rank)
        try:
            await group.all_reduce(np.ones(5), tag="t")
        except (asyncio.CancelledError, aiodist.CollectiveAbortedError) as error:
            await group.barrier()  # the group is usable
            return type(error).__name__
        return "done"

    simulation = Simulation(2)
    simulation.faults.fail_at(0, "all_reduce", "entered", "cancel")
    assert simulation.run(program) == ["CancelledError", "CollectiveAbortedError"]


@pytest.mark.parametrize("kind", [aiodist.AiodistError, ValueError])
def test_an_exception_at_a_point_of_an_operation(kind):
    async def program(group: aiodist.Group) -> float:
        await group.barrier()
        return float(await group.all_reduce(group.rank + 1.0, tag="fails"))

    simulation = Simulation(2)
    error = kind("out of order")
    simulation.faults.fail_at(1, "all_reduce", "phase", error)
    first, second = simulation.run(program)
    assert isinstance(first, aiodist.CollectiveAbortedError)
    assert "out of order" in str(first)
    assert second is error
    with pytest.raises(ValueError, match="phase"):
        simulation.faults.fail_at(1, "all_reduce", "start", error)


def test_a_simulation_runs_once_and_in_no_other_loop():
    async def in_a_loop(call: Callable[..., Any], *args: Any) -> None:
        call(*args)

    simulation = Simulation(2)
    for call, *args in ((explore, add), (simulation.run, add)):
        with pytest.raises(RuntimeError, match="another one runs in this thread"):
            asyncio.run(in_a_loop(call, *args))
    simulation.run(add)
    with pytest.raises(RuntimeError, match="runs once: make another"):
        simulation.run(add)


def test_sizes_and_limits_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="size is at least 1, not 0"):
        Simulation(0)
    with pytest.raises(ValueError, match="limit is a finite number of seconds"):
        Simulation(2).run(add, limit=float("inf"))


def test_a_stopped_rank_that_comes_back_in_time_loses_nothing():
    simulation = Simulation(2, lease=5.0)
    simulation.faults.fail_at(1, "all_reduce", "entered", "stop", seconds=3.0)
    assert simulation.run(add) == [3.0, 3.0]
    assert simulation.loop.time() > 3.0


def test_a_rank_that_is_stopped_for_too_long_is_evicted_and_learns_it():
    simulation = Simulation(2, lease=5.0)
    simulation.faults.fail_at(1, "barrier", "entered", "stop", seconds=20.0)
    first, second = simulation.run(add)
    assert isinstance(first, aiodist.PeerLostError)
    assert isinstance(second, (aiodist.GroupClosedError, aiodist.PeerLostError))


def test_the_last_frames_of_an_operation_that_nobody_takes():
    """Rank 0 has all it needs from rank 1, which takes nothing any more, and dies."""

    async def program(group: aiodist.Group) -> float:
        await group.barrier()
        x = np.full(4000, group.rank + 1.0)
        await group.all_reduce(x, tag="large")
        return float(x[0])

    conditions = Conditions(room=(700, 100_000), loss=0.0, short=0.0)
    errors = 0
    for seed in range(24):
        simulation = Simulation(2, seed=seed, conditions=conditions, lease=5.0)
        simulation.faults.fail_at(1, "all_reduce", "entered", "stop", seconds=100.0)
        simulation.network.later_by(1.0, simulation.nodes[1].kill)
        outcomes = simulation.run(program)
        assert simulation.loop.time() < 5.0
        errors += isinstance(outcomes[0], aiodist.PeerLostError)
    assert 0 < errors < 24  # some, as it happens, had got rid of all


LOST = (aiodist.PeerLostError, aiodist.CollectiveAbortedError)
PAIRS = list(itertools.permutations(range(4), 2))


@pytest.mark.parametrize(("giver", "other"), PAIRS)
@pytest.mark.parametrize("dies", [False, True])
def test_all_who_live_hear_what_a_rank_gave_up(giver, other, dies):
    """`giver` gives an operation up while it does not reach `other`: because their link broke, or
    because they are cut off from each other, and it dies before that ends."""

    async def program(group: aiodist.Group) -> float:
        network, nodes = simulation.network, simulation.nodes
        await group.all_to_all([0] * group.size)  # all links are up
        await asyncio.sleep(0.5)
        if group.rank == giver:
            if dies:
                network.partition([nodes[giver]], [nodes[other]])
            else:
                network.break_links(nodes[giver], nodes[other])
            await asyncio.sleep(0.1)
            assert group.all_reduce(1, tag="given up").cancel()
            await asyncio.sleep(0.1)
            if dies:
                nodes[giver].kill()
        await asyncio.sleep(2.0 if group.rank == other else 1.0)
        if group.rank != giver:
            with pytest.raises(LOST):
                await group.all_reduce(1, tag="given up")
        at = simulation.loop.time()
        await asyncio.sleep(5.0)  # nobody hears anything by the end of another
        return at

    simulation = Simulation(4, conditions=Conditions(loss=0.0))
    outcomes = simulation.run(program)
    assert isinstance(outcomes.pop(giver), Killed if dies else float)
    assert max(outcomes) < 4.0


def test_a_closed_group_leaves_no_connection_behind():
    async def program(group: aiodist.Group) -> bool:
        await group.close()
        return group._actor.control.is_open

    simulation = Simulation(2)
    assert simulation.run(program) == [False, False]


def test_a_run_that_does_not_end():
    async def program(group: aiodist.Group) -> None:
        await group.recv(src=1 - group.rank)

    with pytest.raises(HangError, match="recv tag") as caught:
        Simulation(2, seed="s").run(program, limit=100.0)
    assert caught.value.__notes__ == ["in Simulation(2, seed='s')"]
    line = (
        r"simulation/test_simulation\.py:\d+ in .*program: await group\.recv\(src=1 - group\.rank\)"
    )
    for rank in range(2):
        assert re.search(rf"\n  rank {rank}: {line}\n", str(caught.value))
    assert " at 0x" not in str(caught.value)


def test_a_program_that_polls_goes_on_and_may_hang():
    async def program(group: aiodist.Group) -> int:
        work = group.all_reduce(1) if group.rank < ranks else group.recv(src=0)
        while not work.done():  # noqa: ASYNC110, it is what this is about
            await asyncio.sleep(0)
        return await work

    ranks = 2
    assert Simulation(2).run(program) == [2, 2]
    ranks = 1
    with pytest.raises(HangError, match="not over after 10 s"):
        Simulation(2).run(program, limit=10.0)


def test_tasks_of_a_killed_rank_are_not_among_those_that_hang():
    async def program(group: aiodist.Group) -> None:
        await asyncio.sleep(1000.0)

    simulation = Simulation(2)
    simulation.network.later_by(10.0, simulation.nodes[0].kill)
    with pytest.raises(HangError, match="rank 1: ") as caught:
        simulation.run(program, limit=100.0)
    assert "rank 0: " not in str(caught.value)


def test_a_fault_happens_to_its_rank_in_a_smaller_group_as_well():
    async def program(group: aiodist.Group) -> int:
        part = await group.split(group.rank % 2)
        return await part.all_reduce(1)

    simulation = Simulation(4)
    simulation.faults.fail_at(1, "all_reduce", "start")
    outcomes = simulation.run(program)
    assert isinstance(outcomes[1], Killed) and isinstance(outcomes[3], aiodist.PeerLostError)
    assert outcomes[::2] == [2, 2]


def test_a_fault_that_does_not_happen_fails_the_test():
    for nth, came in ((0, 0), (1, 1)):
        for required in (True, False):
            simulation = Simulation(2)
            op = "broadcast" if came == 0 else "all_reduce"
            fault = simulation.faults.fail_at(
                1, op, "before_complete", "kill", nth=nth, required=required
            )
            if required:
                text = f"rank 1 came to 'before_complete' of '{op}' {came} times, not {nth + 1}"
                with pytest.raises(InvariantError, match=text):
                    simulation.run(add)
            else:
                assert simulation.run(add) == [3.0, 3.0]
            assert not fault.happened


def test_values_that_differ_are_found():
    async def program(group: aiodist.Group) -> None:
        work = group.all_reduce(np.ones(3))
        await work

    simulation = Simulation(2, conditions=Conditions(loss=0.0))

    def tamper(work: aiodist.Work) -> None:
        [entry] = [one for one in simulation.history.entries if one.scope.rank == 1]
        entry.digest = "another"

    simulation.faults.fail_at(1, "all_reduce", "before_complete", tamper)
    with pytest.raises(InvariantError, match="different values"):
        simulation.run(program)


def test_what_is_left_behind_is_found():
    async def heartbeat() -> None:
        await asyncio.sleep(10_000)

    async def program(group: aiodist.Group) -> None:
        if group.rank == 1:
            named = asyncio.create_task(asyncio.sleep(10_000), name="forgotten")
            program.kept = [named, asyncio.create_task(heartbeat())]
            await asyncio.sleep(0)

    line = heartbeat.__code__.co_firstlineno + 1
    for _ in range(2):  # the text does not depend on what ran before
        with pytest.raises(InvariantError) as caught:
            Simulation(2, seed=7).run(program)
        text = "rank 1 left a task over (await or cancel it): "
        assert caught.value.problems == [
            f"{text}forgotten: in sleep",
            f"{text}simulation/test_simulation.py:{line} in {heartbeat.__qualname__}: "
            "await asyncio.sleep(10_000)",
        ]
        assert caught.value.__notes__ == ["in Simulation(2, seed=7)"]


def test_a_generator_that_is_still_to_be_closed_is_found():
    async def lines():
        try:
            yield 1
        finally:
            await asyncio.sleep(10_000)

    async def program(group: aiodist.Group) -> None:
        async for _ in lines():
            break

    with pytest.raises(InvariantError, match=r"left a task over .*: in async_generator_a"):
        Simulation(1).run(program)


def test_a_socket_that_is_left_open_is_found():
    async def program(group: aiodist.Group) -> None:
        loop: Any = asyncio.get_running_loop()
        if group.rank == 1:
            program.kept = loop.new_socket(socket.AF_INET, socket.SOCK_STREAM, 0)

    with pytest.raises(InvariantError, match=r"^rank 1 left <.*> open: close it\n"):
        Simulation(2).run(program)


# ---- random programs ----


ONCE_FOUND = (20497, 21532)
"""Seeds that have found something."""


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("n", [1, 200_000])
def test_a_forgotten_await_is_reported(held, n):
    """With its line, whether the Work is dropped or is still there when the group closes."""
    kept = []

    async def program(group):
        works = [group.all_reduce(np.ones(n)), group.sendrecv(1, 1 - group.rank)]
        await asyncio.sleep(1)
        if held:
            kept.append(works)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(InvariantError) as found:
            Simulation(2, seed=1).run(program)
    assert len(found.value.problems) == 4
    for text in found.value.problems:
        place, _, rest = text.partition(": ")
        file, _, line = place.rpartition(":")
        assert linecache.getline(file, int(line)).strip().startswith("works = [group.all_reduce")
        assert "closes" in rest or not held


def test_a_rank_that_is_killed_has_not_forgotten_an_await():
    async def program(group):
        works = [group.barrier(tag=name) for name in ("a", "b")]
        await works[0]
        if group.rank == 1:
            simulation.nodes[1].kill()
            await asyncio.sleep(1)
        await works[1]

    simulation = Simulation(2, seed=1)
    outcomes = simulation.run(program)
    assert isinstance(outcomes[1], Killed)


@pytest.mark.parametrize("seed", [*seeds(14, 24), *ONCE_FOUND])
@pytest.mark.sample(6)
def test_random_programs_hold_the_invariants(seed):
    problems = play(Run(scenario(seed)))
    assert not problems, f"replay: python -m aiodist.testing simulate --seeds {seed} -v\n{problems}"


def test_an_operation_of_a_killed_rank_ends_while_the_loop_is_there():
    """Also one that a task goes on with, though its Work is kept."""
    ended, kept = [], []

    class Waiter:
        _unseen = Unseen()

        @started
        async def wait(self):
            loop = asyncio.get_running_loop()
            try:
                await loop.create_future()
            finally:
                ended.append(loop.is_closed())

    async def program(group):
        if group.rank == 1:
            kept.append(Waiter().wait())
            sim.nodes[1].kill()
        await asyncio.sleep(1)

    sim = Simulation(2)
    sim.run(program)
    assert ended == [False]


@pytest.mark.parametrize("seed", seeds(6, 12))
@pytest.mark.sample(2)
def test_random_programs_over_links_of_several_connections(seed, monkeypatch):
    monkeypatch.setattr(bundle, "EVENTS", 0)  # all are used as soon as one is full
    found = scenario(seed)
    far = replace(found.conditions, delay=(3e-3, 20e-3), control="cubic")
    problems = play(Run(replace(found, conditions=far)))
    assert not problems, f"scenario {seed}, with {far}\n{problems}"


@pytest.mark.timeout(300)
def test_a_seed_always_does_the_same():
    """Also in another process, where hashes and addresses are others."""
    code = (
        "import logging; logging.disable(50)\n"
        "from aiodist.testing.scenario import scenario\n"
        "from aiodist.testing.workload import Run\n"
        "for seed in (1, 4, 11):\n"
        "    run = Run(scenario(seed)); run.play()\n"
        "    print(run.simulation.history.digest(), run.simulation.loop.time())\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=140,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == 3


def test_the_command(capsys):
    assert main(["simulate", "--seeds", "0:2"]) == 0
    assert "2 seeds in" in capsys.readouterr().out
    assert main(["simulate", "--seeds", "5:", "--seconds", "0"]) == 0
    assert "0 seeds in" in capsys.readouterr().out
    for wrong in ("x", "5:3"):
        with pytest.raises(SystemExit):
            main(["simulate", "--seeds", wrong])


def test_a_failing_seed_is_printed_with_what_replays_it(capsys, monkeypatch):
    monkeypatch.setattr("aiodist.testing.steps._all_reduce", lambda *_: [(None, None)])
    monkeypatch.setattr("aiodist.testing.__main__.play", lambda run: "something is wrong")
    assert main(["simulate", "--seeds", "7"]) == 1
    out = capsys.readouterr().out
    assert "something is wrong" in out
    assert "replay: python -m aiodist.testing simulate --seeds 7 -v" in out
