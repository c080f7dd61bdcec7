"""`aiodist run` as a user meets it. The ranks of most tests are plain Python."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

Start = Callable[..., "subprocess.Popen[str]"]
Gone = Callable[[int], bool]

FOREVER = "import os, signal; print('pid', os.getpid(), flush=True); signal.pause()"


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str], list[str]]:
    """Exit status, and the lines of stdout and stderr."""
    out, err = process.communicate(timeout=200)
    return process.returncode, out.splitlines(), err.splitlines()


def read_pids(process: subprocess.Popen[str], count: int) -> dict[str, int]:
    """Read ``[rank] pid N`` of `count` ranks."""
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(count)]
    found = re.findall(r"^\[(\d+)\] pid (\d+)\n", "".join(lines), re.MULTILINE)
    assert len(found) == count, lines
    return {rank: int(pid) for rank, pid in found}


def test_ranks_know_who_they_are(aiodist: Start, script: Callable[[str], Path]) -> None:
    path = script(
        "import os\n"
        "for name in ('AIODIST_RANK', 'AIODIST_SIZE', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK',\n"
        "             'LOCAL_WORLD_SIZE', 'MASTER_ADDR'):\n"
        "    print(name, os.environ[name])\n"
        "assert os.environ['AIODIST_ADDRESS'].startswith('tcp://127.0.0.1:')\n"
        "assert os.environ['AIODIST_RUN_ID'] and int(os.environ['MASTER_PORT'])\n"
        "assert os.environ['AIODIST_GROUP'] == 'world'\n"
    )
    status, out, err = finish(aiodist("run", "-n", 3, path))
    assert (status, err) == (0, [])
    for rank in "012":
        assert [line for line in out if line.startswith(f"[{rank}]")] == [
            f"[{rank}] AIODIST_RANK {rank}",
            f"[{rank}] AIODIST_SIZE 3",
            f"[{rank}] RANK {rank}",
            f"[{rank}] WORLD_SIZE 3",
            f"[{rank}] LOCAL_RANK {rank}",
            f"[{rank}] LOCAL_WORLD_SIZE 3",
            f"[{rank}] MASTER_ADDR 127.0.0.1",
        ]


def test_arguments_belong_to_the_script(aiodist: Start, script: Callable[[str], Path]) -> None:
    path = script("import sys; print(sys.argv[1:])")
    status, out, _ = finish(aiodist("run", "-n", 1, path, "-n", "7", "--help", "a b"))
    assert (status, out) == (0, ["[0] ['-n', '7', '--help', 'a b']"])


def test_module(aiodist: Start, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys; print(__name__, sys.argv[1:])")
    status, out, _ = finish(aiodist("run", "-n", 1, "-m", "job", "x"))
    assert (status, out) == (0, ["[0] __main__ ['x']"])


@pytest.mark.parametrize(
    ("options", "inherited", "group"),
    [
        (("--group", "mine"), "", "mine"),
        (("--group", "mine"), "other", "mine"),
        (("--group", "world"), "other", "world"),
        ((), "other", "other"),
    ],
)
def test_the_group_of_the_command_line_comes_before_that_of_the_environment(
    options: tuple[str, ...], inherited: str, group: str,
    aiodist: Start, script: Callable[[str], Path],
) -> None:  # fmt: skip
    path = script(
        "import aiodist, asyncio\n"
        "async def main():\n"
        "    async with aiodist.connect() as group:\n"
        "        print(group.name)\n"
        "asyncio.run(main())\n"
    )
    run = aiodist("run", "-n", 1, *options, path, more_env={"AIODIST_GROUP": inherited})
    assert finish(run)[:2] == (0, [f"[0] {group}"])


def test_an_empty_token_is_refused_before_ranks_are_started(
    aiodist: Start, script: Callable[[str], Path]
) -> None:
    run = aiodist(
        "run", "-n", 1, "--coordinator", "tcp://127.0.0.1:1", script("print('started')"),
        more_env={"AIODIST_TOKEN": ""},
    )  # fmt: skip
    status, out, err = finish(run)
    assert (status, out) == (1, [])
    assert err[0].startswith("aiodist run: AIODIST_TOKEN is set, but empty")


def test_output_is_passed_on_as_it_is(aiodist: Start, script: Callable[[str], Path]) -> None:
    path = script(
        "import os, sys\n"
        "os.write(1, b'\\xff\\x00\\n'); os.write(2, b'to stderr\\n')\n"
        "os.write(1, b'no end')\n"
    )
    status, out, err = finish(aiodist("run", "-n", 1, path))
    assert status == 0
    assert out == ["[0] \udcff\x00", "[0] no end"]
    assert err == ["[0] to stderr"]


def test_first_failure_stops_all(
    aiodist: Start, script: Callable[[str], Path], gone: Gone, tmp_path: Path
) -> None:
    path = script(
        "import os, signal, sys\n"
        "print('pid', os.getpid(), flush=True)\n"
        "if os.environ['RANK'] != '1': signal.pause()\n"
        "open(sys.argv[1]).read()\n"
        "raise KeyError('mine')\n"
    )
    gate = tmp_path / "gate"
    subprocess.run(["mkfifo", str(gate)], check=True)
    process = aiodist("run", "-n", 3, path, gate, patient=True)
    pids = read_pids(process, 3)
    gate.write_text("")
    status, _, err = finish(process)
    assert status == 1
    headline = (
        "aiodist run: rank 1 of 3 failed with exit code 1; ranks 0 and 2 stopped; "
        "the end of its stderr:"
    )
    last = err[err.index(headline) + 1 :]
    assert last[0] == "[1] Traceback (most recent call last):"
    assert last[-1] == "[1] KeyError: 'mine'"
    assert err.count(last[0]) == 1
    assert all(gone(pid) for pid in pids.values())


def test_a_traceback_of_several_ranks_is_shown_once(
    aiodist: Start, script: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also of those that have written it when they are stopped."""
    path = script(
        "import os, signal, sys, traceback\n"
        "gate = sys.argv[1] + os.environ['RANK']\n"
        "try:\n"
        "    raise KeyError('of all')\n"
        "except KeyError:\n"
        "    if os.environ['RANK'] != '1':\n"
        "        traceback.print_exc()\n"
        "        open(gate, 'w').write('x')\n"
        "        signal.pause()\n"
        "    for rank in '023':\n"
        "        open(sys.argv[1] + rank).read()\n"
        "    raise\n"
    )
    for rank in "023":
        subprocess.run(["mkfifo", str(tmp_path / f"gate{rank}")], check=True)
    status, _, err = finish(aiodist("run", "-n", 4, path, tmp_path / "gate", patient=True))
    assert status == 1
    assert [line for line in err if "KeyError: 'of all'" in line] == ["[1] KeyError: 'of all'"]
    assert err[0].startswith("aiodist run: rank 1 of 4 failed with exit code 1; ranks 0, 2 and 3")
    assert err[-1] == "aiodist run: the same on ranks 0, 2 and 3"


