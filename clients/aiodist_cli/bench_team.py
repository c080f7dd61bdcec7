"""The processes of one contender: started, given orders, and ended in any case."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiodist.launching import spawn, tether
from aiodist_cli.bench_cases import Case
from aiodist_cli.bench_peers import Contender, Launch, Site, launches
from aiodist_cli.bench_worker import Block, encode

START_TIMEOUT = 240.0
"""Seconds that processes may take to start, because each imports torch. Eight of them took 49 s on
two busy cores. A process that ends instead of starting is noticed at once."""
ANSWER_TIMEOUT = 150.0
"""Longer than the timeout of aiodist's operations, so that their error is heard."""

_GRACE = 5.0
_LINE = 64 << 20
_TAIL = 2000


class TeamError(Exception):
    """A contender's processes failed, and can be given no more orders."""


class OrderError(Exception):
    """An order failed, but more orders can be given."""


@dataclass(frozen=True, slots=True)
class _Member:
    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Team:
    """One process for each rank. `library`: what rank 0 said that it is; `features`: what it can
    do."""

    def __init__(self, contender: Contender, sites: Sequence[Site], folder: Path) -> None:
        self.contender = contender
        self.sites = tuple(sites)  # the place of each rank, by rank
        self.library = ""
        self.features: frozenset[str] = frozenset()
        self.broken: str | None = None
        """Why no more orders can be given."""
        # The Unix socket to which all processes connect.
        self._control = folder / contender.name.replace(" ", "-")
        self._log = self._control.with_suffix(".log")  # what they print
        self._members: dict[int, _Member] = {}  # by rank; those that have said hello
        # The started processes: one for each rank, or a launcher of many.
        self._processes: list[asyncio.subprocess.Process] = []
        self._server: asyncio.Server | None = None  # listens on that socket; None: not started
        self._complete = asyncio.Event()  # all have said hello

    async def start(self, environ: Mapping[str, str]) -> None:
        """Start the processes; returns when all have said hello. Raises TeamError."""
        try:
            await self._start(environ)
        except OSError as error:
            self._break(f"it was not started: {error}")
        except BaseException:
            self.broken = self.broken or f"{self.contender.label}: it was not started"
            raise

    async def _start(self, environ: Mapping[str, str]) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self._control, limit=_LINE)
        with self._log.open("wb") as log:
            for launch in launches(self.contender, self.sites, self._control, environ):
                self._processes.append(await _start(launch, log.fileno()))
        ends = [asyncio.create_task(process.wait()) for process in self._processes]
        complete = asyncio.create_task(self._complete.wait())
        try:
            await asyncio.wait(
                [complete, *ends], timeout=START_TIMEOUT, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in (complete, *ends):
                task.cancel()
        if not self._complete.is_set():
            missing = sorted(set(range(len(self.sites))) - set(self._members))
            self._break(f"{spawn.name_ranks(missing)} did not start{self._last_words()}")

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = json.loads(await reader.readline())
        except ValueError:
            writer.close()
            return
        self._members[hello["rank"]] = _Member(hello["pid"], reader, writer)
        if hello["rank"] == 0:
            self.library = hello["library"]
            self.features = frozenset(hello["features"])
        if len(self._members) == len(self.sites):
            self._complete.set()

    async def order(self, do: str, **details: Any) -> list[dict[str, Any]]:
        """Give an order, and return the answers of all ranks, by rank. Raises TeamError, or
        OrderError."""
        if self.broken is not None:
            raise TeamError(self.broken)
        line = encode({"do": do, **details})
        for member in self._members.values():
            member.writer.write(line)
        reading = {
            rank: asyncio.create_task(self._members[rank].reader.readline())
            for rank in sorted(self._members)
        }
        try:
            _, late = await asyncio.wait(
                reading.values(),
                timeout=ANSWER_TIMEOUT + details.get("seconds", 0.0),
                return_when=asyncio.ALL_COMPLETED,
            )
        except asyncio.CancelledError:
            self._break("it was interrupted", quiet=True)
            raise
        finally:
            for task in reading.values():
                task.cancel()
        if late:
            ranks = [rank for rank, task in reading.items() if task in late]
            self._break(f"{spawn.name_ranks(ranks)} did not answer{self._last_words()}")
        gone = [rank for rank, task in reading.items() if task.exception() or not task.result()]
        if gone:
            self._break(f"{spawn.name_ranks(gone)} died{self._last_words()}")
        answers = [json.loads(task.result()) for task in reading.values()]
        errors = {rank: answer["error"] for rank, answer in enumerate(answers) if "error" in answer}
        if errors:
            rank, text = next(iter(errors.items()))
            raise OrderError(f"rank {rank}: {text}")
        return answers

    async def run(
        self, case: Case, iterations: int, *, memory: str = "plain", check: bool = False
    ) -> Block:
        """Measure nanoseconds of each iteration at rank 0, and processor time of all ranks.

        `check`: check the result of the first iteration. Raises TeamError, or OrderError.
        """
        answers = await self.order(
            "run",
            op=case.op,
            nbytes=case.nbytes,
            iterations=iterations,
            memory=memory,
            fill=case.fill,
            check=check,
        )
        return Block(answers[0]["ns"], sum(answer["cpu"] for answer in answers))

    def _break(self, why: str, *, quiet: bool = False) -> None:
        self.broken = f"{self.contender.label}: {why}"
        if not quiet:
            raise TeamError(self.broken)

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            text = self._log.read_bytes()[-_TAIL:].decode(errors="replace").strip()
            if text:
                return f"; the last it wrote:\n{text}"
        return ""

    async def stop(self) -> None:
        """End all processes: ask them first, then use signals."""
        for member in self._members.values():
            if self.broken is None:
                member.writer.write(encode({"do": "quit"}))
        if self.broken is None:
            await self._ended(_GRACE)
        for number, patience in ((signal.SIGTERM, 1.0), (signal.SIGKILL, _GRACE)):
            for process in self._processes:
                if process.returncode is None:
                    spawn.signal_group(process.pid, number)
            await self._ended(patience)
        for member in self._members.values():
            # A rank under mpirun is no child of this process, but its connection shows if it lives.
            if not member.reader.at_eof():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
            member.writer.close()
        if self._server is not None:
            self._server.close()

    async def _ended(self, timeout: float) -> None:
        """Wait for all processes, and for the connections of their ranks, to end."""
        ends = [asyncio.create_task(process.wait()) for process in self._processes]
        ends += [asyncio.create_task(_drained(m.reader)) for m in self._members.values()]
        if ends:
            _, late = await asyncio.wait(ends, timeout=timeout)
            for task in late:
                task.cancel()


async def _drained(reader: asyncio.StreamReader) -> int:
    with contextlib.suppress(OSError):
        while await reader.read(1 << 16):
            pass
    return 0


async def _start(launch: Launch, log: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *tether.command(launch.command),
        env=launch.env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )


@contextlib.asynccontextmanager
async def teams(
    contenders: Sequence[Contender], sites: Sequence[Site]
) -> AsyncIterator[list[Team]]:
    """Start a team of each contender, with one rank at each of `sites`.

    A team that does not start is included, but broken. All processes have ended when this context
    ends.
    """
    with tempfile.TemporaryDirectory(prefix="aiodist-bench-") as folder:
        made = [Team(contender, sites, Path(folder)) for contender in contenders]
        try:
            await asyncio.gather(*map(_started, made))
            yield made
        finally:
            await asyncio.shield(asyncio.gather(*(team.stop() for team in made)))


async def _started(team: Team) -> None:
    with contextlib.suppress(TeamError):  # `broken` has it from now on
        await team.start(os.environ)
