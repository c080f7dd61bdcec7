"""Two "hosts": network namespaces with a wire between them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.multihost

PROGRAM = """
import asyncio, sys, aiodist
import numpy as np

async def main():
    async with aiodist.connect(timeout=20, op_timeout=20) as group:
        links = {}
        x = np.full(300_000, group.rank + 1.0)
        await group.all_reduce(x)
        assert (x == 10).all()
        assert await group.all_gather(group.rank) == [0, 1, 2, 3]
        links = [group._actor.endpoint.peer(rank).link for rank in range(group.size)]
        kinds = [getattr(link, "kind", "none") for link in links]
        print(group.rank, group.local_rank, group.local_size, group.members[group.rank].host,
              *kinds, flush=True)
        await group.barrier()
asyncio.run(main())
"""


@pytest.mark.parametrize("master", ["address", "name", "name in AIODIST_ADDRESS"])
@pytest.mark.sample(1)
def test_ranks_of_two_hosts(hosts, master):
    """The name of rank 0's host leads to 127.0.1.1 on that host itself, as on Debian: others get
    there where a token lets rank 0 listen on all interfaces."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AIODIST_", "MASTER_"))}
    ranks = []
    try:
        for rank in range(4):
            namespace = hosts[rank // 2].namespace
            variables = {
                "MASTER_ADDR": hosts[0].address if master == "address" else "aiodist-master",
                "MASTER_PORT": "29500",
                "RANK": str(rank),
                "WORLD_SIZE": "4",
            }
            if master != "address":
                variables["AIODIST_TOKEN"] = "secret"
            if master == "name in AIODIST_ADDRESS":
                variables["AIODIST_ADDRESS"] = "tcp://aiodist-master:29500"
            ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", namespace, sys.executable, "-c", PROGRAM],
                    env=clean | variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=40)
            assert process.returncode == 0, err
            mine = rank // 2
            expected = [
                "none" if peer == rank else "shm" if peer // 2 == mine else "tcp"
                for peer in range(4)
            ]
            number, local_rank, local_size, host, *kinds = out.split()
            assert [number, local_rank, local_size] == [str(rank), str(rank % 2), "2"]
            assert kinds == expected
            if master == "address" or mine:
                assert host == hosts[mine].address
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