def test_what_a_rank_writes_after_the_error_of_another_is_shown_although_it_is_stopped(
    aiodist: Start, script: Callable[[str], Path], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    subprocess.run(["mkfifo", str(gate)], check=True)
    path = script(
        "import os, signal, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    open(sys.argv[1]).read()\n"
        "    raise KeyError('mine')\n"
        "sys.stderr.write('Traceback (most recent call last):\\n  File\\n'\n"
        "    'aiodist.errors.PeerLostError: of old\\nno checkpoint\\n')\n"
        "open(sys.argv[1], 'w').write('x')\n"
        "signal.pause()\n"
    )
    _, _, err = finish(aiodist("run", "-n", 2, path, gate, patient=True))
    assert err[:2] == ["[0] aiodist.errors.PeerLostError: of old", "[0] no checkpoint"]


def test_a_traceback_that_a_rank_logs_is_shown_while_it_goes_on(
    aiodist: Start, script: Callable[[str], Path], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    subprocess.run(["mkfifo", str(gate)], check=True)
    path = script(
        "import sys, traceback\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: traceback.print_exc()\n"
        "open(sys.argv[1]).read()\n"
    )
    process = aiodist("run", "-n", 1, path, gate)
    assert process.stderr is not None
    shown = [process.stderr.readline() for _ in range(5)]
    assert shown[0] == "[0] Traceback (most recent call last):\n"
    assert shown[-1] == "[0] ZeroDivisionError: division by zero\n"
    gate.write_text("")
    assert finish(process) == (0, [], [])


def test_one_failure_is_shown_once_and_its_consequences_by_a_line_each(
    aiodist: Start, script: Callable[[str], Path], tmp_path: Path
) -> None:
    # The ranks that lose rank 1 end before it does: it waits for the locks that they hold.
    path = script(
        "import asyncio, fcntl, os, sys\n"
        "rank = os.environ['RANK']\n"
        "lock = os.open(sys.argv[1] + rank, os.O_CREAT)\n"
        "async def main():\n"
        "    if rank == '1':\n"
        "        for other in '02':\n"
        "            open(sys.argv[2] + other).read()\n"
        "            fcntl.flock(os.open(sys.argv[1] + other, os.O_CREAT), fcntl.LOCK_EX)\n"
        "        raise KeyError('mine')\n"
        "    fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "    open(sys.argv[2] + rank, 'w').write('locked')\n"
        "    import aiodist\n"
        "    error = aiodist.PeerLostError('rank 1 is gone', ranks=[1])\n"
        "    error.add_note(rank)\n"
        "    raise error\n"
        "asyncio.run(main())\n"
    )
    for rank in "02":
        subprocess.run(["mkfifo", str(tmp_path / f"gate{rank}")], check=True)
    run = aiodist("run", "-n", 3, path, tmp_path / "lock", tmp_path / "gate", patient=True)
    status, _, err = finish(run)
    assert status == 1
    lost = "aiodist.errors.PeerLostError: rank 1 is gone"
    head = "aiodist run: rank 1 of 3 failed with exit code 1; the end of its stderr:"
    assert sorted([err[:2], err[2:4]]) == [[f"[{it}] {lost}", f"[{it}] {it}"] for it in (0, 2)]
    assert err[4] == head
    assert err[5] == "[1] Traceback (most recent call last):"
    assert err[-1] == "[1] KeyError: 'mine'"
    assert not [line for line in err if "/asyncio/" in line]


@pytest.mark.parametrize(
    ("ending", "status", "text"),
    [
        ("sys.exit(7)", 7, "exit code 7; it wrote nothing to stderr"),
        ("os.kill(os.getpid(), 9)", 137, "signal SIGKILL; it wrote nothing to stderr"),
        ("sys.exit('bad luck')", 1, "exit code 1; the end of its stderr:"),
    ],
)
def test_exit_status_is_that_of_the_rank(
    aiodist: Start, script: Callable[[str], Path], ending: str, status: int, text: str
) -> None:
    path = script(f"import os, sys\n{ending}\n")
    found, _, err = finish(aiodist("run", "-n", 1, path))
    assert found == status
    assert f"aiodist run: rank 0 of 1 failed with {text}" in err


def test_cause_is_shown_rather_than_its_consequence(
    aiodist: Start, script: Callable[[str], Path], tmp_path: Path
) -> None:
    # Rank 0 fails first, by a lost peer; rank 1, the cause, ends when rank 0 lets go of the lock.
    path = script(
        "import fcntl, os, sys\n"
        "lock = os.open(sys.argv[1], os.O_CREAT)  # open until the process is gone\n"
        "if os.environ['RANK'] == '0':\n"
        "    fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "    open(sys.argv[2], 'w').write('locked')\n"
        "    import aiodist\n"
        "    raise aiodist.PeerLostError('rank 1 is gone', ranks=[1])\n"
        "open(sys.argv[2]).read()\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "sys.exit('the cause')\n"
    )
    gate = tmp_path / "gate"
    subprocess.run(["mkfifo", str(gate)], check=True)
    run = aiodist("run", "-n", 2, path, tmp_path / "lock", gate, patient=True)
    status, _, err = finish(run)
    assert status == 1
    assert err[-2].startswith("aiodist run: rank 1 of 2 failed with exit code 1;")
    assert err[-1] == "[1] the cause"


def test_consequence_alone_is_shown(aiodist: Start, script: Callable[[str], Path]) -> None:
    path = script(
        "import os, signal\n"
        "if os.environ['RANK'] == '1': signal.pause()\n"
        "import aiodist\n"
        "raise aiodist.PeerLostError('rank 1 is gone', ranks=[1])\n"
    )
    status, _, err = finish(aiodist("run", "-n", 2, path))
    assert status == 1
    assert "aiodist run: rank 0 of 2 failed with exit code 1; rank 1 stopped" in "\n".join(err)
    assert err[-1] == "[0] aiodist.errors.PeerLostError: rank 1 is gone"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_all(
    aiodist: Start, script: Callable[[str], Path], gone: Gone, number: signal.Signals
) -> None:
    process = aiodist("run", "-n", 2, "--grace", 1000, script(FOREVER))
    pids = read_pids(process, 2)
    process.send_signal(number)
    status, out, err = finish(process)
    assert (status, out) == (128 + number, [])
    assert err == [f"aiodist run: {number.name}; ranks 0 and 1 stopped"]
    assert all(gone(pid) for pid in pids.values())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_the_command_was_told_to_ignore_ends_nothing(
    aiodist: Start, script: Callable[[str], Path], number: signal.Signals
) -> None:
    process = aiodist("run", "-n", 2, script(FOREVER), ignored=number)
    read_pids(process, 2)
    process.send_signal(number)
    process.send_signal(signal.SIGUSR1)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("coordinator tcp://")  # it has seen both
    process.terminate()
    status, _, err = finish(process)
    assert (status, err[-1]) == (143, "aiodist run: SIGTERM; ranks 0 and 1 stopped")


STUBBORN = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: print("not yet", flush=True))
print("pid", os.getpid(), flush=True)
while True: signal.pause()
"""


def test_stubborn_ranks_are_killed_after_the_grace_time(
    aiodist: Start, script: Callable[[str], Path], gone: Gone
) -> None:
    process = aiodist("run", "-n", 2, "--grace", "0.2", script(STUBBORN))
    pids = read_pids(process, 2)
    process.send_signal(signal.SIGINT)
    status, out, _ = finish(process)
    # On a slow machine they may have no time for it: see the next but one.
    assert status == 130
    assert {*out} <= {"[0] not yet", "[1] not yet"}
    assert all(gone(pid) for pid in pids.values())


def test_stopped_ranks_end_without_the_grace_time(
    aiodist: Start, script: Callable[[str], Path], gone: Gone
) -> None:
    process = aiodist("run", "-n", 2, "--grace", 1000, script(FOREVER))
    pids = read_pids(process, 2)
    os.kill(pids["1"], signal.SIGSTOP)
    while psutil.Process(pids["1"]).status() != psutil.STATUS_STOPPED:
        os.sched_yield()  # a SIGTERM that comes before it has stopped would end it
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 128 + signal.SIGTERM
    assert all(gone(pid) for pid in pids.values())


def test_second_ctrl_c_does_not_wait_for_the_grace_time(
    aiodist: Start, script: Callable[[str], Path], gone: Gone
) -> None:
    process = aiodist("run", "-n", 1, "--grace", "3600", script(STUBBORN))
    pids = read_pids(process, 1)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "[0] not yet\n"
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    assert gone(pids["0"])


def test_ranks_die_with_a_killed_launcher(
    aiodist: Start, script: Callable[[str], Path], gone: Gone
) -> None:
    process = aiodist("run", "-n", 2, script(FOREVER))
    pids = read_pids(process, 2)
    process.kill()
    assert all(gone(pid) for pid in pids.values())


def test_what_a_rank_leaves_behind_is_ended(
    aiodist: Start, script: Callable[[str], Path], gone: Gone
) -> None:
    # The grandchild holds the pipes: without its end, the run would wait for their end.
    path = script(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print('pid', child.pid, flush=True)\n"
    )
    process = aiodist("run", "-n", 1, path)
    pids = read_pids(process, 1)
    assert finish(process)[0] == 0
    assert gone(pids["0"])


def test_what_a_rank_leaves_in_another_session_does_not_hold_up_the_run(
    aiodist: Start, script: Callable[[str], Path]
) -> None:
    path = script(
        "import subprocess, sys\n"
        "wait = [sys.executable, '-c', 'import signal; signal.pause()']\n"
        "child = subprocess.Popen(wait, start_new_session=True)\n"
        "print(child.pid)\n"
        "print('x' * 300_000)\n"
        "print('end', file=sys.stderr)\n"
    )
    status, out, err = finish(aiodist("run", "-n", 1, path))
    child = int(out[0].removeprefix("[0] "))
    os.kill(child, signal.SIGKILL)
    assert (status, err) == (0, ["[0] end"])
    assert sum(line.count("x") for line in out) == 300_000


def test_reader_that_goes_away_ends_the_run(
    aiodist: Start, script: Callable[[str], Path], gone: Gone
) -> None:
    path = script("import os\nprint('pid', os.getpid(), flush=True)\nwhile True: print('more')\n")
    process = aiodist("run", "-n", 1, path)
    pids = read_pids(process, 1)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=200) == 128 + signal.SIGPIPE
    assert gone(pids["0"])


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (
            ("run", "-n", "1", "script.py"),
            "aiodist run: the output cannot be written: No space left on device; rank 0 stopped\n",
        ),
        (("doctor",), "aiodist: cannot write the output: No space left on device\n"),
        (("doctor", "--json"), "aiodist: cannot write the output: No space left on device\n"),
    ],
)
@pytest.mark.sample(2)
def test_a_full_disk_is_named(
    command: tuple[str, ...], text: str, script: Callable[[str], Path], tmp_path: Path
) -> None:
    script("import signal\nprint('more', flush=True)\nsignal.pause()\n")
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "aiodist_cli", *command],
            stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False,
        )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (1, text)


@pytest.mark.parametrize("argument", ["--version", "doctor"])  # written by typer, and by rich
def test_a_reader_that_is_gone_is_told_by_the_exit_status(argument: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        ended = subprocess.run(
            [sys.executable, "-m", "aiodist_cli", argument],
            stdout=pipe, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False,
        )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_a_page_of_the_run(aiodist: Start, script: Callable[[str], Path]) -> None:
    path = script(
        "import asyncio, aiodist\n"
        "async def main():\n"
        "    async with aiodist.connect() as group:\n"
        "        await group.barrier()\n"
        "        print('ready', flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = aiodist("run", "-n", 2, "--http", "127.0.0.1:0", path)
    assert process.stderr is not None
    assert process.stdout is not None
    said = process.stderr.readline()
    assert said.startswith("aiodist run: http on http://127.0.0.1:"), said
    assert {process.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
    with urllib.request.urlopen(f"{said.split()[-1]}status", timeout=200) as response:
        (group,) = json.load(response)["groups"]
    assert [member["rank"] for member in group["members"]] == [0, 1]
    process.terminate()
    assert finish(process)[0] == 143
