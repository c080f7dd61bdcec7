"""Ranks on a simulated network, in one event loop and virtual time.

The library runs as it is, over TCP: coordinator, membership, leases, links, collectives, point to
point. Sockets, hosts and time are simulated. The seed decides everything, so a run that failed
fails again.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import math
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

import aiodist.trace
from aiodist.coordinator.actor import Coordinator
from aiodist.errors import in_words
from aiodist.phases.base import as_int
from aiodist.session import connect
from aiodist.testing.faults import FaultInjector
from aiodist.testing.history import History
from aiodist.testing.sockets import Network
from aiodist.testing.virtual_loop import (
    DeadlockError,
    VirtualLoop,
    abandon,
    current_process,
    shown_task,
)
from aiodist.testing.wires import Conditions, Node
from aiodist.timeouts import check_seconds

T = TypeVar("T")
Program = Callable[..., Awaitable[Any]]

COORDINATOR = "10.0.0.1"
PORT = 29500
RECOVERY = 1.0
"""Seconds in which a coordinator that came back without a state file forms no group."""
LIMIT = 3600.0
"""Seconds of virtual time after which a run counts as hanging."""


class Killed(Exception):
    """The outcome of a rank whose process was killed."""


class HangError(AssertionError):
    """Something did not end."""


class InvariantError(AssertionError):
    """Something happened that must not happen. `problems` lists it."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,), self.__dict__


