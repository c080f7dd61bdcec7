"""What a user sees while files move: bars with rates if stderr is a terminal, and a line for each
version and each failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TypeVar

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from aiodist.channels.subscriber import Subscriber
from aiodist.errors import printable
from aiodist_cli.files.reading import Read

T = TypeVar("T")

OFTEN = 0.2
"""Seconds between two looks at how much of a version has arrived."""


class StoppedError(Exception):
    """Work in a thread ends, because the task that waited for it was cancelled."""


def say(text: str) -> None:
    """A line on stdout."""
    typer.echo(printable(text))


def warn(text: str) -> None:
    """A line on stderr."""
    typer.echo(printable(text), err=True)


def size(nbytes: int) -> str:
    """ "1.2 GB"."""
    return decimal(nbytes)


@contextmanager
def bar(what: str, total: int | None) -> Iterator[Progress]:
    """A bar on stderr, for `total` bytes (None: not known yet); nothing if that is no terminal."""
    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}", markup=False),
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as shown:
        shown.add_task(what, total=total)
        yield shown


async def in_thread(what: str, total: int | None, work: Callable[[Read], T]) -> T:
    """The result of `work`, which runs in a thread and tells how many more bytes it has done. If
    this is cancelled, the work ends with its next piece, and this waits for that."""
    stopping = threading.Event()
    with bar(what, total) as shown:

        def read(nbytes: int) -> None:
            if stopping.is_set():
                raise StoppedError
            shown.advance(shown.task_ids[0], nbytes)

        running = asyncio.ensure_future(asyncio.to_thread(work, read))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            stopping.set()
            with suppress(BaseException):
                await running
            raise


@asynccontextmanager
async def arriving(weights: Subscriber) -> AsyncIterator[None]:
    """Show how much of the newest version has arrived."""
    if not Console(stderr=True).is_terminal:
        yield
        return
    with bar("waiting for a version", None) as shown:
        looking = asyncio.ensure_future(_look(weights, shown))
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait({looking})


async def _look(weights: Subscriber, shown: Progress) -> None:
    newest: int | None = None
    while True:
        if (arrived := weights.arrived) is not None:
            if arrived.version != newest:
                newest = arrived.version
                shown.reset(shown.task_ids[0], description=f"version {newest} arrives")
            shown.update(shown.task_ids[0], total=arrived.nbytes, completed=arrived.here)
        await asyncio.sleep(OFTEN)
