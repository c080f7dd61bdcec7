"""`aiodist status` on programs that are stuck: it names the culprit, and the line."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aiodist.control.client import ControlClient

SCRIPT = """
import asyncio
import sys

import aiodist
import numpy as np


def compute():
    with open(sys.argv[1]) as fifo:  # blocks until the test writes
        fifo.read()




async def fetch():
    opened = asyncio.to_thread(compute)
    await opened


async def main():
    async with aiodist.connect(lease=4.0) as group:
        x = np.ones(4, np.float32)
        await group.all_reduce(x)
        if group.rank == 1 and sys.argv[2] == "busy":
            compute()
        if group.rank == 1 and sys.argv[2] == "waiting":
            await fetch()
        await group.all_reduce(x)


asyncio.run(main())
"""


def _line(text: str) -> int:
    """The number of the line of SCRIPT that holds `text`."""
    return next(at for at, line in enumerate(SCRIPT.splitlines(), 1) if text in line)


def _listening(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().split()[-1]


async def _until_found(address: str, run: subprocess.Popen[str]) -> dict[str, Any]:
    """What the coordinator says of the group once all of its members have said what they do, and
    the two have waited for long enough."""
    client = await ControlClient.open(address)
    try:
        while run.poll() is None:
            groups = (await client.status(60, ask_members=True))["groups"]
            for group in groups:
                said = [member["doing"] for member in group["members"]]
                waiting = [held["ranks"] for one in group["findings"] for held in one["held"]]
                if len(said) == 3 and None not in said and [0, 2] in waiting:
                    found: dict[str, Any] = group
                    return found
            await asyncio.sleep(0.1)
        raise AssertionError(run.communicate())
    finally:
        client.close()


@pytest.mark.parametrize("how", ["busy", "waiting"])
def test_the_culprit_and_its_line(aiodist: Any, tmp_path: Path, how: str) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "train.py").write_text(SCRIPT)
    daemon = aiodist("coordinator", "--listen", "tcp://127.0.0.1:0")
    address = _listening(daemon)
    run = aiodist("run", "-n", 3, "--coordinator", address, "train.py", fifo, how)
    group = asyncio.run(_until_found(address, run))
    [finding] = group["findings"]
    assert finding["culprits"] == [1]
    assert [(held["what"], held["ranks"]) for held in finding["held"]] == [
        ("all_reduce #1", [0, 2])
    ]
    doing = group["members"][1]["doing"]
    name = f"{tmp_path.name}/train.py"
    if how == "busy":
        assert doing["busy"] > 0
        assert f"{name}:{_line('if group.rank == 1 and') + 1} in main" in doing["places"]
        assert f"{name}:{_line('fifo:')} in compute" == doing["places"][0]
    else:
        assert doing["busy"] == 0
        assert doing["places"] == [f"{name}:{_line('await opened')} in fetch"]
    assert doing["last"] == "all_reduce #0 done"
    shown = aiodist("status", address, more_env={"COLUMNS": "200"})
    out, err = shown.communicate(timeout=200)
    assert "rank 1 holds up others: ranks 0, 2 in all_reduce #1 for " in out, err
    fifo.write_text("go on")  # blocks until it is read
    assert run.wait(200) == 0
    daemon.terminate()
    assert daemon.wait(200) == 0
