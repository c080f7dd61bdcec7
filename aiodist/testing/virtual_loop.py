"""An event loop whose time is simulated, and the processes that run on it.

Time stands still while anything is ready to run, unless a program polls. If nothing is ready, it
jumps to the next timer. Without a timer everything would wait for ever: `DeadlockError`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import re
import selectors
import socket
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, MutableMapping
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import Context, ContextVar
from functools import partial
from random import Random
from typing import Any, Protocol, TypeVar, TypeVarTuple

from aiodist.composing import CoroutineRest
from aiodist.errors import in_words
from aiodist.rank.whereabouts import of_task
from aiodist.work import Work

T = TypeVar("T")
Args = TypeVarTuple("Args")

MOST_LAST_WORDS = 16
"""How often a coroutine of an ended process is closed if it goes on after that."""

SLOWEST_DISK = 0.01
"""The most seconds of a write to a disk, or of anything else that threads do."""

MOST_POLLS = 2000
"""Turns without a ready file and a due timer that take no time, though nothing waits."""

POLL = 1e-5
"""Seconds that each further one takes, about as long as on a real loop."""

FAIR_POLLS = 350_000
"""So many take that time. After these, the time doubles with each thousand, because a poll that is
in vain has to end."""

POLLS_BETWEEN = 20
"""How many such turns an ordinary program makes for each of another kind, at most."""


class DeadlockError(RuntimeError):
    """Nothing is ready, and no timer is set, so that all tasks would wait for ever."""


class Process:
    """What runs on a virtual loop as one process: its tasks and callbacks.

    Everything that starts inside of `spawn` belongs to it. `stop` acts as SIGSTOP: nothing of it
    runs until `resume`. `block` acts as a long computation: its loop does not turn, but its threads
    go on. Both return a function that ends this stop alone; `resume` ends all. `end` acts as
    kill -9: nothing of it ever runs again.
    """

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.alive = True  # it was not killed
        self._stops: dict[object, bool] = {}  # stops that go on, and whether threads stop as well
        self.stopped_seconds = 0.0  # how long it did not run, in all
        self.context = Context()  # of its callbacks, to tell their process
        self.context.run(_current.set, self)
        self._held: list[_Call] = []  # what came due while it did not run
        self._since = 0.0  # when it was stopped
        loop.processes.append(self)
        # All tasks that it has started.
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._dead: list[asyncio.Task[Any]] = []  # those that it has not ended before its own end

    def __repr__(self) -> str:
        state = "stopped" if self._stops else "running" if self.alive else "dead"
        return f"<Process {self.name} {state}>"

    @property
    def runs(self) -> bool:
        return self.alive and not self._stops

    @property
    def threads_run(self) -> bool:
        return self.alive and not any(self._stops.values())

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Run `coroutine` as a task of this process."""
        task: asyncio.Task[T] = self.loop.create_task(
            coroutine, name=name, context=self.context.copy()
        )
        return task

    def stop(self) -> Callable[[], None]:
        return self._stop(True)

    def block(self) -> Callable[[], None]:
        return self._stop(False)

    def _stop(self, threads: bool) -> Callable[[], None]:
        stop = object()
        if self.alive:
            if not self._stops:
                self._since = self.loop.time()
            self._stops[stop] = threads
        return partial(self._end_stops, [stop])

    def resume(self) -> None:
        self._end_stops(list(self._stops))

    def _end_stops(self, stops: Iterable[object]) -> None:
        ended = [self._stops.pop(stop) for stop in stops if stop in self._stops]
        if ended:
            if not self._stops:
                self.stopped_seconds += self.loop.time() - self._since
            held, self._held = self._held, []
            for call in held:  # those of the loop are held again if it is stopped still
                self.loop.again(call)

    def end(self) -> None:
        self.alive = False
        self._stops.clear()
        self._held.clear()
        # Else they might be collected, and their last code run, in a turn of another process.
        self._dead = [task for task in self.tasks if not task.done()]

    def hold(self, call: _Call) -> None:
        """Keep a call that came due while the process is stopped."""
        self._held.append(call)


