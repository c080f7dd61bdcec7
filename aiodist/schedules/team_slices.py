"""Reductions of large arrays over several hosts: shared memory inside, links between.

Each rank reduces a slice of each block, as in `pull_slices`. On every other host one rank is its
agent: it reduces what its team has staged of the slice, and sends the partial result. So each host
sends, and receives, every unit of its reduced slices once.

Source: the hierarchical all-reduce with all ranks of a host as carriers. Karonis et al.,
"Exploiting hierarchy in parallel computer networks to optimize collective operation performance",
2000. Bayatpour et al., "Scalable reduction collectives with data partitioning-based multi-leader
design", 2017.

A partial result has `lag` rounds to arrive, so that the wire is busy while ranks work. In round n,
once its team has published its earlier rounds, a rank

1. reduces block n of its team for each slice that it is agent of, and sends what is not its own;
2. stages block n + 1;
3. collects the results that its team has shown in the round before;
4. receives the partial results of its own slice of block n - lag, reduces them, sends the result
   to its agents, and shows it to its team;
5. receives the results of block n - 2 lag of the slices that it is agent of, and shows them;
6. publishes.

Two buffers of shared memory are enough. What is written in round n is read in round n + 1, by ranks
that publish that round afterwards, and overwritten in round n + 2.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import lcm

from aiodist.schedules.cuts import Cut, Series, blocks_of, rounds_of
from aiodist.schedules.plan import (
    OUT,
    SHARED,
    TMP,
    UNLIMITED,
    Await,
    Copy,
    Grant,
    Plan,
    Publish,
    Recv,
    Reduce,
    Send,
    Span,
    Step,
    X,
)
from aiodist.schedules.pull import joined
from aiodist.schedules.script import Script
from aiodist.schedules.teams import Teams, TeamView, most_duties, team_view

LAG = 2
"""The default number of rounds for partial results and results to arrive."""


def all_reduce(rank: int, teams: Teams, length: int, piece: int, lag: int = LAG) -> Plan:
    """Reduce X[0:length] of all ranks, element by element, into OUT[0:length] of all. Mixed.

    A round takes a block of P times `piece` units. X may be OUT; otherwise it is not altered.
    Results are the same on all ranks, because every unit is reduced by one rank: team by team, each
    in rank order. TMP may hold a wider type than X and OUT, because partial results lie in TMP and
    are sent from there.

    Between H hosts cross 2 (H - 1) times `length` in all, which is the least possible: half of it
    partial results. Shared: two blocks. Scratch: for each other host 2 `lag` + 1 pieces to send,
    one less to receive, and `lag` + 1 of the own slice (`lag` >= 1).
    """
    size = sum(map(len, teams))
    blocks = _blocks(length, range(0, (size + 1) * piece, piece))
    return _slices("team_slices.all_reduce", rank, teams, blocks, lag, range(size), 0)


def reduce(rank: int, teams: Teams, root: int, length: int, piece: int, lag: int = LAG) -> Plan:
    """Reduce X[0:length] of all ranks, element by element, into OUT[0:length] of `root`. Mixed.

    This is `all_reduce`, but only the team of `root` has slices, and `root` alone collects the
    results. At the other ranks OUT is not used. Ranks may complete before all have entered.

    Between H hosts cross H - 1 times `length`, which is the least possible.
    """
    team = team_view(teams, root).team
    bounds = [0]
    for owner in range(sum(map(len, teams))):
        bounds.append(bounds[-1] + piece * (owner in team))
    blocks = _blocks(length, bounds)
    return _slices("team_slices.reduce", rank, teams, blocks, lag, (root,), 0)


def reduce_scatter(
    rank: int, teams: Teams, bounds: Sequence[int], piece: int, lag: int = LAG
) -> Plan:
    """Reduce slice s of all ranks, element by element, at rank s. Mixed.

    Slice s is X[bounds[s]:bounds[s + 1]] (it may be empty); its reduction goes to OUT[0:bounds[s +
    1] - bounds[s]] of rank s. A round takes `piece` units of each slice. X must not be OUT, and is
    not altered. A rank with an empty slice may complete before all have entered.

    Between H hosts cross H - 1 times the length of X, which is the least possible.
    """
    blocks = rounds_of(bounds, piece)
    return _slices("team_slices.reduce_scatter", rank, teams, blocks, lag, (), bounds[rank])


def places(teams: Teams, lag: int = LAG) -> int:
    """Pieces that have a place in scratch at the rank that needs most."""
    return (most_duties(teams) - 1) * (2 * lag + 1) + (len(teams) - 1) * 2 * lag + lag + 1


def _blocks(length: int, shares: Sequence[int]) -> Series[list[Cut]]:
    """The slices of all blocks. A full block has ``shares[-1]`` units, and the slice of rank q
    begins at ``shares[q]``; the last block is cut in proportion."""
    block = shares[-1]
    return blocks_of(length, block, lambda units: [units * share // block for share in shares])


def _slices(
    name: str,
    rank: int,
    teams: Teams,
    blocks: Series[list[Cut]],
    lag: int,
    readers: Collection[int],
    origin: int,
) -> Plan:
    """The plan in which rank s reduces ``blocks[k][s]``, units of X, of block k.

    `readers` collect all results; without readers every rank keeps its own. Results have the place
    in OUT that they have in X, less `origin`.
    """
    if lag < 1:
        raise ValueError(f"a partial result takes at least one round, not {lag}")
    here = team_view(teams, rank)
    places = _Places(here, blocks or Series(1, lambda k: [(0, 0)] * here.size), lag, origin)
    program = _Program(here, places, lag, readers)
    return Plan(
        name,
        rank,
        here.size,
        program.script().steps(joined),
        eager=False,
        scratch=places.scratch,
        shared=2 * here.size * places.width,
        publishes=program.awaited,
        # If results come back, these say that the partial results have arrived.
        pushes=UNLIMITED if len(readers) == here.size else 2 * lag,
    )


class _Places:
    """The places of slices while they are reduced: in X and OUT, in scratch, and in shared
    memory."""

    def __init__(self, here: TeamView, blocks: Series[list[Cut]], lag: int, origin: int) -> None:
        self.rank, self.size = here.rank, here.size
        self.blocks = blocks
        self.width = max(stop - start for start, stop in blocks[0])
        # The agents of this rank on other hosts, and the other ranks that it is agent of.
        self.sources = [here.agent(host, here.rank) for host in here.abroad()]
        others = {*here.duties(here.rank)} - {here.rank}
        self.away = sorted(others, key=lambda owner: (owner - here.rank) % here.size)
        self._origin = origin
        # Scratch holds rings of cells: for partial results to send, for those to receive, and for
        # the own.
        window = 2 * lag
        self._going, self._coming, self._own = window + 1, window, lag + 1
        # After so many blocks all cells, and both buffers, are used as before.
        self.period = lcm(self._going, self._coming, self._own, 2)
        self._first_coming = len(self.away) * self._going
        self._first_own = self._first_coming + len(self.sources) * self._coming
        self.scratch = (self._first_own + self._own) * self.width

    def length(self, k: int, owner: int) -> int:
        start, stop = self.blocks[k][owner]
        return stop - start

    def given(self, k: int, owner: int) -> Span:
        """Slice `owner` of block k in X."""
        return Span(X, *self.blocks[k][owner])

    def result(self, k: int, owner: int) -> Span:
        """Slice `owner` of block k in OUT."""
        start, stop = self.blocks[k][owner]
        return Span(OUT, start - self._origin, stop - self._origin)

    def shown(self, holder: int, k: int, owner: int) -> Span:
        """The place of slice `owner` of block k, staged or reduced, in the memory of `holder`."""
        at = ((k % 2) * self.size + owner) * self.width
        return Span(SHARED + holder, at, at + self.length(k, owner))

    def going(self, k: int, owner: int) -> Span:
        """The partial result of this team for `owner`."""
        return self._cell(self.away.index(owner) * self._going, self._going, k, owner)

    def coming(self, k: int, source: int) -> Span:
        """The partial result that `source` sends for the own slice."""
        first = self._first_coming + self.sources.index(source) * self._coming
        return self._cell(first, self._coming, k, self.rank)

    def own(self, k: int) -> Span:
        """The partial result of this team for the own slice."""
        return self._cell(self._first_own, self._own, k, self.rank)

    def _cell(self, first: int, cells: int, k: int, owner: int) -> Span:
        at = (first + k % cells) * self.width
        return Span(TMP, at, at + self.length(k, owner))


class _Program:
    """The steps of one rank, round by round, as the module says."""

    def __init__(self, here: TeamView, places: _Places, lag: int, readers: Collection[int]) -> None:
        self._here, self._places, self._lag = here, places, lag
        rank, size, team = here.rank, here.size, here.team
        self._staged = [owner for owner in range(size) if here.agent(here.host, owner) != rank]
        self._reads = rank in readers
        self._keeps = self._reads or not readers
        self._shows = any(mate in readers for mate in here.mates)
        # The ranks whose results come over links, and those that receive the own results. Empty
        # slices make no difference.
        self._takes = [owner for owner in places.away if any(mate in readers for mate in team)]
        self._gives = [
            here.agent(host, rank)
            for host in here.abroad()
            if any(mate in readers for mate in here.teams[host])
        ]
        self._crosses = len(readers) == size
        count = len(places.blocks)
        finished = count + lag * (1 + self._crosses)
        self._rounds = finished + (1 if readers else 0)
        self.awaited = self._rounds if readers else count

    def script(self) -> Script:
        count, lag = len(self._places.blocks), self._lag
        # One grant covers `batch` blocks; see `sliced.reduce_slices`.
        batch, window = lag, 2 * lag
        iterations = count + (lag if self._crosses else 0)

        def turn(n: int) -> list[Step]:
            steps: list[Step] = []
            if self._here.mates and n < self.awaited:
                steps.append(Await(self._here.mates, n + 1))
            if n < count:
                steps += self._reduce_team(n)
            if n + 1 < count:
                steps += self._stage(n + 1)
            for behind, crossed in ((1 + lag, False), (1 + 2 * lag, True)):
                if 0 <= n - behind < count:
                    steps += self._collect(n - behind, crossed)
            k = n - lag
            if 0 <= k < count:
                steps += self._reduce_hosts(k)
            if self._crosses and 0 <= k - lag < count:
                steps += self._take(k - lag)
            if 0 <= k < iterations and (k + 1) % batch == 0:
                steps += self._grants(k + 1 + window - batch, k + 1 + window)
            if n + 1 < self.awaited:
                steps.append(Publish())
            return steps

        script = Script([*self._grants(0, window), *self._stage(0), Publish()])
        edges = self._places.blocks.edges
        script.repeat(self._rounds, turn, edges, 2 * lag + 3, self._places.period)
        return script

    def _stage(self, k: int) -> list[Step]:
        """Show the team the slices that others of it reduce."""
        rank, places = self._here.rank, self._places
        return [Copy(places.shown(rank, k, o), places.given(k, o)) for o in self._staged]

    def _reduce_team(self, k: int) -> list[Step]:
        """Reduce what the team has staged of each slice that this rank is agent of."""
        steps: list[Step] = []
        for owner in self._places.away:
            if self._places.length(k, owner):
                going = self._places.going(k, owner)
                steps += [self._partial(k, owner, going), Send(owner, (going,))]
        return [*steps, self._partial(k, self._here.rank, self._places.own(k))]

    def _partial(self, k: int, owner: int, into: Span) -> Reduce:
        rank, places = self._here.rank, self._places
        operands = [
            places.given(k, owner) if mate == rank else places.shown(mate, k, owner)
            for mate in self._here.team
        ]
        return Reduce(into, tuple(operands), final=False)

    def _reduce_hosts(self, k: int) -> list[Step]:
        """Reduce the partial results of all hosts for the own slice, and pass on the result."""
        here, places, rank = self._here, self._places, self._here.rank
        if not places.length(k, rank):
            return []
        partials = {source: places.coming(k, source) for source in places.sources}
        steps: list[Step] = [Recv(source, (span,)) for source, span in partials.items()]
        partials[rank] = places.own(k)
        into = places.result(k, rank) if self._keeps else places.shown(rank, k, rank)
        agents = [here.agent(host, rank) for host in range(len(here.teams))]
        steps.append(Reduce(into, tuple(partials[agent] for agent in agents)))
        steps += [Send(target, (into,)) for target in self._gives]
        if self._shows and self._keeps:
            steps.append(Copy(places.shown(rank, k, rank), into))
        return steps

    def _take(self, k: int) -> list[Step]:
        """Receive the results of slices that this rank is agent of, and show them to the team."""
        places = self._places
        steps: list[Step] = []
        for owner in self._takes:
            if places.length(k, owner):
                result = places.result(k, owner)
                steps.append(Recv(owner, (result,)))
                if self._shows:
                    steps.append(Copy(places.shown(self._here.rank, k, owner), result))
        return steps

    def _collect(self, k: int, crossed: bool) -> list[Step]:
        """The results of block k: of the own team's slices, or of those that have `crossed`."""
        here, places = self._here, self._places
        holders = {owner: here.agent(here.host, owner) for owner in range(here.size)}
        return [
            Copy(places.result(k, owner), places.shown(holder, k, owner))
            for owner, holder in holders.items()
            if self._reads and holder != here.rank and (owner not in here.team) is crossed
        ]

    def _grants(self, first: int, stop: int) -> list[Step]:
        """The grants for iterations `first` to `stop`: for partial results of each block, and for
        the results of the block `lag` before."""
        count, lag = len(self._places.blocks), self._lag
        due: dict[int, int] = {}
        for source in self._places.sources:
            blocks = range(first, min(stop, count))
            due[source] = sum(self._places.length(k, self._here.rank) > 0 for k in blocks)
        for owner in self._takes:
            blocks = range(max(first - lag, 0), min(stop - lag, count))
            found = sum(self._places.length(k, owner) > 0 for k in blocks)
            due[owner] = due.get(owner, 0) + found
        return [Grant(peer, frames) for peer, frames in due.items() if frames]
