"""`aiodist top` on a terminal, with its keys."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import subprocess
import sys
import termios
from typing import Any

import aiodist


def until(terminal: int, text: str) -> None:
    """Read what is shown until `text` is among it."""
    shown = ""
    while text not in shown:
        shown += os.read(terminal, 4096).decode(errors="replace")


def rest(terminal: int) -> str:
    """Read all that is shown until the command has ended."""
    shown = ""
    with contextlib.suppress(OSError):  # EIO is the end
        while data := os.read(terminal, 4096):
            shown += data.decode(errors="replace")
    return shown


async def test_the_last_table_stays_on_the_terminal() -> None:
    terminal, other = pty.openpty()
    termios.tcsetwinsize(other, (30, 100))
    env: dict[str, Any] = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    async with (
        aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
        aiodist.connect(coordinator.address, size=1, name="the-one"),
    ):
        command = [sys.executable, "-m", "aiodist_cli", "top", coordinator.address, "--count", "1"]
        top = subprocess.Popen(  # noqa: ASYNC220 - it starts in a moment
            command, stdin=other, stdout=other, stderr=other, env=env | {"TERM": "xterm"}
        )
        try:
            os.close(other)
            _, normal_screen, stays = (await asyncio.to_thread(rest, terminal)).partition(
                "\x1b[?1049l"
            )
            assert await asyncio.to_thread(top.wait) == 0
            assert normal_screen
            assert "the-one" in stays
        finally:
            top.kill()
            top.wait()
            os.close(terminal)


async def test_a_rank_is_selected_and_shown_and_q_ends_it() -> None:
    terminal, other = pty.openpty()
    termios.tcsetwinsize(other, (30, 100))
    before = termios.tcgetattr(other)
    env: dict[str, Any] = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    async with (
        aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
        aiodist.connect(coordinator.address, size=1, name="the-one"),
    ):
        command = [sys.executable, "-m", "aiodist_cli", "top", coordinator.address]
        top = subprocess.Popen(  # noqa: ASYNC220 - it starts in a moment
            command, stdin=other, stdout=other, stderr=other, env=env | {"TERM": "xterm"}
        )
        try:
            await asyncio.to_thread(until, terminal, "q: quit")
            os.write(terminal, b"\x1b[B\r")
            await asyncio.to_thread(until, terminal, "host, pid")
            os.write(terminal, b"q")
            assert await asyncio.to_thread(top.wait) == 0
            assert termios.tcgetattr(other) == before
        finally:
            top.kill()
            top.wait()
            os.close(terminal)
            os.close(other)
