"""`aiodist run --trace`, and `aiodist trace` of what other launchers have started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

SCRIPT = """
import asyncio
import sys

import aiodist
from aiodist.rank import tracing


async def main():
    async with aiodist.connect() as group:
        await group.barrier()
        for tracer in tracing._tracers:
            while not tracer._clock:  # the coordinator may be slow
                await asyncio.sleep(0.01)
        if group.rank == 1 and sys.argv[1:] == ["fails"]:
            raise SystemExit(3)
        if sys.argv[1:] == ["fails"]:
            await asyncio.sleep(3600)  # until it is terminated


asyncio.run(main())
"""


def names(file: Path) -> dict[int, list[str]]:
    """What each process of a trace did."""
    found: dict[int, list[str]] = {0: [], 1: []}
    for event in json.loads(file.read_text())["traceEvents"]:
        if event["ph"] in "Xi":
            found[event["pid"]].append(event["name"])
    return found


def test_a_run_in_one_clock(aiodist: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = aiodist("run", "-n", 2, "--trace", "run.json", "train.py")
    _, err = run.communicate()
    assert run.returncode == 0, err
    assert "run.json: 2 ranks, 2 operations, one clock" in err
    for did in names(tmp_path / "run.json").values():
        assert did[0] == "epoch 1 of 'world': 2 ranks"
        assert {"barrier", "moving", "leaves"} <= set(did)


def test_a_rank_that_is_terminated_because_of_another_one_is_in_the_trace(
    aiodist: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = aiodist("run", "-n", 2, "--trace", "run.json", "train.py", "fails")
    _, err = run.communicate()
    assert run.returncode == 3, err
    for did in names(tmp_path / "run.json").values():
        assert "barrier" in did


def test_what_others_have_started_is_joined(aiodist: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    traced = {"AIODIST_TRACE": str(tmp_path / "traces")}
    run = aiodist("run", "-n", 2, "train.py", more_env=traced)
    assert run.wait() == 0, run.communicate()
    joining = aiodist("trace", "traces", "-o", "all.json")
    _, err = joining.communicate()
    assert joining.returncode == 0, err
    assert err.startswith("all.json: 2 ranks, 2 operations, one clock")
    assert all("barrier" in did for did in names(tmp_path / "all.json").values())


def test_what_cannot_be_joined_is_kept(aiodist: Any, tmp_path: Path) -> None:
    """The output becomes a directory while the run goes on."""
    script = SCRIPT.replace("await group.barrier()", "group.rank or os.mkdir('run.json')")
    (tmp_path / "train.py").write_text(f"import os\n{script}")
    run = aiodist("run", "-n", 2, "--trace", "run.json", "train.py")
    _, err = run.communicate()
    assert run.returncode == 0, err
    error, kept = err.splitlines()
    assert error.startswith("aiodist run: no trace: [Errno 21] Is a directory")
    parts = Path(kept.partition("aiodist trace ")[2].partition(" -o")[0])
    assert len(list(parts.glob("world-rank*.json"))) == 2
    shutil.rmtree(parts)


def test_no_trace(aiodist: Any, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    joining = aiodist("trace", "nothing")
    _, err = joining.communicate()
    assert (joining.returncode, err) == (
        1,
        "aiodist trace: no rank of aiodist has written a trace\n",
    )
    usage = aiodist(
        "run", "-n", 1, "--nnodes", 2, "--trace", "x", "--coordinator", "tcp://y:1", "z.py"
    )
    _, err = usage.communicate()
    assert usage.returncode == 2
    assert "AIODIST_TRACE" in err
