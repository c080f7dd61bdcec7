"""A rank closes the group behind its last collective, while ranks of another host still wait for
each other in it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.multihost

PROGRAM = """
import asyncio, aiodist
import numpy as np

async def main():
    async with aiodist.connect(timeout=20, op_timeout=20) as group:
        await group.all_reduce(np.ones(300_000))  # all are linked, so all hear at once who is gone
        x = np.ones(1)
        for number in range(60):
            async with await group.dup() as other:
                for call in range(1 + number % 9):
                    await other.barrier()
                    if number % 3 == 0:
                        await other.broadcast(x, src=call % 4)
                    if number % 3 == 1:
                        await other.all_reduce(x, op=aiodist.ReduceOp.MAX)
                if number % 2:
                    await other.broadcast(x, src=number % 4)
                else:
                    await other.barrier()
        assert x[0] == 1
asyncio.run(main())
"""


@pytest.mark.long
def test_who_is_done_first_closes_the_group(hosts):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AIODIST_", "MASTER_"))}
    ranks = []
    try:
        for rank in range(4):
            variables = {
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": "29500",
                "RANK": str(rank),
                "WORLD_SIZE": "4",
            }
            ranks.append(
                subprocess.Popen(
                    [
                        "ip",
                        "netns",
                        "exec",
                        hosts[rank // 2].namespace,
                        sys.executable,
                        "-c",
                        PROGRAM,
                    ],
                    env=clean | variables,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for process in ranks:
            _, err = process.communicate(timeout=40)
            assert process.returncode == 0, err
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
