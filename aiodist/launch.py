"""`aiodist.run`: one function in several processes of this host, called from ordinary code.

Each process gets its environment before it imports anything, is tied to this one (see
`aiodist.launching.tether`), and reports through a pipe of its own. It imports the caller's
``__main__`` as multiprocessing's "spawn" method does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import inspect
import mmap
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
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, TypeVarTuple, Unpack, overload

from aiodist import timeouts
from aiodist.coordinator.actor import Coordinator
from aiodist.errors import AiodistError, PeerLostError, in_words
from aiodist.group import Group
from aiodist.launching import reports, spawn, tether
from aiodist.phases.base import as_int
from aiodist.session import connect
from aiodist.transports import polling
from aiodist.types import GroupOptions, unexpected
from aiodist.wire.limits import MAX_MEMBERS
from aiodist.wire.proof import secret_of

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_POLL = 1.0
"""Seconds between two checks of a silent child, because a process that it forked may hold its pipe
open after its death."""

_ENDING = 0.01
"""Seconds between two checks of a child whose pipe has ended, because it is about to end."""

_importing_main = threading.Event()
"""Set in a rank while it imports the caller's main module."""


# No ParamSpec, because the arguments of `main` come in one. A list has no types for each.
@overload
def run(
    main: Callable[..., Coroutine[Any, Any, T]],
    nprocs: int,
    args: list[Any],
    *,
    timeout: float | None = None,
    **options: Unpack[GroupOptions],
) -> list[T]: ...
@overload
def run(
    main: Callable[[Group, Unpack[Ts]], Coroutine[Any, Any, T]],
    nprocs: int,
    args: tuple[*Ts],
    *,
    timeout: float | None = None,
    **options: Unpack[GroupOptions],
) -> list[T]: ...
@overload
def run(
    main: Callable[[Group], Coroutine[Any, Any, T]],
    nprocs: int,
    *,
    timeout: float | None = None,
    **options: Unpack[GroupOptions],
) -> list[T]: ...
def run(
    main: Callable[..., Coroutine[Any, Any, T]],
    nprocs: int,
    args: Sequence[Any] = (),
    *,
    timeout: float | None = None,
    **options: Unpack[GroupOptions],
) -> list[T]:
    """Run ``async def main(group, *args)`` in `nprocs` new processes, and return its results by
    rank.

    Each process joins a group of `nprocs` ranks and runs `main` under uvloop. The coordinator runs
    in a thread of this process. The first failure stops all ranks with SIGTERM, and after 5 seconds
    with SIGKILL. The exception of `main` is raised here, with the traceback of the rank as its
    cause and a note that names the rank. If several ranks failed, it is one that no other failure
    caused.

    `main`, `args` and the results are pickled. So `main` must be importable (no lambda), and a
    script must call `run` under ``if __name__ == "__main__":``. Functions of a notebook or a prompt
    cannot be imported. They are sent as a whole if cloudpickle is installed.

    Args:
        main: the coroutine function. It gets the group and `args`.
        nprocs: how many processes to start.
        args: further arguments of `main`.
        timeout: seconds for the whole run, to the end of the last process.
        options: for `aiodist.connect` (`op_timeout=…`, `transports=…`).

    Raises:
        PeerLostError: a rank died (by a signal, `os._exit`) before or during its report.
        TimeoutError: the run did not end within `timeout`. A rank had not returned, was stopped, or
            still ran after it had returned, for example because of a thread that is no daemon.
        AiodistError: a rank raised or returned a value that cannot be pickled, or unpickled here.
            Or it raised what is no `Exception`, such as the SystemExit of `sys.exit`.
        RuntimeError: called inside a running event loop, which it would block. Notebooks are
            allowed, because they wait for their cells anyway.
        TypeError: `main` or `args` cannot be pickled, for example because `main` is a function
            within another one. Or `main` is not an async function, or cannot be called with `args`.
        ModuleNotFoundError: `main` is a function of a notebook, and cloudpickle is missing.

    For example::

        async def main(group, offset):
            return group.rank + offset

        if __name__ == "__main__":
            print(aiodist.run(main, nprocs=4, args=(10,)))  # [10, 11, 12, 13]
    """
    spawn.require_posix("aiodist.run")
    if unknown := options.keys() - GroupOptions.__optional_keys__:
        hints = {"size": "use nprocs=", "world_size": "use nprocs="}
        raise unexpected("run", dict.fromkeys(sorted(unknown)), hints)
    if not isinstance(args, Iterable):
        raise TypeError(f"args is a tuple of arguments of main, such as ({args!r},), not {args!r}")
    args = tuple(args)
    nprocs = as_int(nprocs, "nprocs is the number of processes to start, an int")
    _check_caller(nprocs)
    _check_main(main, args)
    timeouts.check_wait(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    preparation = multiprocessing.spawn.get_preparation_data("aiodist")
    preparation["authkey"] = bytes(preparation["authkey"])
    path = preparation.get("init_main_from_path")
    if path is not None and not os.path.exists(path):
        del preparation["init_main_from_path"]  # the program was read from stdin
    has_main = not preparation.keys().isdisjoint(("init_main_from_name", "init_main_from_path"))
    by_value = not has_main and _packs_by_value(main)
    # Pickled separately, because `main` may be in the main module, which must be imported first.
    try:
        work = reports.pickler(by_value)((main, args, options))
    except Exception as error:  # whatever the methods of `args` raise
        raise TypeError(
            f"main, args and options are pickled, which fails: {in_words(error)}: "
            "move functions and classes to the top level of a module"
        ) from error
    secret = secret_of(options.get("token"))
    token = secrets.token_urlsafe() if secret is None else os.fsdecode(bytes(secret))
    if "\0" in token:
        raise ValueError("token has a zero byte, so the ranks cannot have it as AIODIST_TOKEN")
    with _coordinator(token) as coordinator, tempfile.TemporaryFile() as payload:
        job = spawn.Job(
            address=coordinator.address,
            run_id=uuid.uuid4().hex,
            local_size=nprocs,
            master_addr="127.0.0.1",
            master_port=spawn.free_port(),
            token=token,
        )
        payload.write(pickle.dumps((preparation, job, by_value, work)))
        payload.flush()
        ranks = _Ranks(job)
        try:
            ranks.start(payload.fileno())
            return ranks.collect(timeout, deadline)
        finally:
            coordinator.is_run_over = True
            ranks.stop()


def _check_caller(nprocs: int) -> None:
    if nprocs < 1:
        raise ValueError(f"nprocs is the number of processes to start, at least 1, not {nprocs}")
    if nprocs > MAX_MEMBERS:
        raise ValueError(f"nprocs={nprocs}: a group has at most {MAX_MEMBERS} ranks")
    if _importing_main.is_set():
        raise RuntimeError(
            "aiodist.run was called while a rank imports the main module, which would start "
            'processes without end: call it under if __name__ == "__main__":'
        )
    if asyncio._get_running_loop() is None or _is_cell():
        return
    raise RuntimeError(
        "aiodist.run blocks until all ranks have ended, and would block the running event loop: "
        "use await asyncio.to_thread(aiodist.run, …), or aiodist.local for ranks in this loop"
    )


def _check_main(main: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raise TypeError if `main` cannot be called with a group and `args`."""
    try:
        inspect.signature(main, follow_wrapped=False).bind(None, *args)
    except TypeError as error:
        raise TypeError(
            f"main is called as main(group, *args), which {main!r:.200} with args={args!r:.200} "
            f"does not allow: {error}"
        ) from None
    except ValueError:
        pass  # a callable without a signature, as some of C are


def _is_cell() -> bool:
    """Whether the caller is a cell of a notebook, whose kernel waits for each cell anyway."""
    ipython = sys.modules.get("IPython")
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and ipython is not None and ipython.get_ipython() is not None


def _packs_by_value(main: object) -> bool:
    """Whether to pickle functions of a main module that cannot be imported as a whole.

    That needs cloudpickle. Without it, `main` must not be such a function.
    """
    if importlib.util.find_spec("cloudpickle") is not None:
        return True
    if getattr(main, "__module__", None) == "__main__":
        raise ModuleNotFoundError(
            "aiodist.run starts new processes, which cannot import a function that is defined in a "
            "notebook or at a prompt: pip install cloudpickle, or move it to a module",
            name="cloudpickle",
        )
    return False


@contextlib.contextmanager
def _coordinator(token: str) -> Iterator[Coordinator]:
    """A coordinator in a thread of its own."""
    ready: concurrent.futures.Future[Coordinator] = concurrent.futures.Future()
    # Made here and not in the thread, so that it can be told to stop at any time.
    loop = spawn.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        try:
            async with Coordinator("tcp://127.0.0.1:0", token=token, returns=False) as coordinator:
                ready.set_result(coordinator)
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
        yield ready.result()
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it never started
            loop.call_soon_threadsafe(over.set)
        thread.join()


class _RemoteTraceback(Exception):
    """The traceback of a rank, as text: the cause of what `run` raises."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(slots=True)
class _RankProcess:
    """One rank's process and its report. `is_done`: the report was taken."""

    number: int
    process: subprocess.Popen[bytes]
    reading: reports.ReportReading
    is_done: bool = False


class _Ranks:
    def __init__(self, job: spawn.Job) -> None:
        self._job = job
        self._ranks: list[_RankProcess] = []
        self._results: dict[int, Any] = {}
        self._cause: BaseException | None = None
        self._consequence: BaseException | None = None

    def start(self, payload: int) -> None:
        root = str(Path(__file__).parent.parent)
        cores = polling.cores()
        for rank in range(self._job.size):
            with _uninterrupted():  # `stop` must know every started process
                self._ranks.append(self._start(rank, payload, root, cores))

    def _start(self, rank: int, payload: int, root: str, cores: int) -> _RankProcess:
        ours, theirs = os.pipe()
        program = (
            f"import sys; sys.path.append({root!r}); import aiodist.launch; "
            f"aiodist.launch._rank({rank}, {payload}, {theirs})"
        )
        try:
            # Without -P, "-c" would import from the current folder, unlike most programs.
            flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            python = [sys.executable, *flags, "-P"]
            process = subprocess.Popen(
                tether.command([*python, "-c", program]),
                stdin=subprocess.DEVNULL,
                env=spawn.with_rank_environment(os.environ, self._job, rank, cores),
                pass_fds=(payload, theirs),
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            # Only the rank has this end now, so the pipe ends if it dies.
            os.close(theirs)
        return _RankProcess(rank, process, reports.ReportReading(ours))

    def collect(self, timeout: float | None, deadline: float | None) -> list[Any]:
        """Wait for all results and all processes. Raises the exception of the first rank that
        failed."""
        settled: float | None = None
        while (pending := self._pending()) and self._cause is None:
            now = time.monotonic()
            if self._consequence is not None:
                # A rank that was told of a loss may report before the rank that caused it. Wait a
                # moment for the cause.
                settled = settled or now + spawn.SETTLE
                if now >= settled:
                    break
            if deadline is not None and now >= deadline:
                raise TimeoutError(self._late(pending, timeout))
            limits = [limit - now for limit in (settled, deadline) if limit is not None]
            open_pipes = [rank.reading.fd for rank in pending if not rank.reading.is_over]
            poll = _POLL if len(open_pipes) == len(pending) else _ENDING
            wait(open_pipes, min([poll, *limits]))
            for rank in pending:
                self._look(rank)
        failure = self._consequence if self._cause is None else self._cause
        if failure is not None:
            raise failure
        self._await_ends(timeout, deadline)
        return [self._results[rank] for rank in range(self._job.size)]

    def _pending(self) -> list[_RankProcess]:
        return [rank for rank in self._ranks if not rank.is_done]

    def _look(self, rank: _RankProcess) -> None:
        """Take a complete report of a rank, or note the end of a process without one."""
        code = _exit_code(rank.process)  # first, because its whole report is in the pipe by then
        rank.reading.read()
        report = rank.reading.report
        if report is None and code is None:
            return
        rank.is_done = True
        who = self._name(rank)
        if report is not None:
            self._take(rank.number, who, report)
            rank.reading.close()  # results may be large: do not keep them twice
            return
        when = "while it reported" if rank.reading.has_begun else "before its main returned"
        how = spawn.describe_exit(code or 0)
        self._failed(PeerLostError(f"{who} died ({how}) {when}", ranks=[rank.number]))

    def _take(self, number: int, who: str, report: reports.Report) -> None:
        failure: BaseException
        try:
            value = reports.value_of(report)
        except Exception as error:  # whatever the value's own methods raise
            what = in_words(error)
            failure = AiodistError(f"what {who} reported cannot be unpickled here: {what}")
            failure.__cause__ = error
        else:
            if report.outcome is reports.ReportOutcome.RETURNED:
                self._results[number] = value
                return
            failure = value
            if report.outcome is reports.ReportOutcome.OPAQUE:
                failure = AiodistError(f"{who} raised {value}, which cannot be pickled")
            elif not isinstance(value, Exception):
                # Raised as it is, a SystemExit would end this program, and a CancelledError would
                # look as if this task had been cancelled.
                failure = AiodistError(f"{who} ended by {in_words(value)}")
        try:
            failure.add_note(f"(in {who})")
        except Exception:  # a frozen dataclass, which cannot be raised through a context manager
            failure = AiodistError(f"{who} raised {in_words(failure)}, whose attributes are fixed")
        if report.text:
            failure.__cause__ = _RemoteTraceback(report.text)
        self._failed(failure, is_consequence=report.is_consequence)

    def _failed(self, failure: BaseException, *, is_consequence: bool = False) -> None:
        """Note why a rank failed. Its death is never the consequence of another failure."""
        if is_consequence:
            if self._consequence is None:
                self._consequence = failure
        elif self._cause is None:
            self._cause = failure

    def _name(self, rank: _RankProcess) -> str:
        return f"rank {rank.number} of {self._job.size}"

    def _late(self, pending: list[_RankProcess], timeout: float | None) -> str:
        late = spawn.name_ranks(rank.number for rank in pending)
        text = f"{late} of {self._job.size} still ran after {timeout} s"
        begun = [rank.number for rank in pending if rank.reading.has_begun]
        return f"{text} ({spawn.name_ranks(begun)} amid a report: stopped?)" if begun else text

    def _await_ends(self, timeout: float | None, deadline: float | None) -> None:
        late = [rank.number for rank in self._ranks if not _ends_by(deadline, rank.process)]
        if late:
            raise TimeoutError(
                f"{spawn.name_ranks(late)} of {self._job.size} had returned, but still ran after "
                f"{timeout} s: is there a thread that is no daemon, or something slow at exit?"
            )

    def stop(self) -> None:
        """End all processes, and what they have started."""
        try:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # a stopped process handles SIGTERM only after this
            end = time.monotonic() + spawn.GRACE
            for rank in self._ranks:
                _ends_by(end, rank.process)
        finally:
            with _uninterrupted():
                # Even if all ranks have ended, because their children in their process groups may
                # have ignored SIGTERM.
                self._signal(signal.SIGKILL)
                self._reap()  # except for a process that hangs in the kernel
                for rank in self._ranks:
                    rank.reading.close()

    def _reap(self) -> None:
        end = time.monotonic() + spawn.GRACE
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, end - time.monotonic()))

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            process = rank.process
            if not spawn.signal_group(process.pid, number) and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)  # `send_signal` might reap it


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a process; None: it runs.

    Does not reap the process, because its number could then become that of a foreign process group,
    which `stop` would signal. macOS can do so from Python 3.13 on.
    """
    if process.returncode is None and hasattr(os, "waitid"):
        with contextlib.suppress(ChildProcessError):  # the program ignores SIGCHLD
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return process.poll()


def _ends_by(deadline: float | None, process: subprocess.Popen[bytes]) -> bool:
    """Wait until a process ends, without reaping it. False: it still runs at the deadline."""
    if deadline is None and hasattr(os, "waitid"):
        with contextlib.suppress(ChildProcessError):  # it is reaped
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    while _exit_code(process) is None:
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(_ENDING)
    return True


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the block has ended, if this is the thread that gets it."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


def _rank(rank: int, payload: int, pipe: int) -> None:
    """Run one rank. `payload` and `pipe` are file descriptors of the parent."""
    os.set_inheritable(pipe, False)
    pid = os.getpid()
    dumps = reports.pickler(False)
    try:
        preparation, job, by_value, work = _read(payload)
        _importing_main.set()
        multiprocessing.spawn.prepare(preparation)
        dumps = reports.pickler(by_value)
        main, args, options = pickle.loads(work)
        _importing_main.clear()
        with asyncio.Runner(loop_factory=spawn.new_event_loop) as runner:
            report = reports.returned(runner.run(_join(rank, job, main, args, options)), dumps)
    except BaseException as error:
        if os.getpid() != pid:  # a child that `main` has forked ends as it wants to
            raise
        report = reports.raised(error, dumps)
    if os.getpid() != pid:
        return
    reports.send(pipe, report)
    os.close(pipe)
    if report.outcome is not reports.ReportOutcome.RETURNED:
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
        result: Any = main(group, *args)
        if not inspect.isawaitable(result):
            raise TypeError(f"main must be an async function; it returned {result!r:.200}")
        return await result


def _read(payload: int) -> Any:
    """Unpickle the parent's file."""
    # Mapped, because the ranks share its position, and one `pread` gives 2 GiB at most.
    with mmap.mmap(payload, 0, access=mmap.ACCESS_READ) as data:
        os.close(payload)
        return pickle.loads(data)