class Simulation:
    """A coordinator and `size` ranks, each on a host of its own. It runs once.

    `seed` decides all that is random. `durable`: the coordinator has a state file. `options` are
    those of `aiodist.connect`. Tests may use `loop`, `network`, `faults` (see
    `FaultInjector.fail_at`) and `history`.

    For example::

        from aiodist.testing import Simulation

        async def program(group):
            return await group.all_reduce(group.rank)

        assert Simulation(3, seed=1).run(program) == [3, 3, 3]
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int | str = 0,
        conditions: Conditions | None = None,
        durable: bool = False,
        **options: Any,
    ) -> None:
        if as_int(size, "size is an int") < 1:
            raise ValueError(f"size is at least 1, not {size}")
        self.size = size
        self.seed = seed
        self.loop = VirtualLoop(seed)
        self.network = Network(self.loop, seed, conditions)
        self.history = History(self.loop.time, _who)
        self.faults = FaultInjector(self._do, size)
        self.coordinator = self.network.node(COORDINATOR)  # the process that serves
        # The processes of the ranks, by rank.
        self.nodes = [self.network.node(f"10.0.1.{rank + 1}") for rank in range(size)]
        self.address = f"tcp://{COORDINATOR}:{PORT}"  # the coordinator's address
        self.problems: list[str] = []  # what must not have happened, and did
        self.extra_problems: Callable[[], list[str]] = list  # further checks of a test
        self._options = {"transports": ("tcp",), **options}
        self._served: Coordinator | None = None  # the coordinator that runs in its process
        self._durable = durable
        self._folder = ""  # of its state file; "": none

    # ---- running ----

    def run(self, program: Program, *args: Any, limit: float = LIMIT) -> list[Any]:
        """Run ``await program(group, *args)`` on every rank. Returns the outcomes by rank.

        An outcome is the result, or the exception that ended it (`Killed` for a rank that was
        killed). Raises HangError if that takes longer than `limit` seconds of virtual time, and
        InvariantError if something happened that must not happen: see `check`.
        """

        async def rank_main(rank: int) -> Any:
            async with self.connecting(rank) as group:
                return await program(group, *args)

        return self.play({rank: rank_main(rank) for rank in range(self.size)}, limit)

    def play(
        self, mains: Mapping[int, Coroutine[Any, Any, Any]], limit: float = LIMIT
    ) -> list[Any]:
        """Run these coroutines, each on the node of its rank, beside a coordinator.

        Returns their outcomes in order, as `run` does. For programs that connect by themselves.
        """
        try:
            check_thread("a Simulation")
            check_limit(limit)
            if self.loop.is_closed():
                raise RuntimeError("a Simulation runs once: make another")
        except (RuntimeError, TypeError, ValueError):
            for main in mains.values():
                main.close()
            raise
        try:
            with ExitStack() as stack:
                if self._durable:
                    self._folder = stack.enter_context(tempfile.TemporaryDirectory())
                stack.callback(self._let_go)
                stack.callback(self.loop.close)
                outcomes = self._complete(self._play(mains), limit)
                self._reap()
            self.check()
        except (HangError, DeadlockError, InvariantError) as error:
            error.add_note(f"in Simulation({self.size}, seed={self.seed!r})")
            raise
        return outcomes

    def connecting(self, rank: int | None, **options: Any) -> Any:
        """Return what `aiodist.connect` returns, for use on the node of `rank`."""
        wanted: dict[str, Any] = {"rank": rank, "size": self.size}
        return connect(self.address, **{**wanted, **self._options, **options})

    async def _play(self, mains: Mapping[int, Coroutine[Any, Any, Any]]) -> list[Any]:
        await self.coordinator.spawn(self._serve(0.0), "coordinator")
        ended: list[asyncio.Future[Any]] = []
        for rank, main in mains.items():
            node = self.nodes[rank]
            if node.alive:
                node.context.run(aiodist.trace.install, self._hook)
                ended.append(self._outcome(node, node.spawn(main, f"rank {rank}")))
            else:
                main.close()
        outcomes = [await future for future in ended]
        if self.coordinator.alive and self._served is not None:
            await self.coordinator.spawn(self._served.stop(), "stop")
        return outcomes

    async def _serve(self, recovery: float) -> None:
        served = Coordinator(
            self.address,
            token=self._options.get("token"),
            state=f"{self._folder}/state" if self._folder else None,
            recovery=recovery,
        )
        self._served = served
        await served.start()

    def restart_coordinator(self, seconds: float, how: str = "reset") -> None:
        """Kill the coordinator (see `Node.kill`). After `seconds` another one comes to its address.

        It has the state file if there is one. Does nothing if the coordinator is away already.
        """
        if not self.coordinator.alive:
            return
        self.coordinator.kill(how)
        # The tasks of a killed process are neither cancelled nor resumed. Python would complain
        # when they are collected, and of those that never began as coroutines that were not
        # awaited.
        for task in self.coordinator.tasks:
            abandon(task)
            coroutine = task.get_coro()
            if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == (
                inspect.CORO_CREATED
            ):
                coroutine.close()
        self._let_go()
        self.network.later_by(seconds, self._come_back)

    def _come_back(self) -> None:
        self.coordinator = self.network.another(COORDINATOR)
        # Members come first, because without a state file a joiner may be taken for one of them.
        self.coordinator.spawn(self._serve(0.0 if self._folder else RECOVERY), "coordinator")

    def _let_go(self) -> None:
        """Do what the system does with the files of a process that has ended."""
        if self._served is not None and self._served._journal is not None:
            self._served._journal.close_after_fork()

    def _hook(self, scope: aiodist.trace.Scope, point: str, work: Any, value: Any) -> None:
        self.history(scope, point, work, value)
        node = current_process()
        if isinstance(node, Node) and node.alive and node in self.nodes:
            # In a smaller group its rank is another than that of the fault.
            scope = scope._replace(rank=self.nodes.index(node))
            self.faults(scope, point, work, value)

    def _outcome(self, node: Node, task: asyncio.Task[Any]) -> asyncio.Future[Any]:
        """Return the outcome of a task on a node that may be killed."""
        outcome: asyncio.Future[Any] = self.loop.create_future()

        # The task of a killed node never ends, and does not hear of the kill. So its outcome is its
        # end or that of its node, whichever comes first.
        def ended(_: object = None) -> None:
            if outcome.done():
                return
            if not node.alive:
                outcome.set_result(Killed(f"{node.host} was killed at {self.loop.time():.6f} s"))
            elif task.cancelled():
                outcome.set_result(asyncio.CancelledError())
            else:
                outcome.set_result(task.exception() or task.result())

        task.add_done_callback(ended)
        node.on_end.append(ended)
        return outcome

    def _complete(self, main: Coroutine[Any, Any, T], limit: float) -> T:
        # Not `run_until_complete`, because the limit is in virtual time and takes a timer on this
        # loop, and because what is left must be told before anything is cancelled.
        task: asyncio.Task[T] = self.loop.create_task(main, name="simulation")
        timer = self.loop.call_later(limit, self.loop.stop)
        task.add_done_callback(lambda _: self.loop.stop())
        self.loop.run_forever()
        timer.cancel()
        if self.loop.interrupted is not None:
            raise self.loop.interrupted
        if not task.done():
            raise HangError(f"not over after {limit:g} s of virtual time: {self._waiting()}")
        return task.result()

    def _waiting(self) -> str:
        lines = self.loop.waiting()
        lines += [str(entry) for entry in self.history.entries if entry.end == "start"]
        return "\n  ".join(["", *lines])

    # ---- the end ----

    def _reap(self) -> None:
        """Note what living nodes have left behind."""
        names = {node: f"rank {rank}" for rank, node in enumerate(self.nodes)}
        names[self.coordinator] = "the coordinator"
        for node in self.network.nodes.values():
            if node.alive:
                who = names.get(node, node.host)
                self.problems += [f"{who} left {sock!r} open: close it" for sock in node.sockets]
                left = sorted(shown_task(task) for task in node.tasks if not task.done())
                text = f"{who} left a task over (await or cancel it)"
                self.problems += [f"{text}: {task}" for task in left]
                self.loop.errors += sorted(filter(None, map(_lost_error, node.tasks)))

    def check(self) -> None:
        """Raise InvariantError if anything happened that must not happen.

        This checks the history (see `History.problems`), errors that were not handled, faults that
        did not happen (see `FaultInjector.fail_at`), and tasks and sockets that living nodes left
        behind. It also checks for Works that their program did not look at (see `aiodist.Work`).
        """
        alive = {node.name: node.alive for node in self.network.nodes.values()}
        gc.collect()  # a failed Work that was not awaited reports that when it goes
        problems = [*self.problems, *self.loop.errors]
        stopped = {node.name: node.stopped_seconds for node in self.network.nodes.values()}
        problems += self.history.problems(
            is_alive=alive.__getitem__,
            stopped=stopped.__getitem__,
            injected=[fault.action for fault in self.faults.faults],
        )
        problems += self.faults.problems()
        problems += self.extra_problems()
        if problems:
            raise InvariantError(problems)

    # ---- faults ----

    def _do(self, action: str, rank: int, work: Any, seconds: float) -> None:
        node = current_process()
        assert isinstance(node, Node)
        if action == "kill":
            node.kill()
        elif action == "unplug":
            node.kill("silent")
        elif action == "cancel":
            self.loop.call_soon(work.cancel)
        else:
            self.network.later_by(seconds, node.stop() if action == "stop" else node.block())


def check_limit(limit: float) -> None:
    """Raise TypeError or ValueError if `limit` is no number of seconds that ends a run."""
    check_seconds("limit", limit)
    if limit == math.inf:
        raise ValueError("limit is a finite number of seconds, because a run may hang")


def check_thread(runner: str) -> None:
    """Raise RuntimeError if an event loop runs in this thread."""
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(
            f"{runner} has an event loop of its own, and another one runs in this thread: call it"
            " in a thread (asyncio.to_thread)"
        )


def _lost_error(task: asyncio.Task[Any]) -> str:
    """Return the error of a task that no program has looked at, or ""."""
    # asyncio would tell it when the task is collected. But the history keeps errors, which keep the
    # frames that they came through, and so the tasks of these frames.
    if not (task.done() and task._log_traceback):
        return ""
    error = task.exception()
    assert error is not None
    return f"Task exception was never retrieved: {in_words(error)}"


def _who() -> str:
    """Return the running process; "" for a dead one."""
    process = current_process()
    return "" if process is None or not process.alive else process.name
