"""2 x 2 ranks on two hosts: shared memory inside, TCP between, and how much crosses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.multihost

COMMON = """
import asyncio, json, sys, aiodist
import numpy as np

device, length = sys.argv[1], 2_000_000

async def connected():
    group = await aiodist.connect(timeout=20, op_timeout=20)
    await group.barrier()
    while group._context.lane is None:
        await asyncio.sleep(0.001)
    await group.barrier()
    return group
"""

COUNT = (
    COMMON
    + """
def wire():
    line, = (line for line in open("/proc/net/dev") if line.strip().startswith(device + ":"))
    return int(line.split(":")[1].split()[8])  # bytes that were sent

def crossed(group):
    others = [rank for rank in range(4) if rank // 2 != group.rank // 2]
    links = [group._actor.endpoint.peer(rank).link for rank in others]
    links = [link for link in links if link is not None]
    assert all(link.kind == "tcp" for link in links)
    return sum(link.sent_bytes for link in links), sum(link.received_bytes for link in links)

OPERATIONS = {
    "all_reduce": lambda group, x: group.all_reduce(x),
    "reduce": lambda group, x: group.reduce(x, 1),
    "broadcast": lambda group, x: group.broadcast(x, 1),
    "all_gather": lambda group, x: group.all_gather(x),
    "reduce_scatter": lambda group, x: group.reduce_scatter(x),
    "barrier": lambda group, x: group.barrier(),
}

async def main():
    group = await connected()
    x = np.ones(length, np.float32)
    counted = {}
    for name, start in OPERATIONS.items():
        await group.barrier(tag="before")
        on_wire = wire()
        await group.barrier(tag="all have looked")
        before = crossed(group)
        for _ in range(3):
            await start(group, x)
        after = crossed(group)
        await group.barrier(tag="after")
        counted[name] = after[0] - before[0], after[1] - before[1], wire() - on_wire
        x[:] = 1
    print(json.dumps(counted), flush=True)
    await group.close()

asyncio.run(main())
"""
)

LOST = (
    COMMON
    + """
async def main():
    group = await connected()
    x = np.ones(length, np.float32)
    print("ready", flush=True)
    try:
        while True:
            await group.all_reduce(x, aiodist.ReduceOp.MAX)
            assert (x == 1).all()
    except aiodist.PeerLostError as error:
        print(json.dumps(list(error.ranks)), flush=True)

asyncio.run(main())
"""
)

MIXED = (
    COMMON
    + """
import device_suite

async def main():
    async with await connected() as group:
        await device_suite.mixed(group, "standin")

asyncio.run(main())
"""
)


@contextmanager
def ranks(hosts, program) -> Iterator[list[subprocess.Popen]]:
    """Ranks 0 and 1 on the first host, 2 and 3 on the second."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AIODIST_", "MASTER_"))}
    started = []
    try:
        for rank in range(4):
            host = hosts[rank // 2]
            variables = {
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": "29500",
                "RANK": str(rank),
                "WORLD_SIZE": "4",
                "PYTHONPATH": str(Path(__file__).parents[1] / "shared"),
            }
            command = [sys.executable, "-c", program, host.device]
            started.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", host.namespace, *command],
                    env=clean | variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_what_crosses_is_the_optimum(hosts):
    with ranks(hosts, COUNT) as started:
        outcomes = [process.communicate(timeout=60) for process in started]
        assert [process.returncode for process in started] == [0] * 4, outcomes
    counted = [json.loads(out) for out, _ in outcomes]
    whole = 3 * 2_000_000 * 4  # bytes of three arrays
    optimum = {
        # Bytes that go from each host to the other.
        "all_reduce": (whole, whole),
        "reduce": (0, whole),
        "broadcast": (whole, 0),
        "all_gather": (2 * whole, 2 * whole),
        "reduce_scatter": (whole // 2, whole // 2),
        "barrier": (0, 0),
    }
    for name, expected in optimum.items():
        sent = [sum(counted[rank][name][0] for rank in pair) for pair in ((0, 1), (2, 3))]
        received = [sum(counted[rank][name][1] for rank in pair) for pair in ((0, 1), (2, 3))]
        # What ranks tell each other of values they do not know yet, and that they are there.
        words = 0 if name in ("all_reduce", "reduce_scatter") else 3000
        for number in (0, 1):
            assert expected[number] <= sent[number] <= expected[number] + words, name
            # Of the barriers before and after, one end may count what the other does not.
            assert abs(received[1 - number] - sent[number]) <= 200, name
            # As the interface has it: with headers, acknowledgements, and words about tags.
            on_wire = max(counted[rank][name][2] for rank in (2 * number, 2 * number + 1))
            assert sent[number] <= on_wire <= 1.1 * sent[number] + 100_000, name


@pytest.mark.long
def test_some_arrays_are_on_a_device(hosts):
    with ranks(hosts, MIXED) as started:
        for process in started:
            _, err = process.communicate(timeout=60)
            assert process.returncode == 0, err


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.sample(2)
def test_a_rank_is_killed(hosts, victim):
    with ranks(hosts, LOST) as started:
        for process in started:
            assert process.stdout.readline() == "ready\n"
        started[victim].kill()
        for rank, process in enumerate(started):
            out, err = process.communicate(timeout=30)
            if rank != victim:
                assert victim in json.loads(out), err
