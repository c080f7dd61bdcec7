"""Ranks that are killed, or stopped, while others wait for them in shared memory.

The fixture `run` is the loop of their coordinator alone.
"""

from __future__ import annotations

import os
import signal
import sys

import pytest
from processes import heard, processes

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Linux shares memory"),
    pytest.mark.usefixtures("no_shared_files"),
]

PRELUDE = """
import asyncio, json, os, sys
import numpy as np
import aiodist

length = int(sys.argv[3])

async def outcome(work):
    try:
        return float((await work)[0])
    except aiodist.PeerLostError as error:
        return ["PeerLostError", list(error.ranks)]
    except aiodist.CollectiveTimeoutError as error:
        return ["CollectiveTimeoutError", list(error.missing)]

def say(value):
    print(json.dumps(value), flush=True)

def held():
    return [line for line in open("/proc/self/maps") if "/memfd:aiodist" in line]

async def main():
    group = await aiodist.connect(sys.argv[1], rank=int(sys.argv[2]), size=3)
    await program(group)
    import gc
    gc.collect()
    say(held())

async def settled(group):
    over = 0
    while not over:  # as often on all ranks
        over = await group.all_reduce(int(group._context._setup.over), aiodist.ReduceOp.MIN)
    assert group._context.lane is not None

async def lost(group):
    # Whatever comes next fails as well, at once; those that are left go on with each other.
    for _ in range(3):
        say(await outcome(group.all_reduce(np.ones(length))))
        say(await outcome(group.all_gather(np.ones(length))))
    pair = await group.subgroup([0, 1])
    await settled(pair)
    say(await outcome(pair.all_reduce(np.ones(length))))
    await group.close()
"""
GO = "\nasyncio.run(main())\n"


LOST = ["PeerLostError", [2]]


async def see_the_loss(ranks):
    for process in ranks[:2]:
        for _ in range(6):
            assert await heard(process) == LOST
    for process in ranks[:2]:
        assert await heard(process) == 2.0
        assert await heard(process) == []
        assert await process.wait() == 0


WAITS = """
async def program(group):
    await settled(group)
    for _ in range(3):  # so that these kinds are known
        await group.all_reduce(np.ones(length))
        await group.all_gather(np.ones(2), tag="known")
    if group.rank == 2:
        say("ready")
        await asyncio.Event().wait()
    works = [group.all_reduce(np.ones(length)) for _ in range(3)]
    works += [group.all_gather(np.ones(2), tag=tag) for tag in ("known", "new")]
    works += [group.barrier(tag="barrier"), group.all_reduce(1, tag="number")]
    for _ in range(1000):
        await asyncio.sleep(0)  # asleep by now
    say("ready")
    for work in works:
        say(await outcome(work))
    await lost(group)
"""


@pytest.mark.strength(1)
@pytest.mark.parametrize("length", [4, 400_000])
def test_while_others_wait(run, length):
    async def main():
        async with processes(PRELUDE + WAITS + GO, 3, length) as ranks:
            for process in ranks:
                assert await heard(process) == "ready"
            os.kill(ranks[2].pid, signal.SIGKILL)
            for process in ranks[:2]:
                assert [await heard(process) for _ in range(7)] == [LOST] * 7
            await see_the_loss(ranks)

    run(main())


WORKS = """
async def program(group):
    await settled(group)
    for number in range(1_000_000):
        x = np.full(length, float(number))
        value = await outcome(group.all_reduce(x))
        if value != 3.0 * number:
            say(value)
            break
        assert (x == 3 * number).all()
        if number == 30:
            say("ready")
    await lost(group)
"""


@pytest.mark.strength(1)
@pytest.mark.parametrize("length", [4, 20_000, 400_000])
@pytest.mark.sample(1)
def test_amid_the_work(run, length):
    """Everything that completes is right."""

    async def main():
        async with processes(PRELUDE + WORKS + GO, 3, length) as ranks:
            for process in ranks:
                assert await heard(process) == "ready"
            os.kill(ranks[2].pid, signal.SIGKILL)
            for process in ranks[:2]:
                assert await heard(process) == LOST
            await see_the_loss(ranks)

    run(main())


BEGINS = """
async def program(group):
    if group.rank == 2:
        say("ready")
        await asyncio.Event().wait()
    work = group.barrier()
    say("ready")
    try:
        await work
    except aiodist.PeerLostError as error:
        say(["PeerLostError", list(error.ranks)])
    await lost(group)
"""


def test_before_memory_is_shared(run):
    async def main():
        async with processes(PRELUDE + BEGINS + GO, 3, 4) as ranks:
            for process in ranks:
                assert await heard(process) == "ready"
            os.kill(ranks[2].pid, signal.SIGKILL)
            for process in ranks[:2]:
                assert await heard(process) == LOST
            await see_the_loss(ranks)

    run(main())


STOPS = """
async def program(group):
    await settled(group)
    say("ready")
    sys.stdin.readline()
    timeout = 0.5 if group.rank < 2 else 30
    say(await outcome(group.all_reduce(np.ones(length), timeout=timeout)))
    say(await outcome(group.all_reduce(np.ones(length))))
    await group.close()
"""


@pytest.mark.strength(1)
@pytest.mark.parametrize("length", [4, 400_000])
def test_a_rank_that_is_stopped_is_named_and_goes_on(run, length):
    async def main():
        async with processes(PRELUDE + STOPS + GO, 3, length) as ranks:
            for process in ranks:
                assert await heard(process) == "ready"
            os.kill(ranks[2].pid, signal.SIGSTOP)
            for process in ranks:
                process.stdin.write(b"\n")
            for process in ranks[:2]:
                assert await heard(process) == ["CollectiveTimeoutError", [2]]
            os.kill(ranks[2].pid, signal.SIGCONT)
            assert await heard(ranks[2]) == ["CollectiveTimeoutError", [2]]
            for process in ranks:
                assert await heard(process) == 3.0
                assert await heard(process) == []
                assert await process.wait() == 0

    run(main())
