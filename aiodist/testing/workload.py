"""Scenarios carried out: simulated ranks run random programs, and what they see is checked.

The ranks run the same collectives in their own order, exchange
messages beside, cancel, come late and set deadlines, while `disasters` happen; then they meet again
in the next epoch. Whatever completes is checked; whatever fails must have a cause.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict, deque
from random import Random
from typing import Any

from aiodist.errors import (
    AiodistError,
    CollectiveAbortedError,
    CollectiveTimeoutError,
    CoordinatorLostError,
    GroupClosedError,
    GroupRevokedError,
    JoinError,
    MismatchError,
    PeerLostError,
)
from aiodist.group import Group
from aiodist.testing.disasters import arrange
from aiodist.testing.history import NOT_DUE
from aiodist.testing.mail import exchange
from aiodist.testing.scenario import Scenario
from aiodist.testing.simulation import Simulation
from aiodist.testing.steps import Array, Call, Step
from aiodist.testing.voting import Voting
from aiodist.work import Work

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
    GroupRevokedError,
    PeerLostError,
)
"""What operations of ranks that call the same may fail with."""
IN_FLIGHT = 12
"""Collectives that a rank has pending at once."""


class Run:
    """A scenario that is carried out. `problems`: what was wrong with what ranks saw."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.simulation = Simulation(
            scenario.size,
            seed=scenario.seed,
            durable=scenario.durable,
            conditions=scenario.conditions,
            lease=scenario.lease,
            op_timeout=scenario.op_timeout,
            timeout=60.0,
        )
        self.simulation.extra_problems = self.found
        self.problems: list[str] = []
        self.completed = 0  # operations that gave a result
        self.failed = 0  # operations that raised
        self.outcomes: list[Any] = []  # what the main function of each rank came to
        # Arrays that were given back, and must not be written to any more.
        self._buffers: list[tuple[Array, str]] = []
        self._members: dict[bytes, tuple[str, ...]] = {}  # the hosts of each context, by rank
        self.voting = Voting(self)  # how ranks go on after a loss

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
        group: Group | None = None
        name = ""
        number = first_number = 0
        while number < self.scenario.epochs:
            try:
                if group is None:
                    if not name:
                        name, first_number = f"work {number}", number
                    # Whoever comes back finds those who have come back, too.
                    first = name == "work 0"
                    group = await self.simulation.connecting(
                        rank if number == 0 else None,
                        size=self.scenario.size if first else None,
                        min_size=None if first else 1,
                        max_size=None if first else self.scenario.size,
                        group=name,
                    )
            except (JoinError, CoordinatorLostError, GroupClosedError) as error:
                if not self.disturbed:
                    self.problems.append(f"rank {rank} cannot join: {error!r}")
                return
            assert group is not None
            self.voting.see(group)
            # The same on all ranks, also on one that has missed the first epochs.
            at = first_number + group.epoch - 1
            move = self.scenario.moves[at] if at + 1 < self.scenario.epochs else "leave"
            group = await self._epoch(group, chooser, move)
            if move == "leave":
                name = ""
            number = max(number, at) + 1

    async def _epoch(self, group: Group, chooser: Random, move: str) -> Group | None:
        """Work, and go on by `move`: the next group, or None where this rank has left."""
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
            await group._actor.gone()
            return None
        if move != "leave":
            return await self.voting.go_on(group, move, bool(failures), chooser)
        try:
            await self._last_meeting(group, bool(failures))
        finally:
            await group.close()
        return None

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
            "operations": context.ops,
            "frames that came early": context.arrivals.early,
            "verdicts": context.arrivals.verdicts,
            "bytes nobody wanted": any(context._unsolicited),
            "messages": not context.p2p.idle,
        }
        for what, there in left.items():
            if there and not (what == "verdicts" and self.scenario.cancels):
                self.problems.append(f"{group!r} has {what} left: {there!r}")

    async def _children(self, group: Group, chooser: Random, failures: list[BaseException]) -> None:
        for child in self.scenario.children:
            color = child.colors[group.rank]
            made: Group | None
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
        # A coordinator that comes back with its state file is not to be noticed, nor is a link that
        # breaks once.
        harmless = {"break links"}
        if self.scenario.durable:
            harmless.add("restart the coordinator")
        kinds = [disaster.kind for disaster in self.scenario.disasters]
        return not harmless.issuperset(kinds) or kinds.count("break links") > 1

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
            if entry.process in deaths or entry.ended is None or entry.end != "failed":
                continue
            if entry.op in NOT_DUE or entry.op == "send":  # to whom, the history does not say
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
