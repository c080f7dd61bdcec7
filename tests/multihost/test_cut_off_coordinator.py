"""The cable of the coordinator's host is pulled for longer than the lease, and put back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytestmark = pytest.mark.multihost

RANK = """
import asyncio, sys, aiodist

async def main():
    rank = int(sys.argv[2])
    async with aiodist.connect(sys.argv[1], rank=rank, size=2, timeout=20, lease=2) as group:
        await group.store.set(f"k{group.rank}", b"v")
        print("ready", flush=True)
        sys.stdin.readline()
        assert await group.all_reduce(1) == 2
        assert await group.store.get(f"k{1 - group.rank}") == b"v"
        assert await group.agree(True, timeout=30)
        print("done", (await group.shrink(timeout=30)).size, flush=True)

asyncio.run(main())
"""


@contextmanager
def on(host: Any, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process there."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AIODIST_", "MASTER_"))}
    process = subprocess.Popen(
        ["ip", "netns", "exec", host.namespace, sys.executable, *arguments],
        env=clean,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.timeout(90)
def test_a_coordinator_that_was_cut_off_evicts_nobody(hosts: list[Any], go: Any) -> None:
    here, there = hosts
    address = f"tcp://{here.address}:29500"
    daemon = ["-m", "aiodist_cli", "coordinator", "--listen", address, "--insecure"]
    with (
        on(here, *daemon) as coordinator,
        on(there, "-c", RANK, address, "0") as first,
        on(there, "-c", RANK, address, "1") as second,
    ):
        ranks = [first, second]
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        here.set_link("down")
        assert coordinator.stderr is not None
        for line in coordinator.stderr:  # until their leases are over there
            assert "lost" not in line
            if "silent" in line:
                break
        here.set_link("up")
        go(ranks)
        for process in ranks:
            out, err = process.communicate(timeout=60)
            assert (process.returncode, out) == (0, "done 2\n"), err
