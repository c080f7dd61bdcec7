"""Traces of two "hosts" whose clocks show different times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiodist_cli.trace_join import Clock, join

pytestmark = pytest.mark.multihost

AHEAD = [70_000.0, 12_345.0]
"""What the clock of each host shows at the moment at which they were the same, in seconds."""

PROGRAM = """
import asyncio, sys, time

ahead, monotonic = float(sys.argv[1]), time.monotonic
time.monotonic = lambda: monotonic() + ahead  # which the loop tells the time by

import numpy as np
import aiodist
from aiodist.rank import tracing


async def main():
    async with aiodist.connect(timeout=40, op_timeout=40) as group:
        (tracer,) = tracing._tracers
        while not tracer._clock:  # compared once
            await asyncio.sleep(0.01)
        for _ in range(3):
            await group.all_reduce(np.ones(1000, np.float32))
        if group.rank == 0:
            await group.send(np.ones((2, 3), np.int16), 1)
            await group.send({"a": np.ones(50_000), "b": np.ones(3, bool)}, 1)
        else:
            await group.recv(src=0)
            await group.recv()
        await group.barrier()
asyncio.run(main())
"""


def traced(hosts: list[Any], where: Path) -> list[dict[str, Any]]:
    """What the ranks have written, one on each host, by rank."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AIODIST_", "MASTER_"))}
    ranks = []
    try:
        for rank, host in enumerate(hosts):
            variables = {
                "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500", "RANK": str(rank),
                "WORLD_SIZE": "2", "AIODIST_TRACE": str(where),
            }  # fmt: skip
            command = ["ip", "netns", "exec", host.namespace, sys.executable, "-c", PROGRAM]
            ranks.append(
                subprocess.Popen(
                    [*command, str(AHEAD[rank])], env=clean | variables, stderr=subprocess.PIPE
                )
            )
        for process in ranks:
            _, err = process.communicate(timeout=50)
            assert process.returncode == 0, err.decode()
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    parts = [json.loads(file.read_text()) for file in where.glob("*.json")]
    return sorted(parts, key=lambda part: part["rank"])


def test_two_hosts_in_one_clock(hosts: list[Any], tmp_path: Path) -> None:
    parts = traced(hosts, tmp_path)
    assert len({part["machine"] for part in parts}) == 2
    for part, ahead in zip(parts, AHEAD, strict=True):
        ((_, samples),) = part["clock"].items()
        assert samples
        for _, found, error in samples:  # the coordinator is in rank 0
            assert abs(found - (AHEAD[0] - ahead)) <= error + 1e-6

    joined = join(parts)
    assert 0 < joined.error < 10  # and not the hours between what they show
    clocks = [Clock(*part["clock"].values()) for part in parts]
    mine, other = [
        {row[3]: row for row in part["operations"] if row[1] == "all_reduce"} for part in parts
    ]
    assert len(mine) == len(other) == 3
    for seq, row in mine.items():
        # No rank is done before both have begun; by so much may the common clock be wrong.
        for (one, one_clock), (two, two_clock) in (
            ((row, clocks[0]), (other[seq], clocks[1])),
            ((other[seq], clocks[1]), (row, clocks[0])),
        ):
            early = one_clock.common(one[7]) - two_clock.common(two[8])  # in ns
            assert early <= (joined.error + 1e-6) * 1e9

    slices = [one for one in joined.trace["traceEvents"] if one["ph"] == "X" and one["args"]]
    for one in slices:
        assert one["args"]["transport"] == "tcp"
    told = {
        (one["pid"], one["name"], one["args"].get("call"), one["args"].get("dtype"))
        for one in slices
        if one["cat"] == "messages"
    }
    first, second = ("int16[2,3]", "int16"), ("float64[50000], bool[3]", "float64")
    assert told == {
        (0, "send", *first), (1, "recv", *first), (0, "send", *second), (1, "recv", *second)
    }  # fmt: skip
    arrows = [one for one in joined.trace["traceEvents"] if one["ph"] == "f"]
    assert sum(one["name"] == "send" for one in arrows) == 2
