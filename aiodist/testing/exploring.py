"""`explore`: run a program under many seeds, and tell the smallest story of a failure."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import math
import random
import re
import signal
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from aiodist.errors import AiodistError
from aiodist.group import Group
from aiodist.phases.base import as_int
from aiodist.testing.plans import KINDS, NAMES, Planned, RunPlan, draw, parse, shrink
from aiodist.testing.simulation import (
    HangError,
    InvariantError,
    Simulation,
    check_limit,
    check_thread,
)
from aiodist.testing.story import (
    MOST_LINES,
    StoryEvent,
    TaskWatch,
    merged,
    shown,
    shown_error,
    told,
    until,
)
from aiodist.testing.virtual_loop import DeadlockError, VirtualLoop, current_process
from aiodist.testing.wires import Conditions

Program = Callable[..., Awaitable[Any]]
Check = Callable[[dict[int, Any]], object]

HANG = "hang"
MOST_RUNS = 400
"""Runs that making a failure smaller may take."""
LIMIT = 600.0
"""Seconds of virtual time that a run may take by default."""
EVEN = Conditions(delay=(5e-4, 5e-4), loss=0.0, short=0.0)


class FoundError(AssertionError):
    """`explore` has found a failure. Its text is the whole story.

    `plan` is the smallest run that fails so, as `explore(replay=…)` takes it. `events` are the
    lines of its story. `failure` says what went wrong.
    """

    def __init__(self, text: str, plan: str, failure: str, events: list[str]) -> None:
        super().__init__(text)
        self.plan = plan
        self.failure = failure
        self.events = events

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.plan, self.failure, self.events)


@dataclass(frozen=True)
class Explored:
    """What `explore` has tried without finding a failure.

    `seeds`: how many runs. `faults`: how many faults of each kind have happened in them.
    """

    seeds: int
    faults: Counter[str]


@dataclass(frozen=True)
class _Failure:
    """What went wrong. Two failures of the same `kind` are taken for the same."""

    kind: str
    text: str
    cause: BaseException | None = None


def explore(
    program: Program,
    *,
    ranks: int = 3,
    seeds: int | Iterable[int] = 200,
    faults: str = "",
    check: Check | None = None,
    limit: float = LIMIT,
    replay: str | None = None,
    **options: Any,
) -> Explored:
    """Run ``await program(group)`` on simulated ranks once for each seed, and look for failures.

    A rank that lives has to return. A run fails in each of these cases:

    - An exception leaves `connect`, the program or its `close` on a rank that was not killed.
    - The program is not over after `limit` seconds of virtual time.
    - `Simulation` finds something, such as an `await` that was forgotten or a task that is left.
    - ``check(results)`` raises. It gets what the ranks returned, by rank.

    The first failure is made smaller: fewer ranks, fewer and earlier faults, an even network. Then
    FoundError is raised. Its text says which rank did what, line by line, and how to repeat it.

    Args:
        program: an async function of one argument, the `Group` of all ranks. ``group.address`` is
            the address for channels, averagers and further groups.
        ranks: how many ranks there are.
        seeds: how many seeds, or which ones. Each decides delays, losses, the order of what is
            ready, faults, and what `random` and the global generator of `numpy.random` give.
        faults: what may happen to ranks, some of "kill cut delay break restart".
        check: what has to hold of the results of one run.
        limit: seconds of virtual time after which a run counts as hanging.
        replay: a plan from the text of a FoundError. Only this is run. ValueError is raised if it
            does not fail and one of its faults does not happen.
        options: more arguments of `aiodist.connect`, such as ``lease=2.0``.

    Raises FoundError, ValueError or TypeError for arguments that mean nothing, such as no seeds,
    and RuntimeError if an event loop runs in this thread.

    For example::

        from aiodist.testing import explore

        async def program(group):
            assert await group.all_reduce(1) == group.size

        explore(program, ranks=3, seeds=20, faults="delay")
    """
    check_thread("explore")
    kinds, chosen = check_arguments(ranks, seeds, faults, check, limit, options)
    explorer = _Explorer(program, check, limit, options)
    alarm = getattr(signal, "SIGALRM", signal.SIGINT)  # Windows has none
    with _alone, _quietly(), _ended_by(signal.SIGINT), _ended_by(alarm):
        if replay is not None:
            plan = parse(replay)
            _as_seed(plan.seed, "the seed of replay")
            failure = explorer.play(plan)
            missed = explorer.missed()
            if failure is not None:
                raise explorer.found(plan, failure, f"This run fails{missed and f' ({missed})'}:")
            if missed:
                raise ValueError(f"replay: {missed}, so this run is not the one that failed")
            return Explored(1, explorer.happened)
        return explorer.explore(chosen, ranks, kinds)


def check_arguments(
    ranks: int,
    seeds: int | Iterable[int],
    faults: str,
    check: Check | None,
    limit: float,
    options: dict[str, Any],
) -> tuple[list[str], Iterable[int]]:
    """Return the kinds of `faults`, and the seeds. Raises TypeError or ValueError for arguments of
    `explore` that mean nothing."""
    if not isinstance(faults, str):
        raise TypeError(f"faults is a text, such as {' '.join(NAMES)!r}, not {faults!r}")
    kinds = faults.replace(",", " ").split()
    for kind in kinds:
        if kind not in NAMES:
            raise ValueError(f"faults are some of {' '.join(NAMES)!r}, not {kind!r}")
    if as_int(ranks, "ranks is an int") < 1:
        raise ValueError(f"ranks is at least 1, not {ranks}")
    for name in ("rank", "size", "seed", "address", "conditions", "durable"):
        if name in options:
            raise TypeError(
                f"{name}= means nothing here, because each run has its own: the number of ranks is "
                "ranks=, and the seeds are seeds="
            )
    if check is not None and (not callable(check) or inspect.iscoroutinefunction(check)):
        raise TypeError(f"check is a plain function of the results by rank, not {check!r}")
    check_limit(limit)
    Simulation(ranks, **options).connecting(0)  # refuses options
    if not isinstance(seeds, Iterable):
        return kinds, range(as_int(seeds, "seeds is an int, or ints"))
    chosen = map(_as_seed, seeds)
    return kinds, [*chosen] if isinstance(seeds, list) else chosen  # others may be endless


def _as_seed(given: int, what: str = "each of seeds") -> int:
    seed = as_int(given, f"{what} is an int")
    if not 0 <= seed < 2**32:  # numpy.random takes no others
        raise ValueError(f"{what} is from 0 to 2**32 - 1, not {seed}")
    return seed


_alone = threading.RLock()
"""Held while a thread explores, because logging, warnings and random numbers are of all threads."""


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep what thousands of runs would say from the log, and what they draw from the caller."""
    disabled, own, numpys = logging.root.manager.disable, random.getstate(), np.random.get_state()
    frozen = gc.get_freeze_count()
    logging.disable(logging.CRITICAL)  # because ranks are lost all the time
    gc.collect()
    gc.freeze()  # because every run collects garbage, and what is there now is none
    try:
        yield
    finally:
        logging.disable(disabled)
        random.setstate(own)
        np.random.set_state(numpys)
        if not frozen:
            gc.unfreeze()


