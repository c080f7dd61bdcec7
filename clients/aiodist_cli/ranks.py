"""The ranks of this node: started, read from, and stopped together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, Process
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiodist.launching import spawn, tether
from aiodist_cli.input import source
from aiodist_cli.output import LineSplitter, Writer, joined, prefix, wants_colour
from aiodist_cli.pipes import Pipe, outputs, rest
from aiodist_cli.summary import Exit, cause
from aiodist_cli.tracebacks import Withheld

TAIL = 60
"""Lines of a rank's stderr that are kept for the end of the run."""

_CHUNK = 64 * 1024
_STDOUT, _STDERR = 1, 2

_LAST_WORDS = 1.0
"""Seconds for writing the output of killed ranks, because its reader may have stopped."""


@dataclass(slots=True)
class _Rank:
    """One running rank, the last lines of its stderr, and the lines that are held back."""

    rank: int
    process: Process
    out: Pipe
    err: Pipe
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=TAIL))
    withheld: Withheld = field(default_factory=Withheld)


class Ranks:
    """The processes of one node of a run.

    `stopped`: the ranks that were stopped because of a failure or an interruption. `cut_short`:
    those of them that were about to end with a traceback of their own. `with_input`: the rank that
    gets the standard input of this process, and whose output is not cut into lines.
    """

    def __init__(self, writer: Writer, *, grace: float, with_input: int | None = None) -> None:
        self.stopped: list[int] = []
        self.cut_short: list[Exit] = []
        self._writer = writer
        self._grace = grace
        self._with_input = with_input
        # the task that follows each rank to its end
        self._tasks: dict[asyncio.Task[None], _Rank] = {}
        self._ended: dict[Process, Exit | None] = {}  # None until all of its output was seen
        self._reported: set[Process] = set()  # those of them that `next_death` has looked at
        self._stopping = False  # from now on ranks end because of `stop`

    @property
    def exits(self) -> list[Exit]:
        """The ranks that ended by themselves, in that order."""
        return [ended for ended in self._ended.values() if ended is not None]

    async def start(self, rank: int, program: Sequence[str], env: Mapping[str, str]) -> None:
        with source() if rank == self._with_input else contextlib.nullcontext(DEVNULL) as stdin:
            async with outputs() as (out, err):
                process = await asyncio.create_subprocess_exec(
                    *tether.command(program),
                    stdin=stdin,
                    stdout=out.theirs,
                    stderr=err.theirs,
                    env=env,
                )
        started = _Rank(rank, process, out, err)
        self._tasks[asyncio.create_task(self._follow(started))] = started

    async def wait(self, interruption: asyncio.Future[Any], *, alone: bool) -> None:
        """Wait until all ranks have ended, one has failed, or `interruption` is done.

        A failure that looks like the consequence of another one (a lost peer) waits a moment for
        its cause. The rank that caused it must not be stopped before its error is written. Unless
        these ranks are `alone`, the cause may be on another node, which `interruption` reports.
        """
        loop = asyncio.get_running_loop()
        settled: float | None = None
        while not interruption.done():
            pending = self._running()
            failed = cause(self.exits)
            if not pending and (alone or failed is None):
                return
            if failed is not None:
                settled = settled or loop.time() + spawn.SETTLE
                if not failed.is_consequence or loop.time() >= settled:
                    return
            limit = None if settled is None else settled - loop.time()
            await asyncio.wait(
                [*pending, interruption], timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )

    @property
    def living(self) -> int:
        """How many ranks run, or have ended well."""
        return len(self._tasks) - len(self._ended) + self.done

    @property
    def done(self) -> int:
        """How many ranks have ended well."""
        return sum(process.returncode == 0 for process in self._ended)

    async def next_death(self, interruption: asyncio.Future[Any]) -> Exit | None:
        """Wait for the next rank that fails. None: all have ended, or `interruption` is done."""
        while not interruption.done():
            for process, ended in self._ended.items():
                if ended is not None and process not in self._reported:
                    self._reported.add(process)
                    if ended.code:
                        return ended
            if not (pending := self._running()):
                return None
            await asyncio.wait([*pending, interruption], return_when=asyncio.FIRST_COMPLETED)
        return None

    async def stop(self, hurry: asyncio.Future[Any]) -> None:
        """End the ranks that still run: SIGTERM, then SIGKILL after the grace time or `hurry`."""
        self._stopping = True
        if not (pending := self._running()):
            return
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a stopped process handles SIGTERM only after this
        over = asyncio.ensure_future(asyncio.wait(pending))
        await asyncio.wait([over, hurry], timeout=self._grace, return_when=asyncio.FIRST_COMPLETED)
        self._signal(signal.SIGKILL)
        await asyncio.wait([over], timeout=_LAST_WORDS)

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to the ranks that still run, but not to their children."""
        for task in self._running():
            process = self._tasks[task].process
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(process.pid) == process.pid:  # else it is not tied yet, and would end
                    process.send_signal(number)

    def _running(self) -> list[asyncio.Task[None]]:
        return [task for task in self._tasks if not task.done()]

    def _signal(self, number: signal.Signals) -> None:
        for task in self._running():
            process = self._tasks[task].process
            if not spawn.signal_group(process.pid, number):
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    async def _follow(self, started: _Rank) -> None:
        """Pass on the output of a rank until it has ended, and end its children."""
        process, rank = started.process, started.rank
        output = asyncio.gather(self._copy(started, _STDOUT), self._copy(started, _STDERR))
        code = await process.wait()
        if self._stopping:
            self.stopped.append(rank)
        else:
            self._ended[process] = None
        spawn.signal_group(process.pid, signal.SIGKILL)  # the children that it left behind
        await rest(output, [started.out, started.err])
        ended = Exit(rank, code, tuple(started.tail), tuple(started.withheld.take()))
        if process in self._ended and code:
            self._ended[process] = ended
            return
        if process in self._ended:
            self._ended[process] = ended._replace(withheld=())
            await self._show(started, _STDERR, ended.withheld)
        elif ended.withheld and not ended.blames_another:
            self.cut_short.append(ended)
        elif ended.withheld and len(ended.unsaid) > 1:
            self.cut_short.append(ended._replace(withheld=tuple(ended.unsaid)))

    async def _copy(self, started: _Rank, fd: int) -> None:
        """Pass on the output of a rank on `fd` until its end."""
        splitter = LineSplitter()
        stream = (started.out if fd == _STDOUT else started.err).stream
        while chunk := await self._read(stream, started, fd):
            if started.rank == self._with_input:
                # A prompt has no end of line, but must be seen.
                await self._writer.write(fd, chunk)
                if fd == _STDERR:
                    started.tail.extend(splitter.feed(chunk))
                continue
            await self._pass_on(started, fd, splitter.feed(chunk))
        if started.rank == self._with_input:
            started.tail.extend(splitter.flush())  # it was written as it came
        else:
            await self._pass_on(started, fd, splitter.flush())

    async def _read(self, stream: asyncio.StreamReader, started: _Rank, fd: int) -> bytes:
        """Read the next bytes. Show a traceback that was held back long enough."""
        reading = asyncio.ensure_future(stream.read(_CHUNK))
        if fd == _STDERR and started.withheld:
            left = started.withheld.until - asyncio.get_running_loop().time()
            await asyncio.wait([reading], timeout=max(0.0, left))
            if not reading.done():
                await self._show(started, fd, started.withheld.take())
        return await reading

    async def _pass_on(self, started: _Rank, fd: int, lines: list[bytes]) -> None:
        if fd == _STDERR:
            started.tail.extend(lines)
            lines = started.withheld.feed(lines, asyncio.get_running_loop().time())
        await self._show(started, fd, lines)

    async def _show(self, started: _Rank, fd: int, lines: Sequence[bytes]) -> None:
        before = prefix(started.rank, colour=wants_colour(fd))
        await self._writer.write(fd, joined(lines, before))
