"""One run from start to end: what its ranks share, what may stop them, and its summary."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import secrets
import signal
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console

import aiodist
from aiodist.environment import FLIGHT_RECORDER as RECORDER
from aiodist.environment import TRACE, token_in
from aiodist.errors import AiodistError
from aiodist.launching import spawn
from aiodist.transports import polling
from aiodist.wire.address import Address
from aiodist_cli import status
from aiodist_cli.elastic import Spare, keep
from aiodist_cli.errors import STOPPING, CommandError
from aiodist_cli.nodes import Meeting, Stop, meet
from aiodist_cli.output import Writer, joined, prefix, wants_colour
from aiodist_cli.ranks import Ranks
from aiodist_cli.summary import Exit, cause, distinct, headline, last_words
from aiodist_cli.tables import WIDE
from aiodist_cli.tracebacks import without_the_loop

_STDERR = 2
_STATUS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """Which ranks of which run this launcher starts.

    `coordinator`: the address of an existing one; None makes one for this run. `spare`: for an
    elastic group, which ranks may die. `http`: the address for the page of the run's own
    coordinator.
    """

    nprocs: int
    nodes: int
    node: int
    coordinator: str | None
    group: str
    node_timeout: float
    spare: Spare | None = None
    http: Address | None = None


async def launch(program: list[str], place: Place, grace: float, stdin: int | None) -> int:
    """Run `program` as the ranks of `place`, and return the exit status of the run.

    The rank `stdin` gets the input of this process.
    """
    writer = Writer()
    environ = dict(os.environ)
    for name in (RECORDER, TRACE):  # of the ranks only, because the launchers form a group, too
        os.environ.pop(name, None)
    async with contextlib.AsyncExitStack() as stack:
        ranks = Ranks(writer, grace=grace, with_input=stdin)
        records = bool(environ.get(RECORDER))
        dumps = stack.enter_context(_dumping(ranks, writer, place, records=records))
        job, meeting, embedded = await _prepare(stack, place, writer)
        dumps.job = job
        stops = stack.enter_context(_listening(writer, meeting))
        told: list[Exit] = []

        async def start(local_rank: int, restarts: int = 0) -> None:
            env = spawn.with_rank_environment(environ, job, local_rank, polling.cores(), restarts)
            await ranks.start(job.rank(local_rank), program, env)

        async def tell(text: str, died: Exit) -> None:
            told.append(died)
            data = text.encode() + b"\n" + _said(without_the_loop(died.withheld), died.rank)
            await writer.write(_STDERR, data)

        failed = None
        try:
            for local_rank in range(place.nprocs):
                if stops.first.done():
                    break
                await start(local_rank)
            if place.spare is None:
                await ranks.wait(stops.first, alone=meeting is None)
                failed = cause(ranks.exits)
            else:
                failed = await keep(ranks, place.spare, job.size, stops.first, start, tell)
            if stops.first.done():
                failed = None
            elif failed is not None:
                stops.stop(Stop(spawn.shell_status(failed.code), headline(failed, job.size)))
        finally:
            if embedded is not None:
                embedded.is_run_over = True
            await ranks.stop(stops.hurry)
        if not stops.first.done() and (meeting is None or await meeting.all_done(stops.first)):
            return 0
        stop = stops.first.result()
    others = [one for one in ranks.exits if all(one is not known for known in (failed, *told))]
    others += ranks.cut_short
    await _say(writer, last_words(stop.reason, ranks.stopped, failed), failed, others)
    return stop.status


async def _prepare(
    stack: contextlib.AsyncExitStack, place: Place, writer: Writer
) -> tuple[spawn.Job, Meeting | None, aiodist.Coordinator | None]:
    """What all ranks have in common, the connection to other launchers if there are any, and the
    coordinator if this run has its own."""
    token: str | None
    embedded: aiodist.Coordinator | None = None
    if place.coordinator is None:
        token = secrets.token_urlsafe()
        embedded = await stack.enter_async_context(
            aiodist.Coordinator("tcp://127.0.0.1:0", token=token, returns=False)
        )
        address = embedded.address
        if place.http is not None:
            # Imported only now, because it needs the server extra.
            from aiodist_server.http import serving

            url = await stack.enter_async_context(serving(embedded, place.http))
            await writer.write(_STDERR, f"aiodist run: http on {url}\n".encode())
    else:
        token, address = _token(), place.coordinator
    if place.nodes == 1:
        meeting = None
        run_id, master, port = uuid.uuid4().hex, "127.0.0.1", spawn.free_port()
    else:
        meeting = await stack.enter_async_context(
            meet(
                address,
                token,
                place.group,
                node=place.node,
                nodes=place.nodes,
                nprocs=place.nprocs,
                timeout=place.node_timeout,
            )
        )
        run_id, master, port = meeting.run_id, meeting.master_addr, meeting.master_port
    job = spawn.Job(
        address=address,
        run_id=run_id,
        local_size=place.nprocs,
        master_addr=master,
        master_port=port,
        nodes=place.nodes,
        node=place.node,
        group=place.group,
        token=token,
        least=place.spare.least if place.spare is not None else None,
    )
    return job, meeting, embedded


def _token() -> str | None:
    """The token of an existing coordinator."""
    try:
        return token_in(os.environ)
    except ValueError as error:
        raise CommandError(f"aiodist run: {error}") from error


class _Stops:
    """Reasons to stop.

    `first`: the first reason, which the other nodes are told at once. `hurry`: done when a signal
    came after it, because the user does not want to wait.
    """

    def __init__(self, meeting: Meeting | None) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[Stop] = loop.create_future()
        self.hurry: asyncio.Future[None] = loop.create_future()
        self._meeting = meeting

    def stop(self, stop: Stop) -> None:
        """Stop for the reason `stop`, unless there was another one."""
        if self.first.done():
            return
        self.first.set_result(stop)
        if self._meeting is not None:
            # Before the ranks are stopped, because other nodes wait only `SETTLE` for the cause.
            self._meeting.tell(stop)

    def signalled(self, stop: Stop) -> None:
        if self.first.done() and not self.hurry.done():
            self.hurry.set_result(None)
        self.stop(stop)

    def heed(self, news: asyncio.Future[Stop]) -> None:
        """Stop for the reason of `news`, which is done."""
        if not news.cancelled():
            self.stop(news.result())


@dataclass(slots=True)
class _Dumps:
    """What SIGUSR1 shows. `job`: None until its launchers have met."""

    job: spawn.Job | None = None


@contextlib.contextmanager
def _dumping(ranks: Ranks, writer: Writer, place: Place, *, records: bool) -> Iterator[_Dumps]:
    """Handle SIGUSR1: show what the ranks are doing, and which ranks hold up others.

    `records`: the ranks have flight recorders, and write their records, too.
    """
    loop = asyncio.get_running_loop()
    telling: set[asyncio.Task[None]] = set()
    dumps = _Dumps()

    def on_signal() -> None:
        if records:  # else the signal would end them
            ranks.tell(signal.SIGUSR1)
        task = asyncio.ensure_future(_tell_status(writer, place, dumps.job))
        telling.add(task)
        task.add_done_callback(telling.discard)

    loop.add_signal_handler(signal.SIGUSR1, on_signal)
    try:
        yield dumps
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
        for task in telling:
            task.cancel()


async def _tell_status(writer: Writer, place: Place, job: spawn.Job | None) -> None:
    if job is None:
        why = f": waiting for the other nodes at {place.coordinator}" if place.nodes > 1 else ""
        await writer.write(_STDERR, f"aiodist run: no ranks yet{why}\n".encode())
        return
    out = io.StringIO()
    try:
        found = await status.ask(job.address, job.token, _STATUS_SECONDS)
        Console(file=out, width=WIDE).print(status.render(found, time.time()))
    except (AiodistError, OSError, ValueError) as error:
        out.write(f"aiodist run: no status: {error}\n")
    await writer.write(_STDERR, out.getvalue().encode())


async def _output_broken(writer: Writer) -> Stop:
    error = await writer.broken
    if isinstance(error, BrokenPipeError):
        return Stop(128 + signal.SIGPIPE, "the reader of the output is gone")
    return Stop(1, f"the output cannot be written: {error.strerror}")


@contextlib.contextmanager
def _listening(writer: Writer, meeting: Meeting | None) -> Iterator[_Stops]:
    """Listen to signals, to errors of the output, and to other nodes."""
    stops = _Stops(meeting)
    loop = asyncio.get_running_loop()
    # Nohup, and a shell that starts a background job, let the command ignore some of them.
    numbers = [signal.SIGINT, *STOPPING]
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    for number in heeded:
        loop.add_signal_handler(number, stops.signalled, Stop(128 + number, number.name))
    broken = asyncio.ensure_future(_output_broken(writer))
    news = [broken] if meeting is None else [broken, meeting.news]
    for task in news:
        task.add_done_callback(stops.heed)
    try:
        yield stops
    finally:
        for task in news:
            task.remove_done_callback(stops.heed)
        broken.cancel()
        for number in heeded:
            loop.remove_signal_handler(number)


async def _say(writer: Writer, text: str, failed: Exit | None, others: Iterable[Exit]) -> None:
    """Write the end of the run.

    First comes a line of each rank that failed because of `failed`, and the last lines of all
    `others`; then the reason, and the last lines of `failed`. Lines that several ranks have in
    common are written once.
    """
    first = [] if failed is None else list(without_the_loop(failed.withheld or failed.tail))
    said = [(one, one.unsaid if one.is_consequence else one.withheld) for one in others]
    same, rest = distinct(first, [(one.rank, list(without_the_loop(it))) for one, it in said])
    data = b"".join(_said(lines, *ranks) for lines, ranks in rest) + text.encode() + b"\n"
    if failed is not None:
        data += _said(first, failed.rank, *same)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(writer.write(_STDERR, data), timeout=1.0)


def _said(lines: Iterable[bytes], rank: int, *same: int) -> bytes:
    data = joined(lines, prefix(rank, colour=wants_colour(_STDERR)))
    if same:
        data += f"aiodist run: the same on {spawn.name_ranks(same)}\n".encode()
    return data
