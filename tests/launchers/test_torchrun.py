"""torchrun: the page's programs, one agent and two."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
from launched import clean_environment

from aiodist.launching.spawn import free_port

pytestmark = [
    pytest.mark.launchers,
    pytest.mark.timeout(120),  # importing torch takes seconds in each process
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

PAGE = "torchrun.md"
TOKEN = {"AIODIST_TOKEN": "secret"}


def agent(folder: Path, *options: str) -> subprocess.Popen[str]:
    """torchrun, which has each worker write to a file: words of several would mix."""
    apart = [f"--log-dir={folder / 'log'}", "--redirects=1"]
    return subprocess.Popen(
        ["torchrun", *apart, *options],
        cwd=folder,
        env=clean_environment() | TOKEN | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines(folder: Path, *agents: subprocess.Popen[str]) -> list[str]:
    """What the workers of all agents have printed, when these have ended."""
    try:
        for process in agents:
            _, err = process.communicate(timeout=100)
            assert process.returncode == 0, err
    finally:
        for process in agents:
            process.terminate()  # it ends its workers
            process.communicate()
    files = sorted((folder / "log").rglob("stdout.log"))
    return sorted(line for file in files for line in file.read_text().splitlines())


def average(size: int) -> list[str]:
    mean = (size - 1) / 2
    return [f"rank {rank} of {size}: {[0.0, mean, 2 * mean]}" for rank in range(size)]


def test_the_program_of_the_page_by_two_agents(folder: Path) -> None:
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    options = ["--nnodes=2", "--nproc-per-node=2", *where, "average.py"]
    agents = [agent(folder, *options) for _ in range(2)]
    assert lines(folder, *agents) == average(4)


def test_a_worker_dies_and_all_are_started_again(folder: Path) -> None:
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "resumed.py"]
    found = lines(folder, agent(folder, *options))
    assert found == ["step 0: 0", "step 1: 2", "step 2: 4", "step 3: 6"]


COUNTED = """
import asyncio, os, signal
import aiodist

async def main():
    async with aiodist.connect() as group:
        restarts = await group.all_gather(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
        if max(restarts) == 0 and os.environ["GROUP_RANK"] == "0":
            signal.pause()  # it is healthy, and computes until its agent ends it
        if max(restarts) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        print(sorted(restarts), flush=True)

asyncio.run(main())
"""


def test_a_worker_of_one_agent_dies(folder: Path) -> None:
    """Only its agent counts a restart. The other one sees that a node has come."""
    (folder / "counted.py").write_text(COUNTED)
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--max-restarts=2"]
    options = ["--nnodes=2", "--nproc-per-node=1", *where, "counted.py"]
    agents = [agent(folder, *options) for _ in range(2)]
    assert lines(folder, *agents) == ["[0, 1]"] * 2
