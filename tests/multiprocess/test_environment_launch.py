"""Ranks that are started by hand, or by torchrun, with nothing but environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiodist.launching.spawn import free_port

PROGRAM = """
import asyncio, os, aiodist
async def main():
    async with aiodist.connect() as group:
        total = await group.all_reduce(group.rank + 1)
        os.write(1, b"%d %d %d\\n" % (group.rank, group.size, total))  # whole lines
asyncio.run(main())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def start() -> Iterator[object]:
    started: list[subprocess.Popen[str]] = []

    def run(command: list[str], **variables: str) -> subprocess.Popen[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("AIODIST_", "MASTER_"))}
        process = subprocess.Popen(
            command,
            env=clean | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


NAMES = {
    "aiodist": ("AIODIST_RANK", "AIODIST_SIZE"),
    "torch": ("RANK", "WORLD_SIZE"),
}


@pytest.mark.strength(1)
@pytest.mark.parametrize("names", sorted(NAMES))
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_by_hand(script, start, names, order):
    rank_name, size_name = NAMES[names]
    port = str(free_port())
    where = (
        {"AIODIST_ADDRESS": f"tcp://127.0.0.1:{port}"}
        if names == "aiodist"
        else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    )
    ranks = {
        rank: start(
            [sys.executable, str(script)], **where, **{rank_name: str(rank), size_name: "3"}
        )
        for rank in order
    }
    for rank, process in ranks.items():
        out, err = process.communicate(timeout=200)
        assert (process.returncode, out) == (0, f"{rank} 3 6\n"), err


def test_a_token_keeps_strangers_out(script, start):
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    members = [
        start([sys.executable, str(script)], **where, RANK=str(rank), AIODIST_TOKEN="secret")
        for rank in range(2)
    ]
    for rank, process in enumerate(members):
        out, err = process.communicate(timeout=200)
        assert (process.returncode, out) == (0, f"{rank} 2 3\n"), err
    # A rank with the token serves; one without it is told why it may not join.
    server = start([sys.executable, str(script)], **where, RANK="0", AIODIST_TOKEN="secret")
    stranger = start([sys.executable, str(script)], **where, RANK="1")
    _, err = stranger.communicate(timeout=200)
    assert stranger.returncode == 1
    assert "AuthenticationError" in err
    assert "secret" not in err
    server.kill()


@pytest.mark.long
def test_torchrun(script, start):
    pytest.importorskip("torch")
    process = start(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
         f"--master-port={free_port()}", str(script)]
    )  # fmt: skip
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert sorted(out.split("\n")[:-1]) == ["0 2 3", "1 2 3"]