_current: ContextVar[Process | None] = ContextVar("aiodist_testing_process", default=None)


def current_process() -> Process | None:
    """Return the process whose code is running, or None."""
    return _current.get()


class _Call:
    """A callback of a process. `by_thread`: not of its loop."""

    __slots__ = ("args", "by_thread", "callback", "handle", "process")

    handle: asyncio.Handle

    def __init__(
        self,
        process: Process,
        callback: Callable[..., object],
        args: Any,
        by_thread: bool,
    ) -> None:
        self.process = process
        self.callback = callback
        self.args = args
        self.by_thread = by_thread

    def __call__(self) -> None:
        process = self.process
        if process.threads_run if self.by_thread else process.runs:
            try:
                self.callback(*self.args)
            except SystemExit as error:  # it would end the loop, and so all ranks
                process.loop.errors.append(f"a task ends with {error!r}")
        elif process.alive:
            process.hold(self)

    def again(self) -> None:
        if not self.handle.cancelled():  # what ran since it came due may have cancelled it
            self()

    def __repr__(self) -> str:
        return f"{self.process.name}: {self.callback!r}"


# The library knows nothing of processes, so contextvars tell which process a callback belongs to. A
# task runs in the context that it was spawned with. What it sets up (timers, other tasks, callbacks
# of its sockets) inherits that. So everything that comes of `spawn` has the process in its context.
# The loop wraps it in a `_Call`, which runs it, keeps it while the process is stopped, or drops it
# if that is dead.
#
# What the network does (a packet arrives, a cut heals) runs in an empty context, because it goes on
# even if the sender has died.

H = TypeVar("H", bound=asyncio.Handle)


def _belonging(
    schedule: Callable[..., H],
    callback: Callable[..., object],
    args: tuple[Any, ...],
    context: Context | None,
    *,
    by_thread: bool = False,
) -> H:
    """Make the loop `schedule` a callback of the running process, if there is one."""
    process = _current.get() if context is None else context.get(_current)
    if process is None:
        return schedule(callback, *args, context=context)
    call = _Call(process, callback, args, by_thread)
    call.handle = handle = schedule(call, context=context)
    return handle


class Pollable(Protocol):
    """A simulated file."""

    def fileno(self) -> int: ...

    def events(self) -> int:
        """Return what it is ready for now: EVENT_READ and EVENT_WRITE."""
        ...


