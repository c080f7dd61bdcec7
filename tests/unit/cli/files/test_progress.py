"""What a terminal shows while files move, and how work in a thread ends."""

from __future__ import annotations

import asyncio
import io
import threading
from typing import Any

import pytest
from rich.console import Console

import aiodist
from aiodist_cli.files import progress
from aiodist_cli.files.reading import Read


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is written to stderr, which is a terminal."""
    shown = io.StringIO()

    def console(**_: Any) -> Console:
        return Console(file=shown, force_terminal=True, width=120, color_system=None)

    monkeypatch.setattr(progress, "Console", console)
    return shown


async def test_bytes_are_counted_on_a_terminal(terminal: io.StringIO) -> None:
    def work(read: Read) -> str:
        for _ in range(4):
            read(1_000_000)
        return "done"

    assert await progress.in_thread("writing version 7", 4_000_000, work) == "done"
    assert "writing version 7" in terminal.getvalue()
    assert "4.0/4.0 MB" in terminal.getvalue()
    assert "/s" in terminal.getvalue()


async def test_nothing_is_shown_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert await progress.in_thread("writing", 1, lambda read: read(1)) is None
    async with (
        aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
        aiodist.subscriber("policy", address=coordinator.address) as weights,
        progress.arriving(weights),
    ):
        pass
    assert capsys.readouterr() == ("", "")


async def test_a_version_that_arrives_is_shown(
    terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "OFTEN", 0.001)
    shows = asyncio.Event()
    reset = progress.Progress.reset

    def told(*given: Any, **more: Any) -> None:
        reset(*given, **more)
        shows.set()

    monkeypatch.setattr(progress.Progress, "reset", told)
    async with (
        aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
        aiodist.publisher("policy", address=coordinator.address) as out,
        aiodist.subscriber("policy", address=coordinator.address) as weights,
    ):
        await out.publish([1.5], version=7)
        async with progress.arriving(weights):
            await weights.latest()
            await shows.wait()
    assert "version 7 arrives" in terminal.getvalue()


async def test_work_ends_with_its_next_piece() -> None:
    begun, go_on = threading.Event(), threading.Event()
    done: list[int] = []

    def work(read: Read) -> None:
        for piece in range(1000):
            begun.set()
            go_on.wait()
            read(1)
            done.append(piece)

    task = asyncio.ensure_future(progress.in_thread("writing", 1000, work))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == []
