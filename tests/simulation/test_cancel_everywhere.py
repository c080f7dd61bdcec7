"""Every operation is cancelled at every turn of the loop, on one rank: nothing is written
afterwards, no task is left, no message is lost, and the group is usable for the next operation.

For as long as it is cancelled in time, it is tried again with one more turn.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from turns import after_turns

import aiodist
from aiodist.codecs import int8
from aiodist.testing import Conditions, Simulation

SIZE = 3
VICTIM = 1
QUICK = Conditions(delay=(20e-6, 200e-6), loss=0.0)
ALL = 12
"""Turns up to which each one is tried; then steps grow."""

Array = np.ndarray[Any, Any]
Operation = Callable[[aiodist.Group, Array], Awaitable[Any]]


async def _close_made(made: aiodist.Group | None) -> None:
    if made is not None:
        await made.close()


async def _subgroup(group: aiodist.Group, x: Array) -> None:
    await _close_made(await group.subgroup([0, 1, 2]))


async def _split(group: aiodist.Group, x: Array) -> None:
    await _close_made(await group.split(0))


async def _dup(group: aiodist.Group, x: Array) -> None:
    await _close_made(await group.dup())


async def _expose(group: aiodist.Group, x: Array) -> None:
    await (await group.expose(x))._end()  # `close` is a collective of its own


COLLECTIVES: dict[str, Operation] = {
    "all_reduce": lambda group, x: group.all_reduce(x),
    "all_reduce coded": lambda group, x: group.all_reduce(x.view(np.float32), codec=int8()),
    "reduce": lambda group, x: group.reduce(x, 1),
    "broadcast": lambda group, x: group.broadcast(x, 0),
    "all_gather": lambda group, x: group.all_gather(x),
    "gather": lambda group, x: group.gather(x, 1),
    "scatter": lambda group, x: group.scatter([x] * SIZE if group.rank == 0 else None, 0),
    "reduce_scatter": lambda group, x: group.reduce_scatter(x),
    "all_to_all": lambda group, x: group.all_to_all([x] * SIZE),
    "scan": lambda group, x: group.scan(x),
    "exscan": lambda group, x: group.exscan(x),
    "barrier": lambda group, x: group.barrier(),
    "subgroup": _subgroup,
    "split": _split,
    "dup": _dup,
    "expose": _expose,
}


def turns() -> Any:
    """0, 1, 2, … and then in growing steps: a different one each time."""
    turn = 0
    while True:
        yield turn
        turn += 1 if turn < ALL else max(1, turn // 4)


async def cancelled_at(turn: int, start: Callable[[], Awaitable[Any]]) -> asyncio.Task[Any]:
    """Run it as a task, and cancel that `turn` turns of the loop later."""

    async def main() -> Any:
        return await start()

    task = asyncio.ensure_future(main())
    after_turns(2 + turn, task.cancel)  # it is called in the next one
    await asyncio.wait([task])
    return task


def play(program: Callable[[aiodist.Group], Awaitable[Any]], seed: int) -> list[Any]:
    simulation = Simulation(SIZE, seed=seed, conditions=QUICK, lease=5.0, op_timeout=20.0)
    outcomes = simulation.run(program)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def until_it_is_done(program: Callable[[aiodist.Group, int], Awaitable[bool]]) -> int:
    """Run `program` for turn after turn, until it says that nothing was cancelled: how often."""
    for count, turn in enumerate(turns()):

        async def main(group: aiodist.Group, turn: int = turn) -> bool:
            return await program(group, turn)

        if not play(main, seed=turn)[VICTIM]:
            return count
    raise AssertionError("not reached")


async def settle(group: aiodist.Group) -> None:
    """The group works, on all ranks, and all that may still travel has come."""
    for length in (3, 4000):
        x = np.full(length, group.rank + 1.0)
        await group.all_reduce(x)
        assert (x == 6.0).all()
    assert await group.all_gather(group.rank) == [0, 1, 2]
    await asyncio.sleep(1.0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("length", [3, 60_000])
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.sample(10)
def test_a_collective(name, length):
    if name in ("barrier", "subgroup", "split", "dup", "expose") and length > 3:
        pytest.skip("no array travels")

    async def program(group: aiodist.Group, turn: int) -> bool:
        x = np.full(length, float(group.rank))
        if group.rank == VICTIM:
            task = await cancelled_at(turn, lambda: COLLECTIVES[name](group, x))
            before = x.copy()
            assert task.cancelled() or task.exception() is None, task.exception()
        else:
            try:
                await COLLECTIVES[name](group, x)
            except aiodist.CollectiveAbortedError as error:
                assert error.rank == VICTIM
            except aiodist.PeerLostError as error:  # of a group that is being made
                assert name in ("subgroup", "split", "dup"), error
            before = x.copy()
        await settle(group)
        assert np.array_equal(x, before)
        return group.rank == VICTIM and task.cancelled()

    assert until_it_is_done(program) > 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("length", [3, 60_000])
def test_a_receive_loses_no_message(length):
    async def program(group: aiodist.Group, turn: int) -> bool:
        cancelled = False
        if group.rank == 0:
            for number in range(3):
                await group.send(np.full(length, float(number)), VICTIM)
        elif group.rank == VICTIM:
            out = np.full(length, -1.0)
            task = await cancelled_at(turn, lambda: group.recv(src=0, out=out))
            cancelled = task.cancelled()
            before = out.copy()
            for number in range(0 if cancelled else 1, 3):
                got = await group.recv(src=0)
                assert (got == number).all(), f"{got} where {number} was due"
            assert np.array_equal(out, before)
        await settle(group)
        return cancelled

    assert until_it_is_done(program) > 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("length", [30_000, 200_000])
def test_a_send_is_withdrawn_or_arrives(length):
    """What comes is whole, and as it was when the send was cancelled, whatever is written then."""

    async def program(group: aiodist.Group, turn: int) -> bool:
        cancelled = False
        if group.rank == VICTIM:
            x = np.full(length, 1.0)
            task = await cancelled_at(turn, lambda: group.send(x, 0))
            cancelled = task.cancelled()
            x[:] = -1.0
            await group.send(np.full(length, 2.0), 0)
        elif group.rank == 0:
            first = await group.recv(src=VICTIM)
            assert (first == first[0]).all() and first[0] in (1.0, 2.0)
            if first[0] == 1.0:
                assert ((await group.recv(src=VICTIM)) == 2.0).all()
        await settle(group)
        return cancelled

    assert until_it_is_done(program) > 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["set", "get", "add", "wait", "compare_set", "delete", "watch"])
def test_operations_of_the_store(name):
    async def watch(store: Any) -> Any:
        async with store.watch("there") as changes:
            return await anext(changes)

    calls: dict[str, Callable[[Any], Awaitable[Any]]] = {
        "set": lambda store: store.set("k", b"v"),
        "get": lambda store: store.get("there"),
        "add": lambda store: store.add("n"),
        "wait": lambda store: store.wait("later"),
        "compare_set": lambda store: store.compare_set("there", b"x", b"y"),
        "delete": lambda store: store.delete("there"),
        "watch": watch,
    }

    async def program(group: aiodist.Group, turn: int) -> bool:
        if group.rank == 0:
            await group.store.set("there", b"x")
        await group.barrier()
        cancelled = False
        if group.rank == VICTIM:
            task = await cancelled_at(turn, lambda: calls[name](group.store))
            cancelled = task.cancelled()
        elif group.rank == 2:
            await asyncio.sleep(0.001)
            await group.store.set("later", b"1")
            await group.store.set("there", b"z")
        await settle(group)
        await group.store.set(f"from {group.rank}", b"1")
        await group.store.wait([f"from {rank}" for rank in range(SIZE)])
        return cancelled

    assert until_it_is_done(program) > 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["shrink", "agree", "rendezvous"])
def test_votes(name):
    """A vote that is cancelled is given up by all, or was taken; it is called again."""

    async def insist(group: aiodist.Group) -> Any:
        while True:
            try:
                return await getattr(group, name)()
            except aiodist.CollectiveAbortedError:
                pass

    async def program(group: aiodist.Group, turn: int) -> bool:
        cancelled = False
        if group.rank == VICTIM:
            task = await cancelled_at(turn, getattr(group, name))
            cancelled = task.cancelled()
            found = await insist(group) if cancelled else task.result()
        else:
            found = await insist(group)
        if name != "agree":
            assert found.size == SIZE
            await settle(found)
        return cancelled

    assert until_it_is_done(program) > 2


@pytest.mark.timeout(120)
def test_closing():
    async def program(group: aiodist.Group, turn: int) -> bool:
        await settle(group)
        if group.rank != VICTIM:
            return False
        task = await cancelled_at(turn, group.close)
        await group.close()
        assert group.closed
        return task.cancelled()

    assert until_it_is_done(program) > 2


@pytest.mark.timeout(120)
def test_connecting():
    for count, turn in enumerate(turns()):
        simulation = Simulation(2, seed=turn, conditions=QUICK, lease=5.0, op_timeout=20.0)

        async def join(rank: int, turn: int = turn, simulation: Any = simulation) -> bool:
            connect = simulation.connecting
            cancelled = False
            if rank == VICTIM:
                task = await cancelled_at(turn, lambda: connect(rank))
                cancelled = task.cancelled()
                if cancelled:
                    group = await connect(rank)
                else:
                    group = task.result()
            else:
                group = await connect(rank)
            async with group:
                try:
                    assert await group.all_reduce(1) == 2
                except aiodist.PeerLostError:
                    # It was a member already when it was cancelled: it left, and came too late.
                    assert rank == 0
            return cancelled

        outcomes = simulation.play({0: join(0), 1: join(1)})
        if outcomes[VICTIM] is False:
            assert count > 2
            return
        assert outcomes[VICTIM] is True or isinstance(outcomes[VICTIM], aiodist.AiodistError)


@pytest.mark.timeout(120)
def test_connecting_in_vain():
    for turn in itertools.count():
        simulation = Simulation(1, seed=turn, conditions=QUICK)

        async def join(turn: int = turn, simulation: Any = simulation) -> bool:
            task = await cancelled_at(turn, lambda: simulation.connecting(0, size=2, timeout=1.0))
            assert task.cancelled() or isinstance(task.exception(), aiodist.JoinTimeoutError)
            return task.cancelled()

        if simulation.play({0: join()}) == [False]:
            assert turn > 2
            return
