"""The cable between two hosts is pulled, and perhaps put back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytestmark = pytest.mark.multihost

PROGRAM = """
import asyncio, sys, time, aiodist
import numpy as np

async def failure(work):
    try:
        await work
    except aiodist.AiodistError as error:
        return f"{type(error).__name__} {list(getattr(error, 'ranks', ()))}"
    return "done"

async def main():
    lease = float(sys.argv[1])
    group = await aiodist.connect(timeout=20, op_timeout=50, lease=lease)
    await group.barrier()
    other = 1 - group.rank
    print("ready", flush=True)
    sys.stdin.readline()
    # More than the kernel takes, so that all of these need the other side.
    x = np.full(4_000_000, group.rank + 1.0)
    works = [
        group.all_reduce(x), group.all_gather(group.rank, tag="a"), group.recv(src=other),
        group.barrier(tag="b"), group.send(np.full(2_000_000, 1.0 * group.rank), other, tag=1),
    ]
    if sys.argv[2] == "back":
        works[2].cancel()
        del works[2]
        works.append(group.recv(src=other, tag=1))
    began = time.monotonic()
    outcomes = await asyncio.gather(*map(failure, works))
    took = time.monotonic() - began
    if sys.argv[2] == "back":
        assert (x == 3).all() and (works[-1].result() == other).all()
        for _ in range(20):
            assert await group.all_reduce(1) == 2
    print("|".join(outcomes), took, flush=True)
    await group.close()

asyncio.run(main())
"""


@contextmanager
def two_ranks(hosts: list[Any], *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """A rank on each host, the first one with the coordinator; both ready."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AIODIST_", "MASTER_"))}
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank, host in enumerate(hosts):
            variables = {
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": "29500",
                "RANK": str(rank),
                "WORLD_SIZE": "2",
            }
            ranks.append(
                subprocess.Popen(
                    [
                        "ip",
                        "netns",
                        "exec",
                        host.namespace,
                        sys.executable,
                        "-c",
                        PROGRAM,
                        *arguments,
                    ],
                    env=clean | variables,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.timeout(90)
def test_a_cable_that_is_pulled(hosts, go):
    lease = 3.0
    with two_ranks(hosts, str(lease), "gone") as ranks:
        hosts[0].set_link("down")
        go(ranks)
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=45)
            assert process.returncode == 0, err
            outcomes, took = out.rsplit(" ", 1)
            assert outcomes.split("|") == [f"PeerLostError [{1 - rank}]"] * 5, (rank, out, err)
            assert float(took) < 45  # by the lease, not by the deadline of 50 s


@pytest.mark.timeout(90)
def test_a_cable_that_is_put_back(hosts, go):
    with two_ranks(hosts, "20", "back") as ranks:
        go(ranks)
        hosts[0].set_link("down")
        subprocess.run(["sleep", "0.7"], check=True)  # how long the cable is out
        hosts[0].set_link("up")
        for process in ranks:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            assert out.startswith("done|done|done|done|done "), (out, err)
