"""Runs scenarios: simulated ranks run random programs, and what they see is checked.

The ranks run the same collectives in their own order and exchange messages beside (`mailing`). They
cancel, come late, set deadlines, and replace arrays, while `disasters` happen. Then they meet again
in the next epoch (`voting`). Results are checked, and failures must have a cause (`judge`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from random import Random
from typing import Any

import numpy as np

from aiodist.errors import (
    AiodistError,
    CollectiveAbortedError,
    CollectiveTimeoutError,
    CoordinatorLostError,
    GroupClosedError,
    JoinError,
    MismatchError,
)
from aiodist.group import Group
from aiodist.testing.disasters import arrange
from aiodist.testing.judge import Judge
from aiodist.testing.mailing import exchange
from aiodist.testing.scenario import Scenario
from aiodist.testing.simulation import Simulation
from aiodist.testing.steps import Step, StepCall
from aiodist.testing.voting import Voting

IN_FLIGHT = 12
"""How many collectives a rank has pending at once."""


class Run:
    """One run of a scenario."""

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
        self.judge = Judge(scenario, self.simulation)
        self._problems = self.judge.problems
        self.completed = 0  # operations that gave a result
        self.failed = 0  # operations that raised
        self.outcomes: list[Any] = []  # the outcome of each rank's main function
        self._voting = Voting(self.judge)  # how ranks go on after a loss
        self._drops = Random(f"drops {scenario.seed}")  # decides whose memory is dropped

    def play(self) -> None:
        """Raises HangError, DeadlockError, InvariantError."""
        for disaster in self.scenario.disasters:
            arrange(self.simulation, disaster)
        mains = {rank: self._rank(rank) for rank in range(self.scenario.size)}
        self.outcomes = self.simulation.play(mains)

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
                    # Ranks that come back meet the others that have come back.
                    first = name == "work 0"
                    group = await self.simulation.connecting(
                        rank if number == 0 else None,
                        size=self.scenario.size if first else None,
                        min_size=None if first else 1,
                        max_size=None if first else self.scenario.size,
                        group=name,
                    )
            except (JoinError, CoordinatorLostError, GroupClosedError) as error:
                if not self.judge.disturbed:
                    self._problems.append(f"rank {rank} cannot join: {error!r}")
                return
            assert group is not None
            self._voting.see(group)
            # What a rank does in an epoch depends on the number of the epoch. So it is the same on
            # all ranks, even on one that has missed the first epochs.
            at = first_number + group.epoch - 1
            move = self.scenario.moves[at] if at + 1 < self.scenario.epochs else "leave"
            group = await self._epoch(group, chooser, move)
            if move == "leave":
                name = ""
            number = max(number, at) + 1

    async def _epoch(self, group: Group, chooser: Random, move: str) -> Group | None:
        """Work, and go on by `move`. Returns the next group, or None if this rank has left."""
        failures: list[BaseException] = []
        for outcome in await asyncio.gather(
            self._program(group, chooser, failures, self.scenario.steps),
            self._children(group, chooser, failures),
            exchange(self.judge, group, failures),
            return_exceptions=True,
        ):
            if isinstance(outcome, BaseException) and not isinstance(outcome, AiodistError):
                self._problems.append(f"{group!r} ended with {outcome!r}")
        if failures and chooser.random() < 0.4:
            group.abort("something failed")
            await group._actor.gone()
            return None
        if move != "leave":
            return await self._voting.go_on(group, move, bool(failures), chooser)
        try:
            await self._last_meeting(group, bool(failures))
        finally:
            await group.close()
        return None

    async def _last_meeting(self, group: Group, has_failed: bool) -> None:
        """Check that the engine keeps nothing when all is over."""
        try:
            await group.barrier(tag="last")
        except AiodistError as error:
            self.judge.blame(group, error, "the last barrier", expected=has_failed)
            return
        if self.judge.disturbed or has_failed:
            return
        # Everything that an engine keeps for others has to be gone when nothing is under way. No
        # other check would find a leak of one entry an operation, because each run has only some
        # hundred.
        await asyncio.sleep(5.0)  # because credit of messages is returned late
        context = group._context
        left = {
            "operations": context.calls.ops,
            "frames that came early": context.calls.arrivals.early,
            "verdicts": context.calls.arrivals.verdicts,
            "bytes without a receiver": any(context.calls._unsolicited),
            "messages": not context.p2p.idle,
        }
        for what, there in left.items():
            if there and not (what == "verdicts" and self.scenario.cancels):
                self._problems.append(f"{group!r} has {what} left: {there!r}")

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
                self.judge.blame(group, error, child.kind, expected=False)
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
        self.judge.meet(group)
        pending: deque[StepCall] = deque()
        scenario = self.scenario
        for step in _order(steps, chooser):
            pause = scenario.pauses.get((group.rank, step.number))
            if pause is not None:
                await asyncio.sleep(pause)
            try:
                wrong = scenario.wrongs.get(step.number) == group.rank and group.size > 1
                call = StepCall(group, step, scenario.hurries.get(step.number), wrong)
            except AiodistError as error:
                self.judge.blame(group, error, str(step), expected=False)
                failures.append(error)
                break
            timeout = scenario.hurries.get(step.number, scenario.op_timeout)
            self.judge.expect(call.work, timeout)
            pending.append(call)
            self.judge.look(group)
            if scenario.cancels.get(step.number) == group.rank:
                await _for_a_while(chooser)
                if call.work.cancel():
                    self._poison(call)
            if len(pending) >= IN_FLIGHT:
                await self._settle(pending.popleft(), failures)
        while pending:
            await self._settle(pending.popleft(), failures)

    async def _settle(self, call: StepCall, failures: list[BaseException]) -> None:
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
            if isinstance(error, CollectiveTimeoutError) and not may and self.judge.is_prompt:
                self._problems.append(f"{group!r}: a loss was not noticed by {step}: {error!r}")
            if self.judge.blame(group, error, str(step), may):
                failures.append(error)
        else:
            self.completed += 1
            wrong = call.wrong(result)
            if wrong:
                self._problems.append(wrong)
            if self._is_wrong(step, group):
                self._problems.append(f"{group!r}: {step} was done, though ranks called it apart")
            del result, call.work  # because these would keep the memory that may be dropped
            self._poison(call)

    def _is_wrong(self, step: Step, group: Group) -> bool:
        """Tell whether the ranks call it with different shapes."""
        return self.scenario.wrongs.get(step.number, group.size) < group.size > 1

    def _may_fail(self, step: Step, group: Group, error: AiodistError) -> bool:
        number = step.number
        if isinstance(error, CollectiveTimeoutError):
            return number in self.scenario.hurries
        if isinstance(error, MismatchError):
            return self._is_wrong(step, group)
        return isinstance(error, CollectiveAbortedError) and number in self.scenario.cancels

    def _poison(self, call: StepCall) -> None:
        """Check that the memory of an operation that is over stays as it is.

        Half of it is dropped at once and replaced by arrays of the same sizes, which mostly get the
        same addresses.
        """
        buffers = call.buffers()
        if self._drops.random() < 0.5:
            sizes = [*map(len, buffers)]
            call.drop()
            buffers.clear()
            buffers = [np.empty(size, np.int64) for size in sizes]
        for buffer in buffers:
            self.judge.watch(buffer, f"{call.group!r} {call.step}")


def _order(steps: tuple[Step, ...], chooser: Random) -> list[Step]:
    """Return the steps in the order of one rank: that of the program within a tag, but not across
    tags."""
    by_tag: dict[Any, deque[Step]] = defaultdict(deque)
    for step in steps:
        by_tag[type(step.tag), step.tag].append(step)
    shuffled = sorted(steps, key=lambda step: step.number + chooser.uniform(0, IN_FLIGHT / 3))
    return [by_tag[type(step.tag), step.tag].popleft() for step in shuffled]


async def _for_a_while(chooser: Random) -> None:
    """Wait for some turns of the loop, or some time."""
    if chooser.random() < 0.5:
        for _ in range(chooser.randrange(4)):
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(chooser.choice([1e-5, 3e-4, 0.002, 0.005, 0.01, 0.03]))