@contextmanager
def _ended_by(number: int) -> Iterator[None]:
    """Let an exception of the handler of a signal end the exploration, as pytest-timeout needs it.

    Otherwise the rank that runs would fail with it. To make that failure smaller, the program would
    run again, with no timeout left.
    """
    handler = signal.getsignal(number)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except BaseException as error:
            loop = asyncio._get_running_loop()
            if isinstance(loop, VirtualLoop):
                loop.interrupt(error)
            raise

    signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, handler)


class _Explorer:
    def __init__(
        self, program: Program, check: Check | None, limit: float, options: dict[str, Any]
    ) -> None:
        self._program = program
        self._limit = limit
        self._check = check
        self._options = options
        self.happened: Counter[str] = Counter()
        self._run: _Run

    def explore(self, seeds: Iterable[int], ranks: int, kinds: Sequence[str]) -> Explored:
        calm = RunPlan(ranks, 0, even=True)
        failure = self.play(calm)  # says how often ranks wait, so faults come at times that exist
        if failure is not None:
            self._shrink(calm, failure, "It fails without any fault.")
        waits = self._run.watch.waits
        count = 0
        for count, seed in enumerate(seeds, 1):
            plan = draw(seed, ranks, kinds, waits)
            failure = self.play(plan)
            if failure is not None:
                self._shrink(plan, failure, f"Seed {seed} fails, after {count - 1} that did not.")
        if not count:
            raise ValueError("seeds has no seed, so nothing was tried")
        return Explored(count, self.happened)

    def play(
        self, plan: RunPlan, *, limit: float | None = None, tell: bool = False
    ) -> _Failure | None:
        """Run the program by a plan. Returns what went wrong."""
        self._run = _Run(plan, self._program, self._check, self._options, tell=tell)
        failure = self._run.play(self._limit if limit is None else limit)
        self.happened.update(fault.kind for fault in self._run.happened)
        return failure

    def missed(self) -> str:
        """Return which faults of the last run did not happen, in words, or ""."""
        left = Counter(self._run.plan.faults) - Counter(self._run.happened)
        waits = self._run.watch.waits
        return ", ".join(
            f"{fault} did not happen: rank {fault.rank} waited {waits[fault.rank]} times"
            for fault in left
        )

    def _shrink(self, plan: RunPlan, failure: _Failure, how: str) -> None:
        # A smaller run that lasts much longer hangs. That is another failure, and takes long.
        spent = self._run.simulation.loop.time()
        limit = None if failure.kind == HANG else min(self._limit, 2 * spent + 60)

        def fails(candidate: RunPlan) -> bool:
            found = self.play(candidate, limit=limit)
            return found is not None and found.kind == failure.kind

        if not any(fails(plan) for _ in range(3)):
            text = (
                f"{how} The same run does not fail again the same way, so the program depends on "
                f"something that is not simulated: real time, threads, files, or the order of a "
                f"set.\n\n{failure.text}\n\n{self._again(plan)}"
            )
            raise FoundError(text, str(plan), failure.text, []) from failure.cause
        small, runs = shrink(plan, fails, MOST_RUNS)
        raise self.found(small, failure, f"{how} Made smaller in {runs} runs:")

    def found(self, plan: RunPlan, failure: _Failure, how: str) -> FoundError:
        """Play a plan that fails, and return the error that tells its story."""
        failure = self.play(plan, tell=True) or failure
        lines = self._run.story()
        listed = lines
        if len(lines) > MOST_LINES:
            half = MOST_LINES // 2
            left = f"             … {len(lines) - 2 * half} lines …"
            listed = [*lines[:half], left, *lines[-half:]]
        network = "an even network" if plan.even else f"the network of seed {plan.seed}"
        title = (
            f"{how} {plan.ranks} ranks, {len(plan.faults)} faults, {network}, {len(lines)} events."
        )
        text = "\n".join([title, "", failure.text, "", *listed, "", self._again(plan)])
        error = FoundError(text, str(plan), failure.text, lines)
        error.__cause__ = failure.cause
        return error

    def _again(self, plan: RunPlan) -> str:
        given = [_name_of(self._program)]
        if self._check is not None:
            given.append(f"check={_name_of(self._check)}")
        if self._limit != LIMIT:
            given.append(f"limit={self._limit!r}")
        given += [f"{name}={value!r}" for name, value in self._options.items()]
        return f'Run it again: explore({", ".join(given)}, replay="{plan}")'


