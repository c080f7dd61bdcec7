"""Random programs for simulated ranks: what they call, what goes wrong, what must be true.

A `Scenario` is drawn from a seed. Its ranks run the same collectives in their own order, exchange
messages beside, cancel, come late and set deadlines, while `disasters` happen; then they meet again
in the next epoch. Whatever completes is checked; whatever fails must have a cause.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from aiodist.errors import (
    AiodistError,
    CollectiveAbortedError,
    CollectiveTimeoutError,
    CoordinatorLostError,
    GroupClosedError,
    JoinError,
    MismatchError,
    PeerLostError,
)
from aiodist.group import Group
from aiodist.runtime.work import Work
from aiodist.testing.disasters import Disaster, arrange, random_disaster
from aiodist.testing.history import NOT_DUE
from aiodist.testing.mail import Mail, exchange, random_mail
from aiodist.testing.network import Conditions
from aiodist.testing.simulation import Simulation
from aiodist.testing.steps import KINDS, Array, Call, Step

SIZES = (0, 1, 3, 50, 1000, 9000, 40_000)
"""Elements, of 8 bytes."""
NARROW_SIZES = (0, 1, 3, 50, 300, 1000, 6000)
"""Of those whose connections take little at once."""
SENTINEL = -0x5EED
SLACK = 0.05
"""Seconds that an operation may end after its deadline."""
MOST_BUFFERED = 12 << 20
"""Bytes that may wait in a rank for one peer, whatever happens."""
NOTICE = 2.0
"""Seconds that news may take."""
PROMPT = frozenset({"kill", "kill while sending", "kill in an operation", "break links",
                    "raise in an operation"})  # fmt: skip
"""Disasters after which everybody who is alive runs, and is reachable."""
POSSIBLE = (
    CollectiveAbortedError,
    CollectiveTimeoutError,
    CoordinatorLostError,
    GroupClosedError,
    PeerLostError,
)
"""What operations of ranks that call the same may fail with."""
IN_FLIGHT = 12
"""Collectives that a rank has pending at once."""


@dataclass(frozen=True)
class Child:
    """A group made of the first one while that works: by "dup", by "split" with `colors` by rank,
    or as the "subgroup" of the ranks whose color is not None. What it does: `steps` by color."""

    kind: str
    colors: tuple[int | None, ...]
    steps: dict[int, tuple[Step, ...]]


@dataclass(frozen=True)
class Scenario:
    """All that a seed decides. `cancels`: step → the rank that gives it up. `hurries`: step → its
    deadline in seconds. `pauses`: (rank, step) → seconds before the call. `wrongs`: step → the rank
    that calls it with another shape."""

    seed: int | str
    size: int
    conditions: Conditions
    lease: float
    op_timeout: float
    epochs: int
    steps: tuple[Step, ...]
    cancels: dict[int, int]
    hurries: dict[int, float]
    pauses: dict[tuple[int, int], float]
    wrongs: dict[int, int]
    children: tuple[Child, ...]
    mail: Mail
    disasters: tuple[Disaster, ...]

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: {self.size} ranks, {len(self.steps)} collectives and "
            f"{len(self.mail.messages)} messages in each of {self.epochs} epochs",
            f"  {self.conditions}, lease {self.lease:g} s, op_timeout {self.op_timeout:g} s",
            f"  {len(self.cancels)} cancels, {len(self.hurries)} deadlines, {len(self.pauses)} "
            "pauses",
        ]
        return "\n".join([*lines, *(f"  {disaster}" for disaster in self.disasters)])


def scenario(seed: int | str) -> Scenario:
    """What `seed` stands for."""
    chooser = Random(f"scenario {seed}")
    size = chooser.choice([2, 2, 3, 3, 4, 5, 7])
    calls = chooser.choice([5, 20, 60])
    calm = chooser.random() < 0.25
    narrow = chooser.random() < 0.3  # everything takes many small writes
    steps = _random_steps(chooser, range(calls), NARROW_SIZES if narrow else SIZES)

    def some(share: float) -> list[int]:
        return [] if calm else [step.number for step in steps if chooser.random() < share]

    slow = chooser.choice([1e-3, 1e-3, 0.05])
    return Scenario(
        seed=seed,
        size=size,
        conditions=Conditions(
            delay=(20e-6, slow),
            loss=chooser.choice([0.0, 0.0, 0.001, 0.01]),
            room=(300, 5000) if narrow else chooser.choice([(1 << 14, 1 << 18), (1 << 18, 1 << 22)]),
            largest=chooser.choice([1 << 16, 1500, 40]) if calls < 60 else 1 << 16,
        ),
        lease=chooser.choice([2.0, 6.0, 15.0]),
        op_timeout=30.0,
        epochs=chooser.choice([1, 1, 2, 3]),
        steps=steps,
        cancels={number: chooser.randrange(size) for number in some(0.1)},
        hurries={number: chooser.choice([0.001, 0.05, 0.5]) for number in some(0.05)},
        pauses={
            (chooser.randrange(size), number): chooser.choice([0.0005, 0.02, 0.6])
            for number in some(0.2)
        },
        wrongs={
            number: chooser.randrange(size)
            for number in some(0.05)
            if steps[number].kind in ("all_reduce", "scan")
        },
        children=tuple(
            _random_child(chooser, size, 100 + 200 * at)
            for at in range(chooser.choice([0, 0, 1, 2]))
        ),
        mail=random_mail(chooser, size, calm=calm, narrow=narrow),
        disasters=tuple(
            random_disaster(chooser, size, chooser.choice([0.02, 0.5, 5.0]))
            for _ in range(0 if calm else chooser.choice([0, 1, 1, 2, 3]))
        ),
    )


def _random_steps(
    chooser: Random, numbers: Iterable[int], sizes: Sequence[int]
) -> tuple[Step, ...]:
    tags: list[str | int | None] = [None, None, None, "a", 1, "1"]
    return tuple(
        Step(
            number,
            chooser.choice(["all_reduce", "all_reduce", *KINDS]),
            chooser.choice([*tags, f"request {number}"]),
            chooser.choice(sizes[:4] if chooser.random() < 0.7 else sizes),
            chooser.randrange(8),
            chooser.random() < 0.3,
        )
        for number in numbers
    )


def _random_child(chooser: Random, size: int, number: int) -> Child:
    kind = chooser.choice(["dup", "split", "subgroup"])
    colors: tuple[int | None, ...] = (0,) * size
    if kind == "split":
        colors = tuple(chooser.choice([0, 1, None]) for _ in range(size))
    elif kind == "subgroup":
        colors = tuple(chooser.choice([0, 0, None]) for _ in range(size))
    steps = {
        color: _random_steps(chooser, range(number + 100 * color, number + 100 * color + 6), SIZES[:4])
        for color in (0, 1)
    }
    return Child(kind, colors, steps)


class Run:
    """A scenario that is carried out. `problems`: what was wrong with what ranks saw."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.simulation = Simulation(
            scenario.size,
            seed=scenario.seed,
            conditions=scenario.conditions,
            lease=scenario.lease,
            op_timeout=scenario.op_timeout,
            timeout=60.0,
        )
        self.simulation.extra_problems = self.found
        self.problems: list[str] = []
        self.completed = 0
        self.failed = 0
        self.outcomes: list[Any] = []
        self._buffers: list[tuple[Array, str]] = []
        self._members: dict[bytes, tuple[str, ...]] = {}

    def play(self) -> None:
        """Raises HangError, DeadlockError, InvariantError."""
        for disaster in self.scenario.disasters:
            arrange(self.simulation, disaster)
        mains = {rank: self._rank(rank) for rank in range(self.scenario.size)}
        self.outcomes = self.simulation.play(mains)

    def found(self) -> list[str]:
        """What is wrong, at the end."""
        found = [*self.problems, *self._unnoticed()]
        for array, text in self._buffers:
            if not (array == SENTINEL).all():
                found.append(f"memory was written to after the operation had ended: {text}")
        return found

    # ---- one rank ----

    async def _rank(self, rank: int) -> None:
        chooser = Random(f"rank {self.scenario.seed} {rank}")
        for number in range(self.scenario.epochs):
            try:
                # Whoever comes back finds those who have come back, too.
                group = await self.simulation.connecting(
                    rank if number == 0 else None,
                    size=None if number else self.scenario.size,
                    min_size=1 if number else None,
                    max_size=self.scenario.size if number else None,
                    group=f"work {number}",
                )
            except (JoinError, CoordinatorLostError, GroupClosedError) as error:
                if not self.disturbed:
                    self.problems.append(f"rank {rank} cannot join: {error!r}")
                return
            await self._epoch(group, chooser, number)

    async def _epoch(self, group: Group, chooser: Random, number: int) -> None:
        failures: list[BaseException] = []
        for outcome in await asyncio.gather(
            self._program(group, chooser, failures, self.scenario.steps),
            self._children(group, chooser, failures),
            exchange(self, group, failures),
            return_exceptions=True,
        ):
            if isinstance(outcome, BaseException) and not isinstance(outcome, AiodistError):
                self.problems.append(f"{group!r} ended with {outcome!r}")
        if failures and chooser.random() < 0.4:
            group.abort("something failed")
            await group._seat.gone()
            return
        try:
            await self._last_meeting(group, bool(failures))
        finally:
            await group.close()

    async def _last_meeting(self, group: Group, has_failed: bool) -> None:
        """All is over; nothing may be left in the engine."""
        try:
            await group.barrier(tag="last")
        except AiodistError as error:
            self.blame(group, error, "the last barrier", expected=has_failed)
            return
        if self.disturbed or has_failed:
            return
        await asyncio.sleep(5.0)  # credit of messages is returned late
        context = group._context
        left = {
            "operations": context._ops,
            "frames that came early": context._early,
            "verdicts": context._verdicts,
            "bytes nobody wanted": any(context._unsolicited),
            "messages": not context.p2p.idle,
        }
        for what, there in left.items():
            if there and not (what == "verdicts" and self.scenario.cancels):
                self.problems.append(f"{group!r} has {what} left: {there!r}")

    async def _children(
        self, group: Group, chooser: Random, failures: list[BaseException]
    ) -> None:
        for child in self.scenario.children:
            color = child.colors[group.rank]
            try:
                if child.kind == "dup":
                    made = await group.dup()
                elif child.kind == "split":
                    made = await group.split(color)
                elif color is not None:
                    ranks = [rank for rank in range(group.size) if child.colors[rank] is not None]
                    made = await group.subgroup(ranks)
                else:
                    continue
            except AiodistError as error:
                failures.append(error)
                self.blame(group, error, child.kind, expected=False)
                return
            if made is not None and color is not None:
                await self._program(made, chooser, failures, child.steps[color])
                await made.close()

    async def _program(
        self,
        group: Group,
        chooser: Random,
        failures: list[BaseException],
        steps: tuple[Step, ...],
    ) -> None:
        self._members[group._context.id] = tuple(member.host for member in group.members)
        pending: deque[Call] = deque()
        scenario = self.scenario
        for step in _order(steps, chooser):
            pause = scenario.pauses.get((group.rank, step.number))
            if pause is not None:
                await asyncio.sleep(pause)
            try:
                wrong = scenario.wrongs.get(step.number) == group.rank and group.size > 1
                call = Call(group, step, scenario.hurries.get(step.number), wrong)
            except AiodistError as error:
                self.blame(group, error, str(step), expected=False)
                failures.append(error)
                break
            timeout = scenario.hurries.get(step.number, scenario.op_timeout)
            self.simulation.history.expect(call.work, timeout + SLACK)
            pending.append(call)
            self._look(group)
            if scenario.cancels.get(step.number) == group.rank:
                await _for_a_while(chooser)
                if call.work.cancel():
                    self._poison(call)
            if len(pending) >= IN_FLIGHT:
                await self._settle(pending.popleft(), failures)
        while pending:
            await self._settle(pending.popleft(), failures)

    async def _settle(self, call: Call, failures: list[BaseException]) -> None:
        step, group = call.step, call.group
        try:
            result = await call.work
        except asyncio.CancelledError:
            if self.scenario.cancels.get(step.number) != group.rank:
                raise
        except AiodistError as error:
            self._poison(call)
            self.failed += 1
            may = self._may_fail(step, group, error)
            if isinstance(error, CollectiveTimeoutError) and not may and self._is_prompt:
                self.problems.append(f"{group!r}: a loss was not noticed by {step}: {error!r}")
            if self.blame(group, error, str(step), may):
                failures.append(error)
        else:
            self.completed += 1
            wrong = call.wrong(result)
            if wrong:
                self.problems.append(wrong)
            if self._is_wrong(step, group):
                self.problems.append(f"{group!r}: {step} was done, though ranks called it apart")
            self._poison(call)

    def _is_wrong(self, step: Step, group: Group) -> bool:
        """Whether the ranks call it with different shapes."""
        return self.scenario.wrongs.get(step.number, group.size) < group.size > 1

    def _may_fail(self, step: Step, group: Group, error: AiodistError) -> bool:
        number = step.number
        if isinstance(error, CollectiveTimeoutError):
            return number in self.scenario.hurries
        if isinstance(error, MismatchError):
            return self._is_wrong(step, group)
        return isinstance(error, CollectiveAbortedError) and number in self.scenario.cancels

    # ---- what is looked at ----

    @property
    def disturbed(self) -> bool:
        """Whether anything happened by which a rank may seem lost."""
        return bool(self.scenario.disasters)

    def blame(self, group: Group, error: BaseException, what: str, expected: bool) -> bool:
        """Note an error that has no cause. Returns whether somebody is lost by it."""
        # While a rank is stopped or cut off, all operations may take too long, or be given up.
        possible = isinstance(error, POSSIBLE) or type(error) is AiodistError  # an injected one
        if not expected and not (possible and self.disturbed):
            self.problems.append(f"{group!r}: {what} failed without a cause: {error!r}")
        return isinstance(error, (PeerLostError, GroupClosedError)) or not expected

    @property
    def _is_prompt(self) -> bool:
        """Whether everybody hears of all that happens, soon."""
        return all(disaster.kind in PROMPT for disaster in self.scenario.disasters)

    def _unnoticed(self) -> list[str]:
        """Operations that went on for longer than the lease of a member that was dead."""
        if not self._is_prompt:
            return []
        found = []
        deaths = {node.host: node.died for node in self.simulation.nodes if not node.alive}
        for entry in self.simulation.history.entries:
            members = self._members.get(entry.scope.id, ())
            if entry.process in deaths or entry.ended is None or entry.op in NOT_DUE:
                continue
            for host, died in deaths.items():
                noticed = max(entry.started, died) + self.scenario.lease + NOTICE
                if host in members and entry.ended > noticed:
                    found.append(f"the death of {host} at {died:.6f} s was not noticed by {entry}")
        return found

    def _poison(self, call: Call) -> None:
        """The operation is over: its memory is ours again, and stays as it is."""
        for buffer in call.buffers():
            self.watch(buffer, f"{call.group!r} {call.step}")

    def watch(self, buffer: Array, text: str) -> None:
        """`buffer` must not be written to from now on."""
        buffer.fill(SENTINEL)
        self._buffers.append((buffer, text))

    def expect(self, work: Work[Any], timeout: float) -> None:
        if timeout != math.inf:
            self.simulation.history.expect(work, timeout + SLACK)

    def _look(self, group: Group) -> None:
        """Memory is bounded, whatever the others do."""
        for rank in range(group.size):
            link = group._context.link(rank) if rank != group.rank else None
            if link is not None and link.backlog > MOST_BUFFERED:
                self.problems.append(f"{group!r} keeps {link.backlog} bytes for rank {rank}")


def _order(steps: tuple[Step, ...], chooser: Random) -> list[Step]:
    """The order of one rank: that of the program within a tag, another one across tags."""
    by_tag: dict[Any, deque[Step]] = defaultdict(deque)
    for step in steps:
        by_tag[type(step.tag), step.tag].append(step)
    shuffled = sorted(steps, key=lambda step: step.number + chooser.uniform(0, IN_FLIGHT / 3))
    return [by_tag[type(step.tag), step.tag].popleft() for step in shuffled]


async def _for_a_while(chooser: Random) -> None:
    """Some turns of the loop, or some time."""
    if chooser.random() < 0.5:
        for _ in range(chooser.randrange(4)):
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(chooser.choice([1e-5, 3e-4, 0.002, 0.005, 0.01, 0.03]))