class VirtualSelector(selectors.BaseSelector):
    """Readiness of simulated files. Waiting is a jump in time."""

    def __init__(self, chooser: Random) -> None:
        self.now = 0.0  # seconds since the loop was made
        self._polls = 0  # turns in which only callbacks were ready
        self.is_due: Callable[[], bool] = lambda: False  # whether a timer of the loop is due
        self.on_turn: Callable[[], None] = lambda: None  # called in every turn
        # Makes the error if all tasks wait for ever.
        self.idle_error: Callable[[], BaseException] = lambda: DeadlockError("nothing to wait for")
        self._chooser = chooser  # decides the order of files that are ready at once
        # Files that are waited for, and for what.
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._files: dict[int, Pollable] = {}  # all files that exist
        self._hot: dict[int, None] = {}  # files that may be ready: only these are asked

    def touch(self, file: Pollable) -> None:
        """Note that `file` may have become ready."""
        number = file.fileno()
        if number in self._keys:
            self._files[number] = file
            self._hot[number] = None

    def follow(self, file: Pollable) -> None:
        """Note that `file` was made."""
        self._files[file.fileno()] = file

    def drop(self, file: Pollable) -> None:
        """Note that `file` was closed."""
        self._files.pop(file.fileno(), None)
        self._hot.pop(file.fileno(), None)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        if number in self._keys or number not in self._files:
            raise ValueError(f"file {number} is registered already, or no file of this loop")
        key = self._keys[number] = selectors.SelectorKey(fileobj, number, events, data)
        self._hot[number] = None
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._hot.pop(number, None)
        return self._keys.pop(number)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def close(self) -> None:
        self._keys.clear()
        self._files.clear()
        self._hot.clear()

    # This is all of virtual time. asyncio calls `select` once a turn, with the seconds until its
    # next timer, 0 if a callback is ready, and None if there is neither::
    #
    #     something is ready          it is served, at the same time
    #     nothing, and a timer        `now` jumps to it: the seconds are over at once
    #     nothing, and no timer       nothing will ever happen any more: `DeadlockError`
    #
    # A program that polls, as by `while not work.done(): await asyncio.sleep(0)`, is always ready.
    # So after `MOST_POLLS` turns that may be such polls, they take time, because nothing else would
    # ever happen.
    #
    # A real selector reports readiness in the system's order, which programs must not rely on. Here
    # the seed shuffles it. Asking some hundred sockets in each turn would be most of a simulation's
    # work. So only files are asked that something has happened to (`touch`), or that were ready
    # before.
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.on_turn()
        ready = []
        for number in list(self._hot):
            key = self._keys[number]
            events = self._files[number].events() & key.events
            if events:
                ready.append((key, events))
            else:
                del self._hot[number]  # until it changes, or is registered anew
        if ready:
            self._chooser.shuffle(ready)
        elif timeout is None:
            raise self.idle_error()
        elif timeout > 0:
            self.now += timeout
            self._polls = 0
        elif not self.is_due():
            self._polls += 1
            if self._polls > MOST_POLLS:
                self.now += POLL * 2 ** min(30, max(0, (self._polls - FAIR_POLLS) // 1000))
            return ready
        self._polls = max(0, self._polls - POLLS_BETWEEN)
        return ready


class Task(asyncio.Task[T]):
    """A task of a virtual loop. `process`: that it belongs to, or None.

    Sets of tasks have the same order in every run, because it does not depend on addresses. So
    `asyncio.wait`, and a TaskGroup that cancels its tasks, do the same each time.
    """

    def __init__(self, *args: Any, number: int, process: Process | None, **options: Any) -> None:
        self._number = number
        self.process = process
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._number


def _owner_of(lost: Any) -> Process | None:
    """Return the process of a task, or of a Work that was to be looked at. None: not known."""
    if isinstance(lost, Task):
        return lost.process
    # Works that the library has not given to the program have none.
    unseen = getattr(lost, "_unseen", None) if isinstance(lost, Work) else None
    return None if unseen is None else unseen.context.get(_current)


def abandon(task: Any) -> None:
    """Keep Python from complaining when a task that never ends is collected.

    There is no public way to do so.
    """
    task._log_destroy_pending = False


def _chain(coroutine: Any) -> list[Any]:
    """Return a coroutine and those that it waits for, outermost first."""
    found = []
    if isinstance(coroutine, CoroutineRest):
        coroutine = coroutine.coroutine
    while inspect.iscoroutine(coroutine):
        found.append(coroutine)
        coroutine = coroutine.cr_await
    return found


def shown_task(task: asyncio.Task[Any]) -> str:
    """Return the name of a task, if it was given one, and the line of the program that it waits at.

    The names that asyncio gives depend on all tasks that the process has made before.
    """
    coroutine: Any = task.get_coro()
    # That of `aclose` of an async generator has no name.
    what = getattr(coroutine, "__qualname__", type(coroutine).__name__)
    name = "" if re.fullmatch(r"Task-\d+", task.get_name()) else f"{task.get_name()}: "
    return name + (of_task(task) or f"in {what}")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, starting at 0. No thread, no real file, no real clock.

    `seed` decides the order of files that are ready at once. `errors` has what reached the loop's
    exception handler: nothing should.
    """

    is_virtual = True

    _scheduled: list[asyncio.TimerHandle]  # of asyncio's own, which leaves it out of its type hints
    _transports: MutableMapping[int, Any]  # as well

    def __init__(self, seed: int | str = 0) -> None:
        self._virtual = VirtualSelector(Random(f"loop {seed}"))
        self._virtual.idle_error = self._stuck
        self._virtual.is_due = self._is_due
        self.errors: list[str] = []
        self.processes: list[Process] = []
        self.interrupted: BaseException | None = None
        """What a signal handler has raised."""
        self.chooser = Random(f"library {seed}")
        """The library's source of random numbers."""
        super().__init__(self._virtual)
        self._numbers = itertools.count()  # of tasks
        self.set_exception_handler(self._note_error)
        self.on_task: Callable[[Process, asyncio.Task[Any]], None] = lambda process, task: None
        """Called with every new task of a process."""
        self.make_socket: Callable[[int, int, int], socket.socket] | None = None
        self.resolve: Callable[[str], str] = lambda host: host

    def time(self) -> float:
        return self._virtual.now

    @property
    def selector(self) -> VirtualSelector:
        return self._virtual

    def identity(self) -> tuple[str, str, int, str, str]:
        """Return the running process, for the library. Each process is on a host of its own."""
        process = _current.get()
        name = "simulation" if process is None else process.name
        return f"{name}-process-loop", name, 1, name, "user"

    def new_socket(self, family: int, kind: int, proto: int = 0) -> socket.socket:
        """Make a socket. The library calls this in place of `socket.socket` on this loop."""
        if self.make_socket is None:
            raise OSError("this virtual loop has no network: make a Network on it")
        return self.make_socket(family, kind, proto)

    def _is_due(self) -> bool:
        return bool(self._scheduled) and self._scheduled[0].when() <= self.time()

    def _stuck(self) -> BaseException:
        waiting = self.waiting()
        return DeadlockError(
            f"at {self.time():.6f} s nothing is ready and no timer is set: {len(waiting)} tasks "
            + "\n  ".join(["wait for ever:", *waiting])
        )

    def waiting(self) -> list[str]:
        """Return each task that is not over, with the line of the program that it waits at.

        Tasks of ended processes are left out, because they never go on.
        """
        ended = {task for one in self.processes if not one.alive for task in one.tasks}
        return sorted(map(shown_task, asyncio.all_tasks(self) - ended))

    def _note_error(self, loop: asyncio.AbstractEventLoop, what: dict[str, Any]) -> None:
        lost = what.get("task") or what.get("future")
        if lost is not None and not self.blames(_owner_of(lost)):
            return
        error, text = what.get("exception"), str(what.get("message"))
        self.errors.append(f"{text}: {in_words(error)}" if error else text)

    def blames(self, owner: Process | None) -> bool:
        """Tell whether an error or an await that is forgotten now is a mistake of its owner.

        Processes that were ended could not look at anything. None: the owner is not known.
        """
        owners = self.processes if owner is None else [owner]
        return all(one.alive for one in owners)

    # Callbacks belong to the process that sets them up.

    def call_soon(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        return _belonging(super().call_soon, callback, args, context)

    def call_soon_threadsafe(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        return _belonging(super().call_soon_threadsafe, callback, args, context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Args], object],
        *args: *Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return _belonging(partial(super().call_at, when), callback, args, context)

    def call_in_thread(
        self, delay: float, callback: Callable[..., object], *args: Any
    ) -> asyncio.TimerHandle:
        """Schedule what a thread of the process does after `delay` seconds, even if its loop is
        busy."""
        call_at = partial(super().call_at, self.time() + delay)
        return _belonging(call_at, callback, args, None, by_thread=True)

    def create_task(self, coro: Any, *, context: Context | None = None, **options: Any) -> Any:
        given = context
        if context is None:
            context = contextvars.copy_context()
        elif _current not in context and _current.get() is not None:  # the program has made it
            context.run(_current.set, _current.get())
        process = context.get(_current)
        if self.get_task_factory() is not None:  # one of the program
            task = super().create_task(coro, context=given, **options)
        else:
            options |= {"number": next(self._numbers), "process": process}
            task = Task(coro, loop=self, context=context, **options)
        if process is not None:
            process.tasks.add(task)
            self.on_task(process, task)
        return task

    def interrupt(self, error: BaseException) -> None:
        """End all processes and stop, because a signal handler raises `error`.

        The task that runs may keep the error, or wait before it ends. Another task may never yield.
        """
        self.interrupted = error
        for process in self.processes:
            process.end()
        self.stop()

    def again(self, call: _Call) -> None:
        """Run a call that was held, in its own context, because a task keeps what it sets there."""
        context: Context = call.handle._context  # type: ignore[attr-defined]
        super().call_soon(call.again, context=context)

    def close(self) -> None:
        """Close it, and bury what never ends, such as tasks and connections of ended processes."""
        if not self.is_closed():
            self.call_soon(self._bury, context=Context())
            self.call_soon(self.stop, context=Context())
            self.run_forever()
        super().close()

    def __del__(self) -> None:
        """Do nothing, because it holds nothing of the system."""

    def _bury(self) -> None:
        # A killed process leaves coroutines behind that are never resumed. When collected, each
        # would warn, or run its `finally` in a closed loop. So they are closed here, in a last
        # turn, while what they call still works.
        for transport in list(self._transports.values()):
            with suppress(Exception):  # it was lost before, and has left its loop
                transport.abort()
                transport._call_connection_lost(None)
        buried: set[asyncio.Task[Any]] = set()
        # some create new tasks while they are closed
        while left := asyncio.all_tasks(self) - buried:
            for task in left:
                abandon(task)
                # The innermost comes first, because it would be collected as it is if those that
                # wait for it ended before.
                for coroutine in reversed(_chain(task.get_coro())):
                    # A `finally` that waits for something survives, and is closed again.
                    for _ in range(MOST_LAST_WORDS):
                        try:
                            coroutine.close()
                        except KeyboardInterrupt:  # of the user
                            raise
                        except BaseException:  # it may raise anything, even SystemExit
                            pass
                        if coroutine.cr_frame is None:
                            break
            buried |= left

    # What a real loop does by threads and files of its own.

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        where = (self.resolve(host), int(port))
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", where)]

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Args], T], *args: *Args
    ) -> asyncio.Future[T]:
        """Run what threads do after a moment, unless the process ends before."""
        done: asyncio.Future[T] = self.create_future()
        self.call_later(self.chooser.uniform(0.0, SLOWEST_DISK), self._execute, done, func, args)
        return done

    @staticmethod
    def _execute(done: asyncio.Future[T], func: Callable[..., T], args: tuple[Any, ...]) -> None:
        if done.cancelled():
            return
        try:
            done.set_result(func(*args))
        except KeyboardInterrupt:  # of the user
            raise
        except BaseException as error:
            done.set_exception(error)

    async def create_connection(self, *args: Any, sock: Any = None, **options: Any) -> Any:
        if sock is None:  # asyncio would make a real one
            self._not_simulated()
        return await super().create_connection(*args, sock=sock, **options)

    async def create_server(self, *args: Any, sock: Any = None, **options: Any) -> Any:
        if sock is None:
            self._not_simulated()
        return await super().create_server(*args, sock=sock, **options)

    def _not_simulated(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(
            "a simulation has no signals, subprocesses and connections other than those of aiodist"
        )

    add_signal_handler: Any = _not_simulated
    create_datagram_endpoint = create_unix_connection = create_unix_server = _not_simulated
    subprocess_exec = subprocess_shell = _not_simulated

    def _make_self_pipe(self) -> None: ...

    def _close_self_pipe(self) -> None: ...

    def _write_to_self(self) -> None: ...
