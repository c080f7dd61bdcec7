"""Reductions of large arrays over several hosts: shared memory inside, links between.

Each rank reduces a slice of each block, as in `pull_slices`. The ranks of other hosts leave that to
one of theirs: it reduces what its team has staged, and sends the partial result. So each host
sends, and takes, every unit of its reduced slices once. Source: the hierarchical all-reduce with
all ranks of a host as carriers; Karonis et al., "Exploiting hierarchy in parallel computer
networks to optimize collective operation performance", 2000; Bayatpour et al., "Scalable reduction
collectives with data partitioning-based multi-leader design", 2017.

`lag` rounds lie between a partial result on its way and its arrival, so that the wire is busy while
ranks work. In round n, once its team has published its rounds before, a rank

1. reduces block n of its team for each slice that it is agent of, and sends what is not its own;
2. stages block n + 1;
3. collects the results that its team has shown in the round before;
4. receives the partial results of its own slice of block n - lag, reduces them, sends the result
   to its agents, and shows it to its team;
5. receives the results of block n - 2 lag of the slices that it is agent of, and shows them;
6. publishes.

All works on two buffers: of shared memory, what was written in round n is read in round n + 1 by
ranks that publish it then, and overwritten in round n + 2.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from aiodist.schedules.cuts import Cut, even_bounds, pieces
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
    Reduce,
    Send,
    Span,
    Step,
    X,
)
from aiodist.schedules.pull import joined
from aiodist.schedules.teams import Teams, post

LAG = 2
"""Rounds that partial results and results have to cross, where nothing else is said."""


def all_reduce(rank: int, teams: Teams, length: int, piece: int, lag: int = LAG) -> Plan:
    """Reduce X[0:length] of all ranks, element by element, into OUT[0:length] of all. Mixed.

    A round takes a block of P times `piece` units. X may be OUT; otherwise it is not altered. Every
    unit is reduced by one rank, so results are the same on all: team by team, each in rank order.
    Partial results lie in TMP and travel from there, so TMP may hold a wider type than X and OUT.

    Between H hosts cross 2 (H - 1) times `length` in all, which is the least possible: half of it
    partial results. Shared: two blocks. Scratch: for each other host 2 `lag` + 1 pieces for what
    goes, one less for what comes, and `lag` + 1 of the own slice (`lag` >= 1).
    """
    size = sum(map(len, teams))
    blocks = _blocks(size, length, even_bounds(size * piece, size))
    return _slices("team_slices.all_reduce", rank, teams, blocks, lag, range(size), 0)


def reduce(rank: int, teams: Teams, root: int, length: int, piece: int, lag: int = LAG) -> Plan:
    """Reduce X[0:length] of all ranks, element by element, into OUT[0:length] of `root`. Mixed.

    As `all_reduce`, but only the team of `root` has slices, and `root` alone collects the results.
    At the other ranks OUT is not used. Not all ranks hear from all others.

    Between H hosts cross H - 1 times `length`, which is the least possible.
    """
    team = post(teams, root).team
    bounds = [0]
    for owner in range(sum(map(len, teams))):
        bounds.append(bounds[-1] + piece * (owner in team))
    blocks = _blocks(len(bounds) - 1, length, bounds)
    return _slices("team_slices.reduce", rank, teams, blocks, lag, (root,), 0)


def reduce_scatter(
    rank: int, teams: Teams, bounds: Sequence[int], piece: int, lag: int = LAG
) -> Plan:
    """Reduce slice s of all ranks, element by element, at rank s. Mixed.

    Slice s is X[bounds[s]:bounds[s + 1]] (it may be empty); its reduction goes to OUT[0:bounds[s +
    1] - bounds[s]] of rank s. A round takes `piece` units of each slice. X must not be OUT, and is
    not altered. A rank whose slice is empty hears from nobody.

    Between H hosts cross H - 1 times the length of X, which is the least possible.
    """
    size = sum(map(len, teams))
    cuts = [pieces(bounds[q], bounds[q + 1], piece) for q in range(size)]
    blocks = [
        [cut[k] if k < len(cut) else (bounds[q + 1], bounds[q + 1]) for q, cut in enumerate(cuts)]
        for k in range(max(map(len, cuts)))
    ]
    return _slices("team_slices.reduce_scatter", rank, teams, blocks, lag, (), bounds[rank])


def _blocks(size: int, length: int, shares: Sequence[int]) -> list[list[Cut]]:
    """The slices of each block, by rank. A full block has ``shares[-1]`` units, of which rank q has
    those from ``shares[q]`` on; the last one is cut likewise."""
    blocks: list[list[Cut]] = []
    for start, stop in pieces(0, length, shares[-1]):
        bounds = [start + (stop - start) * share // shares[-1] for share in shares]
        blocks.append([(bounds[q], bounds[q + 1]) for q in range(size)])
    return blocks


def _slices(
    name: str,
    rank: int,
    teams: Teams,
    blocks: Sequence[Sequence[Cut]],
    lag: int,
    readers: Collection[int],
    origin: int,
) -> Plan:
    """The plan in which rank s reduces ``blocks[k][s]``, units of X, of block k.

    `readers` collect all results; where there are none, everyone keeps its own. Results have in OUT
    the place that they have in X, less `origin`.
    """
    if lag < 1:
        raise ValueError(f"a partial result takes at least one round, not {lag}")
    here = post(teams, rank)
    size, team, mates = here.size, here.team, here.mates
    blocks = blocks or [[(0, 0)] * size]
    count = len(blocks)
    width = max(stop - start for block in blocks for start, stop in block)
    hosts = range(len(teams))
    sources = [here.agent(host, rank) for host in here.abroad()]
    away = sorted(set(here.duties(rank)) - {rank}, key=lambda owner: (owner - rank) % size)
    staged = [owner for owner in range(size) if here.agent(here.host, owner) != rank]

    keeps = rank in readers or not readers
    reads = rank in readers
    shows = any(mate in readers for mate in mates)
    # Whose results come here over links, and to whom the own ones go; empty slices do not matter.
    takes = [owner for owner in away if any(mate in readers for mate in team)]
    gives = [
        here.agent(host, rank)
        for host in here.abroad()
        if any(mate in readers for mate in teams[host])
    ]
    crosses = len(readers) == size

    # One grant covers `batch` blocks; see `sliced.reduce_slices`.
    batch = lag
    window = lag + batch
    iterations = count + (lag if crosses else 0)
    finished = count + lag * (1 + crosses)
    rounds = finished + (1 if readers else 0)
    awaited = rounds if readers else count

    outgoing = {owner: at * (window + 1) for at, owner in enumerate(away)}
    base = len(away) * (window + 1)
    incoming = {source: base + at * window for at, source in enumerate(sources)}
    own = base + len(sources) * window
    scratch = (own + lag + 1) * width

    def length(k: int, owner: int) -> int:
        start, stop = blocks[k][owner]
        return stop - start

    def cell(first: int, slots: int, k: int, owner: int) -> Span:
        at = (first + k % slots) * width
        return Span(TMP, at, at + length(k, owner))

    def place(holder: int, k: int, owner: int) -> Span:
        """Where slice `owner` of block k, staged or reduced, lies in the memory of `holder`."""
        at = ((k % 2) * size + owner) * width
        return Span(SHARED + holder, at, at + length(k, owner))

    def result(k: int, owner: int) -> Span:
        start, stop = blocks[k][owner]
        return Span(OUT, start - origin, stop - origin)

    def stage(k: int) -> list[Step]:
        return [Copy(place(rank, k, owner), Span(X, *blocks[k][owner])) for owner in staged]

    def partial(k: int, owner: int, into: Span) -> Reduce:
        """Of the team."""
        operands = tuple(
            Span(X, *blocks[k][owner]) if mate == rank else place(mate, k, owner) for mate in team
        )
        return Reduce(into, operands, final=False)

    def reduce_team(k: int) -> list[Step]:
        steps: list[Step] = []
        for owner in away:
            if length(k, owner):
                going = cell(outgoing[owner], window + 1, k, owner)
                steps += [partial(k, owner, going), Send(owner, (going,))]
        return [*steps, partial(k, rank, cell(own, lag + 1, k, rank))]

    def reduce_hosts(k: int) -> list[Step]:
        if not length(k, rank):
            return []
        coming = {source: cell(incoming[source], window, k, rank) for source in sources}
        steps: list[Step] = [Recv(source, (span,)) for source, span in coming.items()]
        coming[rank] = cell(own, lag + 1, k, rank)
        into = result(k, rank) if keeps else place(rank, k, rank)
        steps.append(Reduce(into, tuple(coming[here.agent(host, rank)] for host in hosts)))
        steps += [Send(target, (into,)) for target in gives]
        if shows and keeps:
            steps.append(Copy(place(rank, k, rank), into))
        return steps

    def take(k: int) -> list[Step]:
        steps: list[Step] = []
        for owner in takes:
            if length(k, owner):
                steps.append(Recv(owner, (result(k, owner),)))
                if shows:
                    steps.append(Copy(place(rank, k, owner), result(k, owner)))
        return steps

    def collect(k: int, crossed: bool) -> list[Step]:
        """The results of block k, of the own team's slices or those that have `crossed`."""
        holders = {owner: here.agent(here.host, owner) for owner in range(size)}
        return [
            Copy(result(k, owner), place(holders[owner], k, owner))
            for owner in range(size)
            if reads and holders[owner] != rank and (owner not in team) is crossed
        ]

    def due(first: int, stop: int, peer: int) -> int:
        """Frames from `peer` for iterations `first` to `stop`: a partial result of each block, and
        the result of the block `lag` before."""
        partials = range(first, min(stop, count)) if peer in sources else ()
        results = range(max(first - lag, 0), min(stop - lag, count)) if peer in takes else ()
        return sum(length(k, rank) > 0 for k in partials) + sum(
            length(k, peer) > 0 for k in results
        )

    peers = list(dict.fromkeys((*sources, *takes)))

    def grants(first: int, stop: int) -> list[Step]:
        return [Grant(peer, frames) for peer in peers if (frames := due(first, stop, peer))]

    steps: list[Step] = [*grants(0, window), *stage(0), Publish()]
    for n in range(rounds):
        if mates and n < awaited:
            steps.append(Await(mates, n + 1))
        if n < count:
            steps += reduce_team(n)
        if n + 1 < count:
            steps += stage(n + 1)
        for behind, crossed in ((1 + lag, False), (1 + 2 * lag, True)):
            if 0 <= n - behind < count:
                steps += collect(n - behind, crossed)
        k = n - lag
        if 0 <= k < count:
            steps += reduce_hosts(k)
        if crosses and 0 <= k - lag < count:
            steps += take(k - lag)
        if 0 <= k < iterations and (k + 1) % batch == 0:
            steps += grants(k + 1 + window - batch, k + 1 + window)
        if n + 1 < awaited:
            steps.append(Publish())
    return Plan(
        name,
        rank,
        size,
        joined(steps),
        eager=False,
        scratch=scratch,
        shared=2 * size * width,
        publishes=awaited,
    )
