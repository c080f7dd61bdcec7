"""`aiodist status` on programs that wait for votes, and for keys that nobody sets."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from aiodist.control.client import ControlClient

SCRIPT = """
import asyncio
import sys

import aiodist


def compute():
    with open(sys.argv[1]) as fifo:  # blocks until the test writes
        fifo.read()


async def main():
    async with aiodist.connect(lease=8.0) as group:
        await group.barrier()
        if group.rank == 1:
            await asyncio.to_thread(compute)
            await group.store.set("weights", b"")
        if sys.argv[2] == "store":
            await group.store.wait("weights")
        else:
            await group.agree()


asyncio.run(main())
"""

FINDINGS = {
    "vote": ([1], "", "agree #0", "rank 1 holds up others: ranks 0, 2 in agree #0 for "),
    "store": (
        [],
        "key 'weights' is not set",
        "store.wait",
        "key 'weights' is not set: ranks 0, 2 in store.wait for ",
    ),
}


async def _until_found(address: str, run: Any) -> dict[str, Any]:
    """The finding, once the two have waited for long enough."""
    client = await ControlClient.open(address)
    try:
        while run.poll() is None:
            for group in (await client.status(60, ask_members=True))["groups"]:
                for finding in group["findings"]:
                    if [held["ranks"] for held in finding["held"]] == [[0, 2]]:
                        found: dict[str, Any] = finding
                        return found
            await asyncio.sleep(0.1)
        raise AssertionError(run.communicate())
    finally:
        client.close()


@pytest.mark.long
@pytest.mark.parametrize("how", FINDINGS)
def test_what_is_waited_for(aiodist: Any, tmp_path: Path, how: str) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "train.py").write_text(SCRIPT)
    daemon = aiodist("coordinator", "--listen", "tcp://127.0.0.1:0")
    assert daemon.stdout is not None
    address = daemon.stdout.readline().split()[-1]
    run = aiodist("run", "-n", 3, "--coordinator", address, "train.py", fifo, how)
    culprits, lacking, what, text = FINDINGS[how]
    finding = asyncio.run(_until_found(address, run))
    assert (finding["culprits"], finding["lacking"]) == (culprits, lacking)
    assert [held["what"] for held in finding["held"]] == [what]
    shown = aiodist("status", address, more_env={"COLUMNS": "200"})
    out, err = shown.communicate(timeout=200)
    assert text in out, err
    fifo.write_text("go on")  # blocks until it is read
    assert run.wait(200) == 0
    daemon.terminate()
    assert daemon.wait(200) == 0
