"""`aiodist run` with ranks that meet: on one node, at a coordinator of their own or another, on
two nodes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from aiodist import Coordinator

Start = Callable[..., "subprocess.Popen[str]"]

SUM = """
import asyncio, os, sys
import aiodist

async def main():
    async with aiodist.connect() as group:
        assert (group.rank, group.size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        if sys.argv[1:] == [str(group.rank)]:
            raise ValueError("this one fails")
        print(group.name, await group.all_reduce(group.rank + 1))
        if sys.argv[1:]:
            await group.recv()  # nobody sends

asyncio.run(main())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "sum.py"
    path.write_text(SUM)
    return path


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    out, err = process.communicate(timeout=200)
    return process.returncode, sorted(out.splitlines()), err


def test_ranks_meet(aiodist: Start, script: Path) -> None:
    status, out, err = finish(aiodist("run", "-n", 3, script))
    assert (status, out, err) == (0, ["[0] world 6", "[1] world 6", "[2] world 6"], "")


def test_rank_that_fails_is_named_although_others_fail_too(aiodist: Start, script: Path) -> None:
    status, _, err = finish(aiodist("run", "-n", 3, script, "1", patient=True))
    assert status == 1
    last = err[err.index("aiodist run: rank 1 of 3 failed with exit code 1") :]
    assert last.endswith("[1] ValueError: this one fails\n")


async def test_several_runs_share_a_coordinator(aiodist: Start, script: Path) -> None:
    async with Coordinator("tcp://127.0.0.1:0") as coordinator:
        one = aiodist("run", "-n", 2, "--coordinator", coordinator.address, script)
        two = aiodist(
            "run", "-n", 3, "--coordinator", coordinator.address, "--group", "other", script
        )
        ends = await asyncio.gather(asyncio.to_thread(finish, one), asyncio.to_thread(finish, two))
    assert ends[0] == (0, ["[0] world 3", "[1] world 3"], "")
    assert ends[1] == (0, ["[0] other 6", "[1] other 6", "[2] other 6"], "")


def nodes(
    aiodist: Start, address: str, script: Path, *arguments: str, **more_env: str
) -> list[tuple[int, list[str], str]]:
    """The ends of two nodes with two ranks each."""
    run = ("run", "-n", 2, "--nnodes", 2, "--coordinator", address, "--node-rank")
    started = [
        aiodist(*run, node, script, *arguments, patient=True, more_env=more_env)
        for node in range(2)
    ]
    return [finish(process) for process in started]


async def test_two_nodes(aiodist: Start, script: Path) -> None:
    async with Coordinator("tcp://127.0.0.1:0") as coordinator:
        first, second = await asyncio.to_thread(nodes, aiodist, coordinator.address, script)
    assert first == (0, ["[0] world 10", "[1] world 10"], "")
    assert second == (0, ["[2] world 10", "[3] world 10"], "")


async def test_launchers_of_nodes_leave_no_traces(
    aiodist: Start, script: Path, tmp_path: Path
) -> None:
    where = {"AIODIST_TRACE": "traces"}
    async with Coordinator("tcp://127.0.0.1:0") as coordinator:
        ends = await asyncio.to_thread(nodes, aiodist, coordinator.address, script, **where)
    assert not any(status for status, *_ in ends)
    names = sorted(path.name.partition("-pid")[0] for path in (tmp_path / "traces").iterdir())
    assert names == [f"world-rank{rank}" for rank in range(4)]


async def test_failure_on_one_node_ends_the_other(aiodist: Start, script: Path) -> None:
    async with Coordinator("tcp://127.0.0.1:0") as coordinator:
        first, second = await asyncio.to_thread(nodes, aiodist, coordinator.address, script, "3")
    assert second[0] == 1
    assert second[2].endswith("[3] ValueError: this one fails\n")
    assert first[0] == 1


SLOW_TO_STOP = """
import os, signal, sys

if os.environ["RANK"] == "0":
    open("fifo").read()
    sys.exit("the cause")
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, lambda *_: print("not yet", flush=True))
    open("fifo", "w").close()
while True:
    signal.pause()
"""


async def test_a_failure_is_told_before_the_ranks_have_stopped_and_ctrl_c_keeps_it(
    aiodist: Start, tmp_path: Path
) -> None:
    path = tmp_path / "slow_to_stop.py"
    path.write_text(SLOW_TO_STOP)
    os.mkfifo(tmp_path / "fifo")
    async with Coordinator("tcp://127.0.0.1:0") as coordinator:
        run = ("run", "-n", 2, "--nnodes", 2, "--coordinator", coordinator.address, "--grace", 3600)
        one, two = (aiodist(*run, "--node-rank", node, path) for node in range(2))
        failed = "aiodist run: rank 0 of 4 failed with exit code 1; "
        told = (1, [], f"{failed}ranks 2 and 3 stopped\n")
        assert await asyncio.to_thread(finish, two) == told
        assert one.stdout is not None
        assert await asyncio.to_thread(one.stdout.readline) == "[1] not yet\n"
        one.send_signal(signal.SIGINT)
        status, _, err = await asyncio.to_thread(finish, one)
    end = f"{failed}rank 1 stopped; the end of its stderr:\n[0] the cause\n"
    assert (status, err) == (1, f"[0] the cause\n{end}")


async def test_nodes_must_agree_on_the_number_of_ranks(aiodist: Start, script: Path) -> None:
    async with Coordinator("tcp://127.0.0.1:0") as coordinator:
        run = ("run", "--nnodes", 2, "--coordinator", coordinator.address, script)
        one = aiodist(*run[:-1], "-n", 1, "--node-rank", 0, script)
        two = aiodist(*run[:-1], "-n", 2, "--node-rank", 1, script)
        ends = await asyncio.gather(asyncio.to_thread(finish, one), asyncio.to_thread(finish, two))
    for status, out, err in ends:
        assert (status, out) == (1, [])
        assert "must be the same on all, but it is node 0: 1, node 1: 2" in err


def test_several_nodes_need_a_coordinator_that_answers(aiodist: Start, script: Path) -> None:
    run = ("run", "-n", 1, "--nnodes", 2, "--node-rank", 0, "--node-timeout", "0.3")
    status, _, err = finish(aiodist(*run, "--coordinator", "tcp://127.0.0.1:9", script))
    assert status == 1
    assert "aiodist run: no coordinator answered at tcp://127.0.0.1:9" in err
    assert "for several nodes, or for an elastic group, run `aiodist coordinator`" in err


async def test_a_node_that_waits_for_others_says_so(aiodist: Start, script: Path) -> None:
    async with Coordinator("tcp://127.0.0.1:0") as coordinator:
        notes: asyncio.Queue[str] = asyncio.Queue()
        coordinator.observers.append(lambda note: notes.put_nowait(note.event))
        run = ("run", "-n", 1, "--nnodes", 2, "--node-rank", 0)
        process = aiodist(*run, "--coordinator", coordinator.address, script)
        assert await notes.get() == "waiting"
        process.send_signal(signal.SIGUSR1)
        assert process.stderr is not None
        line = await asyncio.to_thread(process.stderr.readline)
        text = "aiodist run: no ranks yet: waiting for the other nodes at"
        assert line == f"{text} {coordinator.address}\n"
        process.send_signal(signal.SIGINT)
        assert (await asyncio.to_thread(finish, process))[0] == 130


ELASTIC = """
import asyncio, os, signal
import aiodist

async def main():
    place, again = os.environ["LOCAL_RANK"], int(os.environ["AIODIST_RESTART_COUNT"])
    async for group in aiodist.epochs(join_window=0.2):
        async with group:
            again = max(await group.all_gather(again))
            if group.size < 3 or not again:
                if group.size == 3 and place == "1":
                    os.kill(os.getpid(), signal.SIGKILL)
                await group.recv()  # until somebody is lost, or comes
            print("of", group.size, again)

asyncio.run(main())
"""


def test_a_rank_that_dies_is_started_again_and_taken_in(aiodist: Start, tmp_path: Path) -> None:
    path = tmp_path / "elastic.py"
    path.write_text(ELASTIC)
    status, out, err = finish(aiodist("run", "-n", "2:3", "--max-restarts", 1, path))
    assert (status, out) == (0, ["[0] of 3 1", "[1] of 3 1", "[2] of 3 1"]), err
    died = "aiodist run: rank 1 of 3 failed with signal SIGKILL; started again, restarts left: 0"
    assert died in err.splitlines()


LATE = """
import asyncio, os, sys
import aiodist

async def main(timeout):
    async for group in aiodist.epochs(timeout=timeout):
        async with group:
            await group.barrier()

is_successor = os.environ["AIODIST_RESTART_COUNT"] != "0"
if os.environ["AIODIST_RESTART_COUNT"] == "1":
    open("fifo").read()  # until the other rank has ended
asyncio.run(main(1.0 if is_successor else 60.0))
if os.environ["LOCAL_RANK"] == "0":
    sys.exit("disk full")
os.open("fifo", os.O_WRONLY)  # waits for the successor, and stays open until the end
"""


def test_a_rank_that_is_started_again_too_late_is_not_started_once_more(
    aiodist: Start, tmp_path: Path
) -> None:
    """Its successor waits for ranks that have ended. The run says what it died of."""
    path = tmp_path / "late.py"
    path.write_text(LATE)
    os.mkfifo(tmp_path / "fifo")
    status, _, err = finish(aiodist("run", "-n", "2:2", "--max-restarts", 2, path))
    died = "aiodist run: rank 0 of 2 failed with exit code 1; "
    assert [line.removeprefix(died) for line in err.splitlines() if line.startswith(died)] == [
        "started again, restarts left: 1",
        "not started again, because 1 of 2 ended with 0 and a group needs 2",
        "the end of its stderr:",
    ]
    assert (status, err.splitlines()[-1]) == (1, "[0] disk full")


def test_a_run_that_cannot_spare_a_rank_ends_with_it(aiodist: Start, tmp_path: Path) -> None:
    path = tmp_path / "failing.py"
    fails = "import os, signal\nif os.environ['LOCAL_RANK'] == '0': raise ValueError('no')\n"
    path.write_text(fails + "signal.pause()\n")
    status, out, err = finish(aiodist("run", "-n", "2", "--max-restarts", 1, path, patient=True))
    assert (status, out) == (1, [])
    first, *_, last = err.splitlines()
    assert first.endswith("rank 0 of 2 failed with exit code 1; started again, restarts left: 0")
    assert "aiodist run: rank 0 of 2 failed with exit code 1; rank 1 stopped; the end of" in err
    assert last == "[0] ValueError: no"
    assert err.count("Traceback") == 2


def test_ranks_that_the_launcher_stops_are_no_loss_that_it_tells_of(
    aiodist: Start, tmp_path: Path
) -> None:
    path = tmp_path / "waits.py"
    path.write_text(
        "import asyncio, aiodist\n"
        "async def main():\n"
        "    async with aiodist.connect() as group:\n"
        "        await group.barrier()\n"
        "        print('ready', flush=True)\n"
        "        await group.recv()  # nobody sends\n"
        "asyncio.run(main())\n"
    )
    process = aiodist("run", "-n", 3, path)
    assert process.stdout is not None
    assert {process.stdout.readline() for _ in range(3)} == {f"[{n}] ready\n" for n in range(3)}
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process)
    assert (status, err) == (130, "aiodist run: SIGINT; ranks 0, 1 and 2 stopped\n")
