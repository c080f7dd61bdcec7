"""A deadline that passes for want of a rank whose event loop does not turn: the error names the
line that keeps it from turning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import asyncio
import sys

import aiodist
from aiodist.engine import deadlines

deadlines.ASK_SECONDS = 9.0  # the coordinator may be slow


def compute():
    with open(sys.argv[1]) as fifo:  # blocks until rank 0 writes
        fifo.read()


async def main():
    async with aiodist.connect(lease=8.0) as group:
        await group.barrier()
        if group.rank == 1:
            compute()
            return
        works = [group.all_reduce(1, timeout=12.0), group.recv(src=1, timeout=12.0)]
        for work in works:
            try:
                await work
            except aiodist.CollectiveTimeoutError as error:
                print(error.op, error.missing, error.last_seen)
        with open(sys.argv[1], "w") as fifo:
            fifo.write("go on")


asyncio.run(main())
"""


@pytest.mark.long
def test_the_line_that_keeps_a_rank_busy(aiodist: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "train.py").write_text(SCRIPT)
    run = aiodist("run", "-n", 2, "train.py", "fifo")
    out, err = run.communicate(timeout=200)
    assert run.returncode == 0, err
    line = next(at for at, text in enumerate(SCRIPT.splitlines(), 1) if "fifo:  #" in text)
    for text, op in zip(out.splitlines(), ("all_reduce", "recv"), strict=True):
        assert text.startswith(f"[0] {op} (1,) {{1: 'its event loop has not turned for "), out
        assert f"at {tmp_path.name}/train.py:{line} in compute'}}" in text
