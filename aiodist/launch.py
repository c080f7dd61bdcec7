"""`aiodist.run`: one function in several processes of this host, called from ordinary code.

Each process gets its environment before it imports anything, is tied to this one (see
`aiodist.runtime.tether`), and reports through a pipe of its own. Its way to the caller's
``__main__`` is the one of multiprocessing's "spawn" method.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from aiodist.errors import AiodistError, PeerLostError
from aiodist.runtime import spawn, tether
from aiodist.runtime.coordinator import Coordinator
from aiodist.session import connect

T = TypeVar("T")

_POLL = 1.0
"""Seconds after which a child is looked at though its pipe said nothing: a process that it forked
may hold the pipe open after it died."""

_importing_main = threading.Event()
"""Set in a rank while it imports the caller's main module."""


def run(
    main: Callable[..., Coroutine[Any, Any, T]],
    nprocs: int,
    args: Sequence[Any] = (),
    *,
    timeout: float | None = None,
    **options: Any,
) -> list[T]:
    """Run ``async def main(group, *args)`` in `nprocs` new processes; its results by rank.

    Each process joins a group of `nprocs` ranks and runs `main` under uvloop; the coordinator
    lives in a thread of this process. `main`, `args` and the results are pickled: `main` must be
    importable, so a lambda or a function of a notebook cell will not do, and a script must call
    `run` under ``if __name__ == "__main__":``. `options` go to `aiodist.connect` (`op_timeout=…`,
    `transports=…`); `timeout` is in seconds and counts for the run as a whole.

    The first failure stops all ranks. What `main` raised is raised here, with the traceback of
    the rank as its cause and a note that names the rank. If several failed, it is the one that is
    no mere consequence of another (as `PeerLostError` is).

    Raises:
        PeerLostError: a rank died (by a signal, `os._exit`) before it could say why.
        TimeoutError: the run did not end within `timeout`.
        AiodistError: a rank raised or returned something that cannot be pickled.
        RuntimeError: called inside a running event loop, which it would block.
    """
    spawn.require_posix("aiodist.run")
    _check_caller(nprocs)
    deadline = None if timeout is None else time.monotonic() + timeout
    preparation = multiprocessing.spawn.get_preparation_data("aiodist")
    preparation["authkey"] = bytes(preparation["authkey"])
    # `main` may live in the main module, so it is packed apart: to be read after that is imported.
    work = pickle.dumps((main, tuple(args), options))
    with _coordinator() as (address, token), tempfile.TemporaryFile() as payload:
        job = spawn.Job(
            address=address,
            run_id=uuid.uuid4().hex,
            local_size=nprocs,
            master_addr="127.0.0.1",
            master_port=spawn.free_port(),
            token=token,
        )
        payload.write(pickle.dumps((preparation, job, work)))
        payload.flush()
        ranks = _Ranks(job)
        try:
            ranks.start(payload.fileno())
            return ranks.collect(timeout, deadline)
        finally:
            ranks.stop()


def _check_caller(nprocs: int) -> None:
    if nprocs < 1:
        raise ValueError(f"nprocs is the number of processes to start, at least 1, not {nprocs}")
    if _importing_main.is_set():
        raise RuntimeError(
            "aiodist.run was called while a rank imports the main module, which would start "
            'processes without end: call it under if __name__ == "__main__":'
        )
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "aiodist.run blocks until all ranks have ended, and would block the running event loop: "
        "use await asyncio.to_thread(aiodist.run, …), or aiodist.local for ranks in this loop"
    )


@contextlib.contextmanager
def _coordinator() -> Iterator[tuple[str, str]]:
    """A coordinator in a thread of its own: its address, and the token it asks for."""
    token = secrets.token_urlsafe()
    ready: concurrent.futures.Future[str] = concurrent.futures.Future()
    loop = spawn.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        try:
            async with Coordinator("tcp://127.0.0.1:0", token=token, returns=False) as coordinator:
                ready.set_result(coordinator.address)
                await over.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    def body() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=body, name="aiodist-coordinator", daemon=True)
    thread.start()
    try:
        yield ready.result(), token
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it never started
            loop.call_soon_threadsafe(over.set)
        thread.join()


