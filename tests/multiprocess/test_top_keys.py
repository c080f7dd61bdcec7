"""`aiodist top` on a terminal, with its keys."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import signal
import subprocess
import sys
import termios
from typing import Any

import pytest

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


@pytest.mark.parametrize(("term", "tables"), [("xterm", 1), ("dumb", 2)])
async def test_the_last_table_stays_on_the_terminal(term: str, tables: int) -> None:
    """A terminal that cannot do more keeps all tables."""
    terminal, other = pty.openpty()
    termios.tcsetwinsize(other, (30, 100))
    env: dict[str, Any] = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    async with (
        aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
        aiodist.connect(coordinator.address, size=1, name="the-one"),
    ):
        command = [sys.executable, "-m", "aiodist_cli", "top", coordinator.address]
        command += ["--count", str(tables), "--interval", "0.1"]
        top = subprocess.Popen(  # noqa: ASYNC220 - it starts in a moment
            command, stdin=other, stdout=other, stderr=other, env=env | {"TERM": term}
        )
        try:
            os.close(other)
            shown = await asyncio.to_thread(rest, terminal)
            assert await asyncio.to_thread(top.wait) == 0
            normal_screen = "\x1b[?1049l"
            assert (normal_screen in shown) == (term == "xterm")
            assert shown.rpartition(normal_screen)[2].count("the-one") == tables
        finally:
            top.kill()
            top.wait()
            os.close(terminal)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, None])
async def test_a_rank_is_selected_and_shown_and_the_terminal_is_as_before(
    number: signal.Signals | None,
) -> None:
    """`number`: the signal that ends it; None: it is ended by q."""
    terminal, other = pty.openpty()
    termios.tcsetwinsize(other, (30, 100))
    before = termios.tcgetattr(other)
    env: dict[str, Any] = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    async with (
        aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
        aiodist.connect(coordinator.address, size=1, name="the-one"),
    ):
        # The tests may run with nohup.
        program = "import signal, runpy; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
        program += "runpy.run_module('aiodist_cli', run_name='__main__')"
        command = [sys.executable, "-c", program, "top", coordinator.address]
        top = subprocess.Popen(  # noqa: ASYNC220 - it starts in a moment
            command, stdin=other, stdout=other, stderr=other, env=env | {"TERM": "xterm"}
        )
        try:
            await asyncio.to_thread(until, terminal, "q: quit")
            os.write(terminal, b"\x1b[B\r")
            await asyncio.to_thread(until, terminal, "host, pid")
            if number is None:
                os.write(terminal, b"q")
            else:
                top.send_signal(number)
            await asyncio.to_thread(until, terminal, "\x1b[?1049l")
            assert await asyncio.to_thread(top.wait) == (0 if number is None else 128 + number)
            assert termios.tcgetattr(other) == before
        finally:
            top.kill()
            top.wait()
            os.close(terminal)
            os.close(other)
