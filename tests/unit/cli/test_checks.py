"""What `aiodist doctor` says about what it finds."""

from __future__ import annotations

import json
import os
import socket

import pytest
from typer.testing import CliRunner

from aiodist_cli import checks
from aiodist_cli.main import app


@pytest.mark.parametrize(
    ("version", "system", "level"),
    [
        ((3, 11, 0), "Linux", "ok"),
        ((3, 14, 1), "Darwin", "note"),
        ((3, 10, 9), "Linux", "fail"),
    ],
)
def test_python(version: tuple[int, int, int], system: str, level: str) -> None:
    check = checks.python(version, system)
    assert check.level == level
    assert bool(check.advice) == (level != "ok")


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.package("numpy").level == "ok"
    monkeypatch.setattr(checks, "_NEEDED", ("no-such-package",))
    assert checks.package("no-such-package") == checks.Check(
        "no-such-package", "fail", "not installed", "pip install no-such-package"
    )
    monkeypatch.setattr(checks, "_OPTIONAL", {"no-such-extra": "for nothing"})
    assert checks.package("no-such-extra").level == "note"


def test_cores() -> None:
    assert checks.cores(1).level == "note"
    assert checks.cores(2).level == "ok"


def test_identity() -> None:
    assert checks.identity("boot id", "abc") == checks.Check("boot id", "ok", "abc")
    assert checks.identity("boot id", None).level == "note"


def test_shared_memory() -> None:
    assert checks.shared_memory(None).level == "ok"
    check = checks.shared_memory("the processor is aarch64")
    assert (check.level, check.found) == ("note", "the processor is aarch64")
    assert "sockets" in check.advice


def test_loopback() -> None:
    assert checks.loopback(socket.AF_INET, "127.0.0.1").level == "ok"
    # An address of another host cannot be bound.
    assert checks.loopback(socket.AF_INET, "192.0.2.1").level == "fail"


def test_hostname(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str) -> str:
        if name == "here":
            return "127.0.1.1"
        if name == "there":
            return "10.0.0.1"
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    check = checks.hostname("here")
    assert (check.level, check.found) == ("warn", "here is 127.0.1.1")
    assert "'here' resolves to 127.0.1.1, so other hosts cannot reach rank 0 by it" in check.advice
    assert checks.hostname("there").level == "ok"
    assert checks.hostname("nowhere").level == "note"


@pytest.mark.parametrize(("limit", "level"), [(None, "ok"), (256, "note"), (65536, "ok")])
def test_open_files(limit: int | None, level: str) -> None:
    assert checks.open_files(limit).level == level


def test_environment() -> None:
    assert checks.environment({"HOME": "/"}).level == "ok"
    check = checks.environment(
        {"RANK": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1", "AIODIST_TOKEN": "secret"}
    )
    assert check.level == "note"
    assert check.found == "MASTER_ADDR=x MASTER_PORT=1 RANK=1 AIODIST_TOKEN (set)"
    assert checks.environment({"AIODIST_TLS_CA": "ca.pem"}).found == "AIODIST_TLS_CA=ca.pem"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AIODIST_TOKEN", ""),
        ("AIODIST_TIMEOUT", "soon"),
        ("AIODIST_MIN_SIZE", "few"),
        ("MASTER_ADDR", "x"),
        ("SLURM_STEP_ID", "0"),
    ],
)
def test_an_environment_that_connect_cannot_use(name: str, value: str) -> None:
    check = checks.environment({name: value})
    assert check.level == "warn"
    assert name in check.found
    assert check.advice.startswith("aiodist.connect() raises ValueError: ")


def test_all_checks_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [check.name for check in checks.all_checks(os.environ)]
    assert len(names) == len(set(names))
    assert {"structlog", "aiohttp", "safetensors", "matplotlib", "cloudpickle"} <= {*names}
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("AIODIST_ADDRESS", "tcp://127.0.0.1:1")
    result = CliRunner().invoke(app(), ["doctor"])
    assert all(name in result.output for name in names)
    assert "environment: aiodist.connect() takes these up" in result.output


def test_status_tells_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = checks.Check("numpy", "fail", "not installed", "pip install numpy")
    monkeypatch.setattr(checks, "all_checks", lambda environ: [broken])
    result = CliRunner().invoke(app(), ["doctor", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)[0]["advice"] == "pip install numpy"
    assert CliRunner().invoke(app(), ["doctor"]).exit_code == 1


def test_advice_can_be_copied_as_it_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    advice = "for torch tensors: pip install 'aiodist[torch]'"
    missing = checks.Check("torch", "note", "not [installed]", advice)
    monkeypatch.setattr(checks, "all_checks", lambda environ: [missing])
    monkeypatch.setenv("COLUMNS", "30")  # narrower than the command is long
    output = CliRunner().invoke(app(), ["doctor"]).output
    assert f"torch: {advice}\n" in output
    assert "not [installed]" in output.replace("\n", "")


def test_compiled_part() -> None:
    assert checks.compiled_part("").level == "ok"
    check = checks.compiled_part("AIODIST_CORE=python")
    assert (check.level, check.found) == ("note", "AIODIST_CORE=python")
    assert check.advice.startswith("small collectives between ranks of one host take several times")
