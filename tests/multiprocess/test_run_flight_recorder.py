"""The flight recorders of ranks of `aiodist run`."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import asyncio
import sys

import aiodist
import uvloop


async def main():
    async with aiodist.connect() as group:
        await group.all_reduce(1)
        work = group.barrier(tag="late") if group.rank == 0 else None
        print("ready", flush=True)
        if group.rank == 1:
            with open(sys.argv[1]) as fifo:  # blocks until the test writes
                fifo.read()
        await (work or group.barrier(tag="late"))


loops = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
with asyncio.Runner(loop_factory=loops[sys.argv[2]]) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_signal_to_the_command_dumps_all_ranks(aiodist: Any, tmp_path: Path, loop: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "train.py").write_text(SCRIPT)
    run = aiodist("run", "-n", 2, "--flight-recorder", "stderr", "train.py", "fifo", loop)
    for _ in range(2):
        assert run.stdout.readline().endswith("ready\n")
    run.send_signal(signal.SIGUSR1)
    seen = ""
    wanted = ["[1]   its event loop is at", "[0] aiodist flight recorder", "barrier tag 'late' #0"]
    while not all(text in seen for text in wanted):
        line = run.stderr.readline()
        assert line, seen
        seen += line
    assert "[1] aiodist flight recorder: group 'world' epoch 1 rank 1 of 2, pid " in seen
    at = rf"\[1\]   its event loop is at {tmp_path.name}/train.py:\d+ in main"
    assert re.search(at, seen)
    (tmp_path / "fifo").write_text("go on")
    assert run.wait(200) == 0


def test_after_an_error_there_are_files(aiodist: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        SCRIPT.replace("await (work or", "if group.rank: sys.exit(3)\n        await (work or")
    )
    (tmp_path / "empty").write_text("")
    run = aiodist("run", "-n", 2, "--flight-recorder", "dumps", "train.py", "empty", "asyncio")
    _, err = run.communicate(timeout=200)
    assert run.returncode == 3, err
    [path] = (tmp_path / "dumps").iterdir()
    assert path.name.startswith("world-rank0-pid")
    text = path.read_text()
    assert "PeerLostError: rank 1 is lost" in text
    assert "failed     barrier tag 'late' #0  barrier()" in text


def test_the_signal_shows_what_the_ranks_are_doing(aiodist: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "train.py").write_text(SCRIPT)
    run = aiodist("run", "-n", 2, "train.py", "fifo", "asyncio")
    for _ in range(2):
        assert run.stdout.readline().endswith("ready\n")
    run.send_signal(signal.SIGUSR1)
    assert run.stderr.readline().startswith("coordinator tcp://127.0.0.1:")
    assert run.stderr.readline().startswith("group world: epoch 1, 2 of 2 ranks")
    seen = ""
    while "└" not in seen:
        seen += run.stderr.readline()
    assert "in barrier tag 'late' #0, for rank 1" in seen
    (tmp_path / "fifo").write_text("go on")
    assert run.wait(200) == 0
