"""A rank that is killed: the others hear of it, say who it was, and go on with each other."""

from __future__ import annotations

import json
import os
import signal

import pytest
from processes import processes

PROGRAM = """
import asyncio, json, sys, aiodist
import numpy as np

async def outcome(work):
    try:
        return [type(None).__name__, repr(await work)]
    except aiodist.PeerLostError as error:
        return ["PeerLostError", list(error.ranks)]

async def main():
    address, rank, transport, length = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    group = await aiodist.connect(address, rank=rank, size=3, transports=(transport,))
    await group.barrier()
    print("ready", flush=True)
    if rank == 2:
        # Never takes part in what the others wait for.
        await asyncio.Event().wait()
    works = [
        group.all_reduce(np.ones(length)),
        group.recv(src=2),
        group.recv(tag="whoever"),
        group.send(np.ones(1_000_000), 2),
        group.barrier(tag="other"),
    ]
    results = [await outcome(work) for work in works]
    other = 1 - rank
    both = await group.sendrecv(rank, other, src=other)
    results.append(both)
    # From any source: nothing before the loss is acknowledged, then what the living send.
    group.send(rank, other, tag="after")
    results.append(await outcome(group.recv(src=[2, other], tag="none")))
    results.append(group.acknowledge_lost())
    async for value, source, tag in group.messages(tag="after"):
        results.append([value, source, tag])
        break
    group.send(rank, other, tag="again")
    results.append(await group.recv(src=[0, 1, 2], tag="again"))
    print(json.dumps(results), flush=True)
    pair = await group.subgroup([0, 1])
    print(await pair.all_reduce(rank + 1), flush=True)
    await group.close()

asyncio.run(main())
"""


@pytest.mark.strength(1)
@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
@pytest.mark.parametrize("length", [10, 100_000])
@pytest.mark.sample(1)
def test_kill_9(run, transport, length):
    async def main():
        async with processes(PROGRAM, 3, transport, length) as ranks:
            for process in ranks:
                assert await process.stdout.readline() == b"ready\n"
            os.kill(ranks[2].pid, signal.SIGKILL)
            for rank, process in enumerate(ranks[:2]):
                results = json.loads(await process.stdout.readline())
                other = 1 - rank
                assert results[:5] == [["PeerLostError", [2]]] * 5
                assert results[5] == other
                assert results[6:8] == [["PeerLostError", [2]], [2]]
                assert results[8:] == [[other, other, "after"], other]
                assert await process.stdout.readline() == b"3\n"
                assert await process.wait() == 0

    run(main())
