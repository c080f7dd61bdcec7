"""How commands fail and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import typer

from aiodist.errors import printable
from aiodist.launching import spawn
from aiodist.wire.address import parse_reachable

T = TypeVar("T")

STOPPING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that stop a command, in addition to SIGINT."""


class CommandError(typer.Exit):
    """End the command with `status`, after `message` was printed to stderr in printable form."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(status)
        typer.echo("\n".join(map(printable, message.split("\n"))), err=True)


def usage_error(message: str, option: str | None = None) -> typer.BadParameter:
    """Wrong use of the command: typer shows it with the usage line and exits with status 2."""
    return typer.BadParameter(message, param_hint=option)


def usable_address(given: str, option: str) -> str:
    """Check and return the address of a coordinator. Raises a usage error if it is invalid."""
    try:
        parse_reachable(given)
    except ValueError as error:
        raise usage_error(str(error), option) from error
    return given


def unwritable(output: Path) -> str | None:
    """Why a file cannot be written, for a check before the work; None: it can."""
    folder = output.absolute().parent
    try:
        if not folder.is_dir():
            return f"there is no folder {folder}"
        if output.is_fifo():
            return None  # to open and close it would end its reader
        if output.exists():
            os.close(os.open(output, os.O_WRONLY | os.O_NONBLOCK))
        else:
            with tempfile.TemporaryFile(dir=output.resolve().parent):
                pass
    except OSError as error:
        return f"{output.absolute()} cannot be written: {error.strerror}"
    except ValueError as error:  # of a name that no file can have
        return f"{output.absolute()} cannot be written: {error}"
    return None


def run_until_signal(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in a new loop.

    SIGINT (Ctrl-C), SIGTERM and SIGHUP cancel it, so that it ends what it started. Then this raises
    SystemExit with the status 128 + signal.
    """
    came: list[int] = []

    async def cancellable() -> T:
        task = asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            came.append(number)
            task.cancel()

        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup does
                # Windows has none, and they only come to the main thread.
                with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                    asyncio.get_running_loop().add_signal_handler(number, stop, number)
        return await main

    try:
        with asyncio.Runner(loop_factory=spawn.new_event_loop) as runner:
            return runner.run(cancellable())
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except BaseException:
        if not came:
            raise
        # A terminal that hangs up also fails what is written to it at the end.
        raise SystemExit(128 + came[0]) from None
