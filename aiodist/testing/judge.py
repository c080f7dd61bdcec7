"""What may happen in a run of a scenario, and what ranks saw that must not happen.

Ranks report here what they see: errors, memory that must stay as it is, durations. The scenario
decides whether an error has a cause. If ranks were stopped, cut off or killed, everything they do
may fail, and so may everything that needs them. If nothing like that has happened, nothing may
fail. No more can be asked of errors in a random program, because the network decides which of two
operations hears of a death first. So runs are not compared with each other. Results must be right,
or missing.
"""

from __future__ import annotations

import math
from typing import Any

from aiodist.errors import (
    AiodistError,
    CollectiveAbortedError,
    CollectiveTimeoutError,
    CoordinatorLostError,
    GroupClosedError,
    GroupRevokedError,
    PeerLostError,
)
from aiodist.group import Group
from aiodist.testing.history import NOT_DUE
from aiodist.testing.scenario import Scenario
from aiodist.testing.simulation import Simulation
from aiodist.testing.steps import Array
from aiodist.work import SENDS, Work

SENTINEL = -0x5EED
SLACK = 0.05
"""Seconds that an operation may end after its deadline."""
MOST_BUFFERED = 12 << 20
"""Bytes that may wait in a rank for one peer, in any case."""
NOTICE = 2.0
"""Seconds that news may take."""
PROMPT = frozenset({"kill", "kill while sending", "kill in an operation", "break links",
                    "raise in an operation"})  # fmt: skip
"""Disasters after which all living ranks run and can be reached."""
POSSIBLE = (
    CollectiveAbortedError,
    CollectiveTimeoutError,
    CoordinatorLostError,
    GroupClosedError,
    GroupRevokedError,
    PeerLostError,
)
"""Errors that operations may raise if all ranks call the same."""


class Judge:
    """What was seen in one run. `problems`: what was wrong in it."""

    def __init__(self, scenario: Scenario, simulation: Simulation) -> None:
        self.scenario = scenario
        self.simulation = simulation
        simulation.extra_problems = self.found
        self.problems: list[str] = []
        # Arrays that were given back, and must not be written any more.
        self._buffers: list[tuple[Array, str]] = []
        self._members: dict[bytes, tuple[str, ...]] = {}  # the hosts of each context, by rank

    def meet(self, group: Group) -> None:
        """Note that ranks are going to work in this group."""
        self._members[group._context.id] = tuple(member.host for member in group.members)

    def found(self) -> list[str]:
        """Return what is wrong, at the end."""
        found = [*self.problems, *self._unnoticed()]
        for array, text in self._buffers:
            if not (array == SENTINEL).all():
                found.append(f"memory was written to after the operation had ended: {text}")
        return found

    @property
    def disturbed(self) -> bool:
        """Whether anything happened that may make a rank seem lost."""
        # Ranks must not notice a coordinator that comes back with its state file, nor a link that
        # breaks once.
        harmless = {"break links"}
        if self.scenario.durable:
            harmless.add("restart the coordinator")
        kinds = [disaster.kind for disaster in self.scenario.disasters]
        return not harmless.issuperset(kinds) or kinds.count("break links") > 1

    def blame(self, group: Group, error: BaseException, what: str, expected: bool) -> bool:
        """Note an error without a cause. Returns whether a rank is lost by it."""
        # While a rank is stopped or cut off, all operations may take too long, or be given up.
        possible = isinstance(error, POSSIBLE) or type(error) is AiodistError  # an injected one
        if not expected and not (possible and self.disturbed):
            self.problems.append(f"{group!r}: {what} failed without a cause: {error!r}")
        return isinstance(error, (PeerLostError, GroupClosedError)) or not expected

    @property
    def is_prompt(self) -> bool:
        """Whether all ranks soon hear of everything that happens."""
        return all(disaster.kind in PROMPT for disaster in self.scenario.disasters)

    def _unnoticed(self) -> list[str]:
        """Return operations that went on for longer than the lease of a dead member."""
        if not self.is_prompt:
            return []
        found = []
        deaths = {node.host: node.died for node in self.simulation.nodes if not node.alive}
        for entry in self.simulation.history.entries:
            members = self._members.get(entry.scope.id, ())
            if entry.process in deaths or entry.ended is None or entry.end != "failed":
                continue
            # the history does not have the receiver of a send
            if entry.op in NOT_DUE or entry.op in SENDS:
                continue
            for host, died in deaths.items():
                noticed = max(entry.started, died) + self.scenario.lease + NOTICE
                if host in members and entry.ended > noticed:
                    found.append(f"the death of {host} at {died:.6f} s was not noticed by {entry}")
        return found

    def watch(self, buffer: Array, text: str) -> None:
        """Check that `buffer` is not written from now on."""
        buffer.fill(SENTINEL)
        self._buffers.append((buffer, text))

    def expect(self, work: Work[Any], timeout: float) -> None:
        if timeout != math.inf:
            self.simulation.history.expect(work, timeout + SLACK)

    def look(self, group: Group) -> None:
        """Check that memory is bounded, whatever the others do."""
        for rank in range(group.size):
            link = group._context.link(rank) if rank != group.rank else None
            if link is not None and link.backlog > MOST_BUFFERED:
                self.problems.append(f"{group!r} keeps {link.backlog} bytes for rank {rank}")
