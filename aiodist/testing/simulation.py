"""Ranks on a simulated network, in one event loop and no time at all.

What runs is the library as it is, over TCP: coordinator, membership, leases, links, collectives,
point to point. Simulated are sockets, hosts and time. Everything is decided by the seed: a run
that failed fails again.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

import aiodist.trace
from aiodist.coordinator.actor import Coordinator
from aiodist.session import connect
from aiodist.testing.faults import FaultInjector
from aiodist.testing.history import History
from aiodist.testing.network import Conditions, Network, Node
from aiodist.testing.virtual_loop import VirtualLoop, abandon, current_process

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
    """Something happened that must not. `problems`: what, one a line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Simulation:
    """A coordinator and `size` ranks, each on a host of its own.

    `seed` decides all that is random; `durable`: the coordinator has a state file; `options` are
    those of `aiodist.connect`. `loop`, `network`, `faults` (see `FaultInjector.fail_at`) and
    `history` are for tests to use.

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
        self.size = size
        self.seed = seed
        self.loop = VirtualLoop(seed)
        self.network = Network(self.loop, seed, conditions)
        self.history = History(self.loop.time, _who)
        self.faults = FaultInjector(self._do)
        self.coordinator = self.network.node(COORDINATOR)  # the process that serves
        # The processes of the ranks, by rank.
        self.nodes = [self.network.node(f"10.0.1.{rank + 1}") for rank in range(size)]
        self.address = f"tcp://{COORDINATOR}:{PORT}"  # where the coordinator is
        self.problems: list[str] = []  # what must not have happened, and did
        self.extra_problems: Callable[[], list[str]] = list  # what a test looks for of its own
        self._options = {"transports": ("tcp",), **options}
        self._served: Coordinator | None = None  # the coordinator that runs in its process
        self._durable = durable
        self._folder = ""  # of its state file; "": it has none
        self._restarts = 0  # how often the coordinator was started again

    # ---- running ----

    def run(self, program: Program, *args: Any, limit: float = LIMIT) -> list[Any]:
        """Run ``await program(group, *args)`` on every rank: what each returned, or the exception
        that it ended with (`Killed` for a rank that was killed), by rank.

        Raises HangError where that takes longer than `limit` seconds of virtual time, DeadlockError
        where nothing goes on at all, InvariantError where something happened that must not:
        see `check`.
        """

        async def rank_main(rank: int) -> Any:
            async with self.connecting(rank) as group:
                return await program(group, *args)

        return self.play({rank: rank_main(rank) for rank in range(self.size)}, limit)

    def play(
        self, mains: Mapping[int, Coroutine[Any, Any, Any]], limit: float = LIMIT
    ) -> list[Any]:
        """Run these coroutines, each on the node of that rank, beside a coordinator: their
        outcomes, in order. For programs that connect by themselves; else as `run`."""
        with ExitStack() as stack:
            if self._durable:
                self._folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.callback(self._let_go)
            stack.callback(self.loop.close)
            outcomes = self._complete(self._play(mains), limit)
            self._reap()
        self.check()
        return outcomes

    def connecting(self, rank: int | None, **options: Any) -> Any:
        """What `aiodist.connect` returns, for use on the node of `rank`."""
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
        """Kill the coordinator (see `Node.kill`); after `seconds` another one comes to its address,
        with its state file if there is one. Nothing happens where it is away already."""
        if not self.coordinator.alive:
            return
        self.coordinator.kill(how)
        # A killed process has no last words: its tasks are neither cancelled nor resumed. Python
        # would complain of that when they are collected, of those that never began even as of a
        # coroutine that was not awaited.
        for task in self.coordinator.tasks:
            abandon(task)
            coroutine = task.get_coro()
            if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == (
                inspect.CORO_CREATED
            ):
                coroutine.close()
        self._restarts += 1
        self._let_go()
        self.network.later_by(seconds, self._come_back)

    def _come_back(self) -> None:
        self.coordinator = self.network.another(COORDINATOR)
        # Members come first: without a state file, who joins may be taken for one of them.
        self.coordinator.spawn(self._serve(0.0 if self._folder else RECOVERY), "coordinator")

    def _let_go(self) -> None:
        """What the system does with the files of a process that has ended."""
        if self._served is not None and self._served._journal is not None:
            self._served._journal.close_after_fork()

    def _hook(self, scope: aiodist.trace.Scope, point: str, work: Any, value: Any) -> None:
        self.history(scope, point, work, value)
        if _who():
            self.faults(scope, point, work, value)

    def _outcome(self, node: Node, task: asyncio.Task[Any]) -> asyncio.Future[Any]:
        """What becomes of the task of a node that may be killed."""
        outcome: asyncio.Future[Any] = self.loop.create_future()

        # The task of a node that is killed never ends, nor does it hear of it. So its outcome is
        # known either by its end or by that of its node, whichever comes first.
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
        # Not `run_until_complete`: the limit is one of virtual time, so it takes a timer on this
        # loop, and what is left when it is over shall be told before anything is cancelled.
        task: asyncio.Task[T] = self.loop.create_task(main, name="simulation")
        timer = self.loop.call_later(limit, self.loop.stop)
        task.add_done_callback(lambda _: self.loop.stop())
        self.loop.run_forever()
        timer.cancel()
        if not task.done():
            raise HangError(f"not over after {limit:g} s of virtual time: {self._waiting()}")
        return task.result()

    def _waiting(self) -> str:
        lines = self.loop.waiting()
        lines += [str(entry) for entry in self.history.entries if entry.end == "start"]
        return "\n  ".join(["", *lines])

    # ---- the end ----

    def _reap(self) -> None:
        """Note what the living have left behind."""
        for node in self.network.nodes.values():
            if node.alive:
                self.problems += [f"{node.host} left {sock!r} open" for sock in node.sockets]
                left = sorted(task.get_name() for task in node.tasks if not task.done())
                self.problems += [f"{node.host} left a task over: {name}" for name in left]

    def check(self) -> None:
        """Raise InvariantError for whatever happened that must not have happened.

        The history (see `History.problems`), errors that were not handled, Works that the program
        did not look at (see `aiodist.Work`; not if a rank was killed), faults that did not happen
        (see `FaultInjector.fail_at`), and what live nodes left behind: tasks, sockets.
        """
        alive = {node.name: node.alive for node in self.network.nodes.values()}
        gc.collect()  # a failed Work that nobody has seen says so when it goes
        problems = [*self.problems, *self.loop.errors]
        if self._restarts or not all(alive.values()):  # the dead have no time to look at anything
            problems = [
                text
                for text in problems
                if "never retrieved" not in text and "looked at it: await it" not in text
            ]
        stopped = {node.name: node.stopped_seconds for node in self.network.nodes.values()}
        problems += self.history.problems(is_alive=alive.__getitem__, stopped=stopped.__getitem__)
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
            node.stop() if action == "stop" else node.block()
            self.network.later_by(seconds, node.resume)


def _who() -> str:
    """The process that is running; "" for a dead one."""
    process = current_process()
    return "" if process is None or not process.alive else process.name
