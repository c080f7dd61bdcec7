"""A rank that may open no more files: it says so at once, and so do those who need it."""

from __future__ import annotations

import json

import pytest
from processes import processes

PROGRAM = """
import asyncio, json, os, resource, sys, aiodist
import numpy as np, numpy.ma

async def main():
    address, rank, transport = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    async with aiodist.connect(address, rank=rank, size=3, transports=(transport,)) as group:
        alone = await group.subgroup([rank])
        await alone.all_reduce(np.ones(4))  # all that is imported later is imported by now
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
            try:
                while True:
                    os.dup(0)
            except OSError:
                await group.store.set("full", b"")
        await group.store.wait("full")
        try:
            await group.all_reduce(np.ones(4))
        except aiodist.AiodistError as error:
            print(json.dumps([type(error).__name__, str(error)]), flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
@pytest.mark.sample(2)
def test_a_rank_without_files_says_so(run, transport):
    async def main():
        async with processes(PROGRAM, 3, transport) as ranks:
            for rank, process in enumerate(ranks):
                kind, text = json.loads(await process.stdout.readline())
                assert kind == ("GroupClosedError" if rank == 1 else "PeerLostError"), text
                # A rank that calls after rank 1 has left may find its listener gone before it reads
                # the reason.
                reached = "rank 1 is lost: not reachable" not in text
                if rank == 1 or reached:
                    assert "too many open files: it cannot make links" in text
                assert rank == 1 or not reached or "rank 1 is lost: it aborted" in text

    run(main())
