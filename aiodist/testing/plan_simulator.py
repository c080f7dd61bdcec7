"""Runs the plans of all ranks against each other, with symbolic data, and checks them.

The order of steps does not depend on timing, because a plan has no receive from any source. The
simulator does two things. It executes all steps in an order that the caller chooses, and moves
symbolic data as early or as late as that order says. And it stamps every step with a vector clock,
from which `find_race` tells, for all possible timings at once, whether two accesses to the same
memory can meet.

The simulator checks:

- Frames pair up, with equal lengths, none over the segment; there are as many grants as sends.
- Spans lie within their buffers; X is never written; scratch is read only after it was written.
- There is no deadlock; a final result is not reduced again; no accesses race.
- Ranks that share memory write only their own, publish equally often, and await no more than that.
- Without frames, no rank comes to its end before all have published.

The caller has to check whether the results are right: see `contributors`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

from aiodist.schedules.plan import (
    OUT,
    SHARED,
    TMP,
    Await,
    Copy,
    Grant,
    Plan,
    Publish,
    Recv,
    Send,
    Span,
    X,
)
from aiodist.schedules.teams import Teams
from aiodist.testing.plan_checks import PlanError, check, locate, read, slots, written
from aiodist.testing.plan_races import Clock, Event, find_race

__all__ = [
    "Order",
    "PlanError",
    "Reduced",
    "SimulationResult",
    "Unit",
    "Value",
    "contributors",
    "simulate",
]

Order = Callable[[int], int]
"""Given the number n > 0 of possible events, the index of the next one. Steps of ranks stand before
arrivals of frames: always 0 makes frames arrive as late as possible, always n - 1 at once."""


class Unit(NamedTuple):
    """What stood in one unit of X or OUT at the start."""

    rank: int
    buffer: int
    at: int


class Reduced(NamedTuple):
    """What a Reduce made of one unit."""

    operands: tuple[Value, ...]
    final: bool


Value = Unit | Reduced


class SimulationResult(NamedTuple):
    """What a simulation returns; all by rank, except `rounds`."""

    out: tuple[tuple[Value, ...], ...]
    """OUT at the end."""
    frames: tuple[int, ...]
    """Frames sent."""
    units: tuple[int, ...]
    """Units sent."""
    grants: tuple[int, ...]
    """Grants sent."""
    rounds: int
    """The longest chain of frames in which each is sent after the one before has come. Of ranks
    that share memory, it is a chain of publications, each after the one before was awaited."""


def contributors(value: Value) -> tuple[Unit, ...]:
    """The units that went into `value`, in the order of the operands."""
    if isinstance(value, Unit):
        return (value,)
    return tuple(unit for operand in value.operands for unit in contributors(operand))


def simulate(
    plans: Sequence[Plan],
    *,
    inputs: Sequence[int],
    outputs: Sequence[int],
    in_place: Collection[int] = (),
    segment: int | None = None,
    order: Order = lambda choices: 0,
    teams: Teams | None = None,
) -> SimulationResult:
    """Run ``plans[rank]`` of all ranks, and return the outcome.

    `inputs` and `outputs`: units of X and of OUT, by rank. `in_place`: the ranks at which both are
    the same memory. `segment`: the most units of a frame. `teams`: the ranks of each host; None:
    all are on one. Raises PlanError if a plan is wrong.
    """
    check(plans, inputs, outputs, in_place, segment, teams or (tuple(range(len(plans))),))
    ranks = [
        _Rank(plan, inputs[rank], outputs[rank], rank in in_place)
        for rank, plan in enumerate(plans)
    ]
    links = {(a, b): _Link(ranks[a], ranks[b]) for a, b in permutations(range(len(plans)), 2)}
    moving: list[_Link] = []
    trace: list[Event] = []
    for rank in ranks:
        rank.ranks, rank.links, rank.moving, rank.trace = ranks, links, moving, trace
        rank.memory += [other.shared for other in ranks]
        rank.look()
    while choices := [rank.advance for rank in ranks if rank.ready] + [m.arrive for m in moving]:
        choices[order(len(choices))]()
    _judge(plans, ranks, links, trace, in_place)
    sends = [[step for step in plan.steps if isinstance(step, Send)] for plan in plans]
    return SimulationResult(
        out=tuple(tuple(rank.memory[OUT][:n]) for rank, n in zip(ranks, outputs, strict=True)),
        frames=tuple(map(len, sends)),
        units=tuple(sum(span.length for s in steps for span in s.spans) for steps in sends),
        grants=tuple(sum(isinstance(step, Grant) for step in plan.steps) for plan in plans),
        rounds=max(rank.depth for rank in ranks),
    )


def _judge(
    plans: Sequence[Plan],
    ranks: Sequence[_Rank],
    links: Mapping[tuple[int, int], _Link],
    trace: Sequence[Event],
    in_place: Collection[int],
) -> None:
    """Raise PlanError for errors that the run has shown. The cause comes before its consequences:
    data that are wrong because of a race are reported as that race."""
    stuck = [locate(rank.plan, rank.at) for rank in ranks if rank.at < len(rank.plan.steps)]
    if stuck:
        raise PlanError("deadlock: " + "; ".join(stuck))
    ends: dict[Event, Event] = {}
    starts: dict[Event, Sequence[Event]] = {}
    for (a, b), link in links.items():
        for slot, (send, recv) in enumerate(zip(link.sends, link.recvs, strict=True)):
            ends[a, send] = (b, recv)
            # A frame that comes before its grant is kept aside until then.
            grants = [(b, clock[b] - 1) for clock in link.granted[slot : slot + 1]]
            starts[b, recv] = ((a, send), *grants)
    race = find_race(plans, trace, [rank.clocks for rank in ranks], ends, starts, in_place)
    lone = None if ends else _lone_end(ranks)
    for problem in (race, *(rank.problem for rank in ranks), lone):
        if problem is not None:
            raise PlanError(problem)


def _lone_end(ranks: Sequence[_Rank]) -> str | None:
    """A message about a rank that may come to its end before another has published anything, or
    None."""
    for rank, other in permutations(ranks, 2):
        if other.published and rank.clock[other.plan.rank] < other.published[0][0][other.plan.rank]:
            return (
                f"rank {rank.plan.rank} may come to its end before rank {other.plan.rank} has "
                "published anything"
            )
    return None


class _Rank:
    """One rank: its memory, how far it is, and what has happened before."""

    def __init__(self, plan: Plan, inputs: int, outputs: int, same: bool) -> None:
        self.plan = plan
        self.ranks: Sequence[_Rank] = ()  # All ranks; `simulate` sets it before anything runs.
        # The links from one rank to another; `simulate` sets it, too.
        self.links: Mapping[tuple[int, int], _Link] = {}
        self.moving: list[_Link] = []
        """The links of all ranks that have frames under way."""
        self.trace: list[Event] = []
        """The steps of all ranks, in the order in which they were done."""
        # Indices of these steps, by peer.
        self.sends, self.recvs = slots(plan, Send), slots(plan, Recv)
        self.at = 0  # The index of the next step.
        self.ready = False  # Whether the next step can be done now, see `look`.
        # How many steps of each rank have happened before, including those of this one.
        self.clock = [0] * plan.size
        self.clocks: list[Clock] = []  # What `clock` was after each step.
        self.published: list[tuple[Clock, int]] = []
        """For each Publish its clock, and how many events had to come before, including itself."""
        self.depth = 0
        """Frames, or publications that were awaited, in the longest chain so far."""
        self.problem: str | None = None
        """The first wrong use of data."""
        lengths = (max(inputs, outputs) if same else inputs, outputs, plan.scratch)
        # By buffer: X, OUT, TMP, then the shared memory of every rank, which `simulate` adds.
        self.memory: list[list[Value]] = [
            [Unit(plan.rank, buffer, at) for at in range(length)]
            for buffer, length in enumerate(lengths)
        ]
        if same:
            # In place both are one list, so that what is written to one is read in the other.
            self.memory[OUT] = self.memory[X]
        shared = SHARED + plan.rank
        # What this rank shows; it is part of every rank's `memory`.
        self.shared: list[Value] = [Unit(plan.rank, shared, at) for at in range(plan.shared)]

    def read(self, spans: Iterable[Span], at: int) -> list[Value]:
        """The values that step `at` reads."""
        values = [v for span in spans for v in self.memory[span.buffer][span.start : span.stop]]
        if any(isinstance(value, Unit) and value.buffer >= TMP for value in values):
            self.problem = self.problem or f"{locate(self.plan, at)} reads what was not written"
        return values

    def write(self, spans: Iterable[Span], values: Sequence[Value]) -> None:
        done = 0
        for span in spans:
            self.memory[span.buffer][span.start : span.stop] = values[done : done + span.length]
            done += span.length

    def look(self) -> None:
        """Set `ready`: whether the next step can be done now."""
        match self.plan.steps[self.at] if self.at < len(self.plan.steps) else None:
            case Send(peer):
                link = self.links[self.plan.rank, peer]
                self.ready = self.plan.eager or len(link.sent) < len(link.granted)
            case Recv(peer):
                link = self.links[peer, self.plan.rank]
                self.ready = link.received < link.arrived
            case Await(peers, count):
                self.ready = all(len(self.ranks[peer].published) >= count for peer in peers)
            case step:
                self.ready = step is not None

    def advance(self) -> None:
        """Do the next step."""
        rank, step = self.plan.rank, self.plan.steps[self.at]
        self.at += 1
        self.clock[rank] = self.at
        match step:
            case Send(peer):
                link = self.links[rank, peer]
                if not self.plan.eager and len(link.sent) >= self.plan.pushes:
                    # The frame had to wait for the grant that allowed it. So what the peer did
                    # before that grant, such as to read what was in that memory, has happened for
                    # this rank.
                    self._learn(link.granted[len(link.sent)])
                # No frame of this link was under way before, so the link is not in `moving` yet.
                if link.arrived == len(link.sent):
                    self.moving.append(link)
                # The frame carries the clock of the Send. So its receiver knows only what had
                # happened by then.
                link.sent.append((tuple(self.clock), self.depth + 1))
            case Recv(peer):
                link = self.links[peer, rank]
                clock, depth = link.sent[link.received]
                self._learn(clock)
                self.depth = max(self.depth, depth)
                link.received += 1
            case Grant(peer, count):
                link = self.links[peer, rank]
                link.granted += [tuple(self.clock)] * count
                link.source.look()
            case Publish():
                self.published.append((tuple(self.clock), self.depth + 1))
                for other in self.ranks:
                    other.look()
            case Await(peers, count):
                for peer in peers:
                    clock, depth = self.ranks[peer].published[count - 1]
                    self._learn(clock)
                    self.depth = max(self.depth, depth)
            case Copy(into, source):
                self.write((into,), self.read((source,), self.at - 1))
            case _:
                into, operands, final = step
                columns = zip(*(self.read((o,), self.at - 1) for o in operands), strict=True)
                values = [Reduced(column, final) for column in columns]
                if any(isinstance(v, Reduced) and v.final for row in values for v in row.operands):
                    problem = f"{locate(self.plan, self.at - 1)} reduces what was reduced finally"
                    self.problem = self.problem or problem
                self.write((into,), values)
        self.clocks.append(tuple(self.clock))
        self.trace.append((rank, self.at - 1))
        self.look()

    def _learn(self, clock: Clock) -> None:
        self.clock = list(map(max, self.clock, clock))


class _Link:
    """The frames from one rank to another."""

    def __init__(self, source: _Rank, target: _Rank) -> None:
        self.source = source
        self.target = target
        # Indices of the steps that send, at the source.
        self.sends = source.sends.get(target.plan.rank, [])
        # Indices of the steps that receive, at the target.
        self.recvs = target.recvs.get(source.plan.rank, [])
        self.granted: list[Clock] = []
        """For each frame granted, the clock of its Grant."""
        self.sent: list[tuple[Clock, int]] = []
        """For each frame sent, the clock of its Send, and how many frames had to come before,
        including itself."""
        self.arrived = 0  # How many frames are written at the target.
        self.received = 0  # For how many of them the Recv is done.

    def arrive(self) -> None:
        """Read the oldest frame under way at the source and write it at the target."""
        send, recv = self.sends[self.arrived], self.recvs[self.arrived]
        values = self.source.read(read(self.source.plan.steps[send]), send)
        self.target.write(written(self.target.plan.steps[recv]), values)
        self.arrived += 1
        if self.arrived == len(self.sent):
            self.source.moving.remove(self)
        self.target.look()
