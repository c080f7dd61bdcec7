"""What `aiodist run` says of its ranks on SIGUSR1, and of traces that it has not joined."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aiodist.environment import TRACE
from aiodist_cli import launcher, run


async def test_a_status_that_cannot_be_asked_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the certificate authority may be gone since the start."""
    monkeypatch.setenv("AIODIST_TLS_CA", "/no/such/file")
    said: list[bytes] = []

    async def write(fd: int, data: bytes) -> None:
        said.append(data)

    writer: Any = SimpleNamespace(write=write)
    place: Any = SimpleNamespace(nodes=1)
    job: Any = SimpleNamespace(address="tls://127.0.0.1:1", token=None)
    await launcher._tell_status(writer, place, job)
    assert said[0].startswith(b"aiodist run: no status: ")


@pytest.mark.parametrize("twice", [False, True])
def test_an_interrupt_while_traces_are_joined_leaves_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    twice: bool,
) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    def again(*said: str, err: bool) -> None:
        print(*said, file=sys.stderr)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "joined", interrupted)
    if twice:
        monkeypatch.setattr(run.typer, "echo", again)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(TRACE, "")
    with pytest.raises(KeyboardInterrupt), run._tracing(tmp_path / "run.json"):
        parts = os.environ[TRACE]
        (Path(parts) / "0.json").touch()
    assert f"the ranks' traces are kept: aiodist trace {parts} " in capsys.readouterr().err
    assert (Path(parts) / "0.json").exists()
