"""The commands in this process: help, versions, wrong usage."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner, Result

from aiodist_cli.main import app


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: str) -> tuple[Result, str]:
        """The result, and all that was shown without the frames and line ends."""
        result = CliRunner().invoke(app(), arguments, prog_name="aiodist")
        return result, re.sub(r"[│╭╮╰╯─\s]+", " ", result.output)

    return run


def test_version(invoke) -> None:
    result, text = invoke("--version")
    assert result.exit_code == 0
    assert text.strip() == f"aiodist {importlib.metadata.version('aiodist')}"


@pytest.mark.parametrize("command", ["run", "coordinator", "status", "doctor", "bench"])
def test_help_has_an_example_and_the_exit_statuses(invoke, command: str) -> None:
    result, text = invoke(command, "--help")
    assert result.exit_code == 0
    assert f" aiodist {command} " in text.partition("Usage:")[2].partition(command)[2]
    assert "Exit status: 0 if" in text


@pytest.mark.parametrize("command", ["push", "pull", "list", "forget"])
def test_help_of_commands_for_weights(invoke, command: str) -> None:
    result, text = invoke("weights", command, "--help")
    assert result.exit_code == 0
    assert f" aiodist weights {command} " in text.partition("Usage:")[2].partition(command)[2]
    assert "Exit status: 0 if" in text
    waits = "for the answer" if command in ("list", "forget") else "for the coordinator at first"
    assert f"How long to wait {waits}" in text


def test_no_command_shows_help(invoke) -> None:
    _, text = invoke()
    assert "Usage: aiodist [OPTIONS] COMMAND" in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("no-such-command",), "No such command 'no-such-command'"),
        (("run", "-n", "1", "no_such.py"), "there is no script 'no_such.py' here"),
        (("run", "-n", "1", "no.mod"), "for a module: aiodist run … -m no.mod"),
        (("run", "--ranks", "0", "x.py"), "expected a number of ranks, as 4, or the least and"),
        (("run", "-n", "3:2", "x.py"), "expected a number of ranks, as 4, or the least and the"),
        (("run", "-n", "4097", "x.py"), "4097 ranks on all nodes: a group has at most 4096"),
        (("run", "-n", "2:", "x.py"), "expected a number of ranks, as 4, or the least and the"),
        (
            ("run", "-n", "2:3", "--stdin", "0", "x.py"),
            "--stdin is for ranks that are started once",
        ),
        (("run", "-n", "2:3", "--nnodes", "2", "x.py"), "--max-restarts are for one node"),
        (("run", "x.py"), "Missing option '-n' / '--ranks'"),
        (("run", "-n", "1"), "Missing argument 'SCRIPT'"),
        (
            ("run", "-n", "1", "--nnodes", "2", "--node-rank", "0", "x.py"),
            "several nodes need a --coordinator that all of them can reach",
        ),
        (
            ("run", "-n", "1", "--nnodes", "2", "--coordinator", "tcp://x:1", "x.py"),
            "say with --node-rank which of the 2 nodes this one is: 0 to 1",
        ),
        (("run", "-n", "1", "--node-rank", "1", "x.py"), "--node-rank is 0 to 0 with --nnodes 1"),
        (("run", "-n", "1", "--coordinator", "x:1", "x.py"), "the address 'x:1' has no scheme"),
        (("run", "-n", "1", "--coordinator", "tcp://x:0", "x.py"), "has port 0, which no"),
        (
            ("run", "-n", "1", "--trace", "/nowhere/run.json", __file__),
            "there is no folder /nowhere",
        ),
        (
            ("run", "-n", "1", "--http", "0.0.0.0:8080", __file__),
            "can be reached from other hosts",
        ),
        (("run", "-n", "1", "--http", "nonsense", __file__), "expected HOST:PORT"),
        (
            ("run", "-n", "1", "--http", "127.0.0.1:0", "--coordinator", "tcp://x:1", __file__),
            "with --http",
        ),
        (("status",), "Missing argument 'ADDRESS'"),
        (("status", "nonsense"), "the address 'nonsense' has no scheme"),
        (("top", "http://x:1"), "has an unknown scheme 'http'"),
        (("coordinator", "extra"), "extra"),
        (("weights", "push", "p", "x"), "Missing argument 'ADDRESS'"),
        (("weights", "push", "p", "x", "nonsense"), "the address 'nonsense' has no scheme"),
        (("weights", "pull", "p", "tcp://x:1"), "Missing option '--to'"),
        (
            ("weights", "push", "p", "x", "tcp://x:1", "--watch", "--until", "2"),
            "a push with --watch has no last version",
        ),
    ],
)
def test_wrong_usage(invoke, arguments: tuple[str, ...], problem: str) -> None:
    result, text = invoke(*arguments)
    assert result.exit_code == 2
    assert problem in text


@pytest.mark.parametrize(
    ("option", "where"),
    [
        ("--trace", "."),
        ("--trace", "x" * 300),
        ("--flight-recorder", __file__),
        ("--flight-recorder", "x" * 300),
    ],
)
def test_what_may_not_be_written(invoke, option: str, where: str) -> None:
    result, text = invoke("run", "-n", "1", option, where, __file__)
    assert result.exit_code == 2
    assert "cannot be written" in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--listen", "nonsense"), "--listen: the address 'nonsense' has no scheme"),
        (("--listen", "tcp://0.0.0.0:0"), "there is no token"),
        (("--drain", "-1"), "--drain: Input should be greater than or equal to 0"),
    ],
)
def test_coordinator_refuses_what_makes_no_sense(
    invoke, arguments: tuple[str, ...], problem: str
) -> None:
    result, text = invoke("coordinator", *arguments)
    assert result.exit_code == 2
    assert problem in text
    assert "Value error" not in text


@pytest.mark.parametrize("name", ["LISTEN", "DRAIN"])
def test_coordinator_names_the_variable_that_makes_no_sense(
    invoke, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(f"AIODIST_COORDINATOR_{name}", "nonsense")
    result, text = invoke("coordinator")
    assert result.exit_code == 2
    assert f"AIODIST_COORDINATOR_{name}: " in text


def test_coordinator_without_the_server_extra(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiodist_server", None)
    result, text = invoke("coordinator")
    assert result.exit_code == 1
    assert "pip install 'aiodist[server]'" in text


@pytest.mark.parametrize("command", [("status",), ("top",), ("weights", "list")])
def test_the_address_may_stand_in_the_environment(
    invoke, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIODIST_ADDRESS", "nonsense")
    result, text = invoke(*command)
    assert result.exit_code == 2
    assert "the address 'nonsense' has no scheme" in text


@pytest.mark.parametrize("command", ["status", "top"])
def test_an_empty_token_is_refused(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_TOKEN", "")
    result = CliRunner().invoke(app(), [command, "tcp://127.0.0.1:1"])
    assert result.exit_code == 1
    assert f"aiodist {command}: AIODIST_TOKEN is set, but empty" in result.output


@pytest.mark.parametrize(
    ("command", "foreign"),
    [("run", ["aiodist.engine", "aiodist_cli.bench"]), ("doctor", ["aiodist_cli.top"])],
)
def test_a_command_imports_no_other_one(command: str, foreign: list[str]) -> None:
    """To import all of them takes longer than most of them run."""
    code = f"import sys, aiodist_cli.main as m; m.app({command!r}); print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    modules = found.stdout.split()
    assert f"aiodist_cli.{command}" in modules
    assert not {*foreign} & {*modules}
