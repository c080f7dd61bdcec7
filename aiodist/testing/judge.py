"""What may happen in a run of a scenario, and what was seen that must not.

Ranks say here what they see: errors, memory that must stay as it is, how long things may take.
Whether an error has a cause is a question to the scenario. Where ranks were stopped, cut off or
killed, whatever they do may fail, and so may whatever needs them; where nothing of that kind has
happened, nothing may. That is all that can be asked of errors in a random program: which of two
operations hears of a death first is up to the network, so no run is compared with what another one
did. Results are asked more of: they are right, or there are none.
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


class Judge:
    """What was seen in one run. `problems`: what was wrong with what ranks saw."""

    def __init__(self, scenario: Scenario, simulation: Simulation) -> None:
        self.scenario = scenario
        self.simulation = simulation
        simulation.extra_problems = self.found
        self.problems: list[str] = []
        # Arrays that were given back, and must not be written to any more.
        self._buffers: list[tuple[Array, str]] = []
        self._members: dict[bytes, tuple[str, ...]] = {}  # the hosts of each context, by rank

    def meet(self, group: Group) -> None:
        """Ranks are going to work in this group."""
        self._members[group._context.id] = tuple(member.host for member in group.members)

    def found(self) -> list[str]:
        """What is wrong, at the end."""
        found = [*self.problems, *self._unnoticed()]
        for array, text in self._buffers:
            if not (array == SENTINEL).all():
                found.append(f"memory was written to after the operation had ended: {text}")
        return found

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
    def is_prompt(self) -> bool:
        """Whether everybody hears of all that happens, soon."""
        return all(disaster.kind in PROMPT for disaster in self.scenario.disasters)

    def _unnoticed(self) -> list[str]:
        """Operations that went on for longer than the lease of a member that was dead."""
        if not self.is_prompt:
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

    def watch(self, buffer: Array, text: str) -> None:
        """`buffer` must not be written to from now on."""
        buffer.fill(SENTINEL)
        self._buffers.append((buffer, text))

    def expect(self, work: Work[Any], timeout: float) -> None:
        if timeout != math.inf:
            self.simulation.history.expect(work, timeout + SLACK)

    def look(self, group: Group) -> None:
        """Memory is bounded, whatever the others do."""
        for rank in range(group.size):
            link = group._context.link(rank) if rank != group.rank else None
            if link is not None and link.backlog > MOST_BUFFERED:
                self.problems.append(f"{group!r} keeps {link.backlog} bytes for rank {rank}")
