"""`aiodist bench` as a user calls it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from aiodist_cli import bench_run, errors
from aiodist_cli.bench_cases import Effort
from aiodist_cli.bench_report import Report
from aiodist_cli.bench_run import publish
from aiodist_cli.main import app

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")
    return lambda *arguments: CliRunner().invoke(app(), ["bench", *arguments], prog_name="aiodist")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--sizes", "8"), "'8' is no size: expected such as 8B"),
        (("--ops", "all_reduec"), "there is no operation 'all_reduec' to measure"),
        (("--ops", ""), "at least one operation and one number of ranks is needed"),
        (("--ranks", "two"), "'two' is no number of ranks: expected such as 2 or 2,4"),
        (("-n", "1"), "1 ranks cannot communicate"),
        (("--ops", "all_to_all", "--ranks", "4", "--sizes", "8B"), "cannot be split among 4 ranks"),
        (
            ("--transports", "pigeon"),
            "there is no transport 'pigeon': choose auto, shm, unix or tcp",
        ),
        (("--transports", "cuda_ipc"), "cuda_ipc moves tensors of GPUs, and bench measures host"),
        (("--transports", "inproc"), "inproc joins ranks of one process"),
        (("--compare", "nccl"), "there is no 'nccl' to compare with"),
        (("--mpi", "/opt/mpi"), "MPIs are measured by --compare: add --compare mpi"),
        (("--plot", "x.gif"), "a plot is written as one of"),
        (("--plot", "no/such/x.svg"), "there is no folder"),
        (("--json", "no/such/x.json"), "there is no folder"),
        (("--json", "."), "cannot be written: Is a directory"),
        (("--plot", f"{'x' * 300}.svg"), "cannot be written: File name too long"),
    ],
)
def test_wrong_usage(invoke: Invoke, arguments: tuple[str, ...], problem: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert problem in result.output


def test_a_file_that_cannot_be_written_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(Report(Effort()), {}, tmp_path, None)
    assert f"Is a directory: '{tmp_path}'" in capsys.readouterr().err


def test_each_file_is_written_though_another_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    monkeypatch.setattr(bench_run.bench_plot, "write", lambda _, plot: written.append(plot))
    report = Report(Effort(), results=[SimpleNamespace(summary={"aiodist": 1}, error=None)])
    assert publish(report, {}, tmp_path, tmp_path / "plot.svg")
    assert written == [tmp_path / "plot.svg"]


def test_a_pipe_is_not_opened_before_there_is_something_to_write(tmp_path: Path) -> None:
    """Its reader would see that as the end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert errors.unwritable(pipe) is None
        poll = select.poll()
        poll.register(reading, select.POLLHUP)
        assert poll.poll(0) == []  # no writer has come and gone
    finally:
        os.close(reading)


def test_names_that_no_file_can_have() -> None:
    for name in ("x" * 300 + "/y.json", "a\0b.json"):
        assert "cannot be written" in str(errors.unwritable(Path(name)))


def test_help_has_an_example(invoke: Invoke) -> None:
    text = invoke("--help").output
    assert "auto (its own choice), shm, unix, tcp" in text
    assert "aiodist bench --ops all_reduce,broadcast" in text
    assert "Exit status: 0 if" in text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Temporary files go here, so that what is left can be seen. The path of a socket is short."""
    with tempfile.TemporaryDirectory(prefix="ad-") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@pytest.mark.long
def test_a_small_run(invoke: Invoke, folder: Path, tmp_path: Path) -> None:
    """Two transports of aiodist and nothing else, two operations: table and JSON."""
    file = tmp_path / "out.json"
    result = invoke(
        "--ops", "all_reduce,ping_pong", "--sizes", "8B", "--transports", "auto,tcp",
        "--rounds", "2", "--iterations", "3", "--json", str(file),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    seen = [(r["op"], r["column"]) for r in found["results"] if "group.empty" not in r["column"]]
    assert seen == [
        ("all_reduce", "aiodist"),
        ("all_reduce", "aiodist tcp"),
        ("ping_pong", "aiodist"),
        ("ping_pong", "aiodist tcp"),
    ]
    for row in found["results"]:
        assert row["count"] == 6
        assert 0 < row["median"] <= row["p99"]
    assert found["settings"]["iterations"] == 3
    assert "aiodist tcp" in result.output and "all_reduce, float32, 2 ranks" in result.output
    assert not list(folder.iterdir())


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_leaves_nothing(number: signal.Signals) -> None:
    """Once the ranks are there: an hour of work is ahead, and then there is nothing left."""
    with tempfile.TemporaryDirectory(prefix="ad-") as name:
        process = subprocess.Popen(
            [sys.executable, "-m", "aiodist_cli", "bench", "--sizes", "8B", "--rounds", "100000",
             "--seconds", "0.01"],
            env=os.environ | {"TMPDIR": name, "TERM": "xterm", "FORCE_COLOR": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stderr is not None
            seen = b""
            while b"all_reduce 8 B" not in seen:  # what is measured now
                seen += os.read(process.stderr.fileno(), 4096)
            process.send_signal(number)
            process.communicate(timeout=200)
            assert process.returncode == 128 + number
        finally:
            process.kill()
            process.communicate()
        assert not list(Path(name).iterdir())