class _Run:
    """One run of a program by a plan."""

    def __init__(
        self,
        plan: RunPlan,
        program: Program,
        check: Check | None,
        options: dict[str, Any],
        *,
        tell: bool,
    ) -> None:
        self.plan = plan
        self.happened: list[Planned] = []
        self._program = program
        self._check = check
        conditions = EVEN if plan.even else _conditions(plan.seed)
        restarts = any(fault.kind == "restart" for fault in plan.faults)
        self.simulation = Simulation(
            plan.ranks, seed=plan.seed, conditions=conditions, durable=restarts, **options
        )
        self.watch = TaskWatch(self.simulation.nodes, self._begun, tell=tell)
        self._start = 0.0
        self._met = 0
        self._all_met: asyncio.Future[None] = self.simulation.loop.create_future()
        self._errors: list[tuple[int, BaseException, float]] = []
        self._failed = math.inf  # when the rank ended that is to blame
        self._results: dict[int, Any] = {}

    def play(self, limit: float) -> _Failure | None:
        random.seed(self.plan.seed)
        np.random.seed(self.plan.seed)
        loop = self.simulation.loop
        loop.selector.on_turn = self.watch.turn
        loop.on_task = self.watch.made
        mains = {rank: self._rank(rank) for rank in range(self.plan.ranks)}
        stuck: BaseException | None = None
        problems: list[str] = []
        forgotten: list[str] = []

        def note(message: Warning | str, *others: Any, **more: Any) -> None:
            if "was never awaited" in str(message) and loop.blames(current_process()):
                forgotten.append(str(message))

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            try:
                self.simulation.play(mains, limit)
            except (HangError, DeadlockError) as error:
                stuck = error
            except InvariantError as error:
                problems = error.problems
            finally:
                self.watch.close()
        return self._judge(stuck, problems + forgotten)

    def _judge(self, stuck: BaseException | None, problems: list[str]) -> _Failure | None:
        """Choose what went wrong first: one failure causes others."""
        # Programs raise errors of their own because something is wrong, and errors of aiodist often
        # because another rank has raised one.
        own = [one for one in self._errors if not isinstance(one[1], AiodistError)]
        if own or (self._errors and stuck is None):
            rank, error, self._failed = (own or self._errors)[0]
            place = _place_of(error)
            text = f"rank {rank} ends with {shown_error(error)}{f'  ({place})' if place else ''}"
            return _Failure(f"{type(error).__name__} {place}", text, error)
        if stuck is not None:
            return _Failure(HANG, "the program never ends: see the waits without an end below")
        if problems:
            text = re.sub(r"^\S+/(\S+:\d+: )", r"\1", problems[0])  # a line, without its folder
            return _Failure(_kind_of(text), text)
        if self._check is not None:
            try:
                returned = self._check(self._results)
                if inspect.iscoroutine(returned):  # it would never run
                    returned.close()
                    raise TypeError("it returns a coroutine: write it as a plain function")
            except Exception as error:
                place = _place_of(error)
                text = f"the check of the results raises {shown_error(error)}  ({place})"
                return _Failure(f"check {type(error).__name__} {place}", text, error)
        return None

    def story(self) -> list[str]:
        """Return what happened, one event a line."""
        ranks = {node.name: rank for rank, node in enumerate(self.simulation.nodes)}
        entries = self.simulation.history.entries
        events = merged(self.watch.events, entries, ranks, self._start)
        return told(until(events, self._failed), self._start)

    # ---- one rank ----

    async def _rank(self, rank: int) -> None:
        group: Group | None = None
        try:
            async with self.simulation.connecting(rank) as group:
                await self._meet()
                task = asyncio.current_task()
                assert task is not None
                self.watch.follow(task, rank)
                try:
                    result = await self._program(group)
                except BaseException as error:
                    self._blame(rank, error)  # first, because now the group tells the others
                    raise
                self._results[rank] = result
                self._note(rank, f"returns {shown(result)}")
        except BaseException as error:
            # A rank that loses its membership while it leaves cannot deliver what it has sent.
            if not (rank in self._results and group is not None and group._actor.is_evicted):
                self._blame(rank, error)
            raise

    def _blame(self, rank: int, error: BaseException) -> None:
        """Note that `rank` ends with `error`, unless that is noted already, or the rank was killed
        before."""
        error = _leading(error)
        is_known = any(error is noted for _, noted, _ in self._errors)
        # A GeneratorExit ends a run that hangs.
        is_own = self.simulation.nodes[rank].alive and not isinstance(error, GeneratorExit)
        if is_own and not is_known:
            self._errors.append((rank, error, self.simulation.loop.time()))
            self._note(rank, f"ends with {shown_error(error)}")

    async def _meet(self) -> None:
        """Let all ranks begin at the same time, so that no fault comes before a rank has begun."""
        self._met += 1
        if self._met == self.plan.ranks:
            self._start = self.simulation.loop.time()
            self._all_met.set_result(None)
        await asyncio.shield(self._all_met)

    # ---- faults ----

    def _begun(self, rank: int, number: int) -> None:
        for fault in self.plan.faults:
            if (fault.rank, fault.at) == (rank, number):
                happen = partial(self._happen, fault)
                if fault.after:
                    self.simulation.network.later_by(fault.after, happen)
                else:
                    happen()

    def _happen(self, fault: Planned) -> None:
        simulation = self.simulation
        node, network = simulation.nodes[fault.rank], simulation.network
        if not node.alive:
            return
        self.happened.append(fault)
        others = [one for one in network.nodes.values() if one is not node]
        lasts = f" for {fault.seconds:g} s" if fault.seconds else ""
        who = None if fault.kind == "restart" else fault.rank
        self._note(who, f"FAULT {fault.kind}: {KINDS[fault.kind]}{lasts}")
        if fault.kind == "kill":
            node.kill()
        elif fault.kind == "unplug":
            node.kill("silent")
        elif fault.kind == "cut":
            network.later_by(fault.seconds, network.partition([node], others))
        elif fault.kind == "delay":
            network.later_by(fault.seconds, node.block())
        elif fault.kind == "break":
            for other in others:
                network.break_links(node, other)
        else:
            simulation.restart_coordinator(fault.seconds)

    def _note(self, rank: int | None, text: str) -> None:
        self.watch.events.append(StoryEvent(self.simulation.loop.time(), rank, ("", 0), text))


def _conditions(seed: int) -> Conditions:
    """Return the network of a seed."""
    chooser = random.Random(f"conditions {seed}")
    slow = chooser.choice([1e-3, 1e-3, 0.05])
    return Conditions(delay=(20e-6, slow), loss=chooser.choice([0.0, 0.0, 0.001, 0.01]))


def _name_of(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", repr(function))


def _leading(error: BaseException) -> BaseException:
    """Return the exception of a group, as a TaskGroup raises it, that is most likely to blame."""
    leaves = _leaves(error)
    return next((leaf for leaf in leaves if not isinstance(leaf, AiodistError)), leaves[0])


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for one in error.exceptions for leaf in _leaves(one)]


def _place_of(error: BaseException) -> str:
    """Return the innermost line outside of aiodist and asyncio that an exception came from."""
    own = str(Path(__file__).parents[1]), str(Path(asyncio.__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(own)
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _kind_of(problem: str) -> str:
    """Return what is the same in problems that are alike: no place, no numbers."""
    return re.sub(r"\d+", "#", re.sub(r"^\S+:\d+: ", "", problem))[:40]
