"""What `aiodist run` says of its ranks on SIGUSR1."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiodist_cli import launcher


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