class _RemoteTraceback(Exception):
    """The traceback of a rank, as text: the cause of what `run` raises."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class _Ranks:
    """The processes of one run."""

    def __init__(self, job: spawn.Job) -> None:
        self._job = job
        self._processes: list[subprocess.Popen[bytes]] = []
        self._waiting: dict[Connection, int] = {}
        self._results: dict[int, Any] = {}
        self._cause: BaseException | None = None
        self._consequence: BaseException | None = None

    def start(self, payload: int) -> None:
        root = str(Path(__file__).parent.parent)
        cores = spawn.cores()
        for rank in range(self._job.size):
            ours, theirs = multiprocessing.Pipe(duplex=False)
            self._waiting[ours] = rank
            with theirs:
                program = (
                    f"import sys; sys.path.append({root!r}); import aiodist.launch; "
                    f"aiodist.launch._rank({rank}, {payload}, {theirs.fileno()})"
                )
                process = subprocess.Popen(
                    tether.command([sys.executable, "-c", program]),
                    stdin=subprocess.DEVNULL,
                    env=spawn.with_rank_environment(os.environ, self._job, rank, cores),
                    pass_fds=(payload, theirs.fileno()),
                )
            self._processes.append(process)

    def collect(self, timeout: float | None, deadline: float | None) -> list[Any]:
        """Wait for all results. Raises what the first rank to fail raised."""
        settled: float | None = None
        while self._waiting and self._cause is None:
            now = time.monotonic()
            if self._consequence is not None:
                settled = settled or now + spawn.SETTLE
                if now >= settled:
                    break
            if deadline is not None and now >= deadline:
                late = spawn.name_ranks(self._waiting.values())
                raise TimeoutError(f"{late} of {self._job.size} still ran after {timeout} s")
            limits = [limit - now for limit in (settled, deadline) if limit is not None]
            ready = wait(list(self._waiting), min([_POLL, *limits]))
            for connection in list(self._waiting):
                rank = self._waiting[connection]
                if connection in ready or self._processes[rank].poll() is not None:
                    self._take(connection, self._waiting.pop(connection))
        failure = self._cause or self._consequence
        if failure is not None:
            raise failure
        for process in self._processes:
            process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return [self._results[rank] for rank in range(self._job.size)]

    def _take(self, connection: Connection, rank: int) -> None:
        """Take the report of a rank that sent one or has ended."""
        with connection:
            try:
                report = connection.recv_bytes() if connection.poll() else None
            except EOFError:
                report = None
        who = f"rank {rank} of {self._job.size}"
        if report is None:
            code = self._processes[rank].wait()
            self._cause = PeerLostError(
                f"{who} died ({spawn.describe_exit(code)}) before its main returned",
                ranks=[rank],
            )
            return
        succeeded, value, text = pickle.loads(report)
        if succeeded:
            self._results[rank] = value
            return
        error = value or AiodistError(f"{who} failed with what cannot be pickled; see the cause")
        error.__cause__ = _RemoteTraceback(text)
        error.add_note(f"(in {who})")
        if isinstance(error, spawn.CONSEQUENCES):
            self._consequence = self._consequence or error
        else:
            self._cause = self._cause or error

    def stop(self) -> None:
        """End what still runs, and whatever the ranks have started and left."""
        for connection in self._waiting:
            connection.close()
        try:
            self._signal(signal.SIGTERM)
            end = time.monotonic() + spawn.GRACE
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
        finally:
            self._signal(signal.SIGKILL)
            for process in self._processes:
                process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if not spawn.signal_group(process.pid, number):
                process.send_signal(number)


def _rank(rank: int, payload: int, report: int) -> None:
    """The life of one rank; `payload` and `report` are file descriptors of its parent's."""
    os.set_inheritable(report, False)
    with Connection(report, readable=False) as connection:
        try:
            preparation, job, work = pickle.loads(_read(payload))
            _importing_main.set()
            multiprocessing.spawn.prepare(preparation)
            main, args, options = pickle.loads(work)
            _importing_main.clear()
            with asyncio.Runner(loop_factory=spawn.new_event_loop) as runner:
                value = runner.run(_join(rank, job, main, args, options))
            connection.send_bytes(pickle.dumps((True, value, "")))
        except BaseException as error:
            connection.send_bytes(_failure(error))
            sys.exit(1)


async def _join(
    rank: int,
    job: spawn.Job,
    main: Callable[..., Coroutine[Any, Any, Any]],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    settings = {"rank": rank, "size": job.size, "token": job.token, **options}
    async with connect(job.address, **settings) as group:
        return await main(group, *args)


def _read(payload: int) -> bytes:
    """All of the parent's file, whose position the ranks share."""
    data = os.pread(payload, os.fstat(payload).st_size, 0)
    os.close(payload)
    return data


def _failure(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        report = pickle.dumps((False, error, text))
        pickle.loads(report)
    except Exception:  # whatever the exception's own methods raise
        return pickle.dumps((False, None, text))
    return report
