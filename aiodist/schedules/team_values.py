"""Moving large values over several hosts: what crosses does so once, and is then shared.

Every rank of a team carries another part. Source: Karonis et al., "Exploiting hierarchy in parallel
computer networks to optimize collective operation performance", 2000, with all ranks as carriers;
between hosts a pipelined chain (broadcast) and direct exchange (all-gather).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from aiodist.schedules.cuts import even_bounds, pieces
from aiodist.schedules.plan import (
    OUT,
    SHARED,
    Await,
    Copy,
    Grant,
    Plan,
    Publish,
    Recv,
    Send,
    Span,
    Step,
    X,
)
from aiodist.schedules.pull import joined
from aiodist.schedules.teams import Teams, post

LAG = 2
"""Rounds that pieces have to cross, where nothing else is said."""


def broadcast(rank: int, teams: Teams, root: int, length: int, piece: int) -> Plan:
    """Copy X[0:length] of `root` to OUT[0:length] of the others. Mixed.

    At `root` OUT is not used; elsewhere X is not. A round takes a block of `piece` units for each
    carrier: the ranks at the first places of each team, as many as the smallest team has. Blocks go
    from host to host, beginning with that of `root`. Not all ranks hear from all others.

    Between H hosts cross H - 1 times `length`, which is the least possible. Shared: two blocks.
    """
    here = post(teams, rank)
    hosts = len(teams)
    carriers = min(map(len, teams))
    cuts = pieces(0, length, piece * carriers)
    width = cuts[0][1] if cuts else 0
    place = here.team.index(rank)
    hops = (here.host - post(teams, root).host) % hosts
    source = X if rank == root else OUT

    def mine(k: int) -> tuple[int, int]:
        """What this rank carries of block k."""
        start, stop = cuts[k]
        bounds = even_bounds(stop - start, carriers)
        return (start + bounds[place], start + bounds[place + 1]) if place < carriers else (0, 0)

    def shown(holder: int, k: int, start: int, stop: int) -> Span:
        at = (k % 2) * width - cuts[k][0]
        return Span(SHARED + holder, at + start, at + stop)

    def forward(k: int) -> list[Step]:
        start, stop = mine(k)
        if start == stop or hops + 1 == hosts:
            return []
        return [Send(teams[(here.host + 1) % hosts][place], (Span(source, start, stop),))]

    def receive(k: int) -> list[Step]:
        start, stop = mine(k)
        if start == stop:
            return []
        return [Recv(teams[here.host - 1][place], (Span(OUT, start, stop),))]

    def show(k: int) -> list[Step]:
        start, stop = cuts[k] if rank == root else mine(k)
        return [Copy(shown(rank, k, start, stop), Span(source, start, stop))] if here.mates else []

    def collect(k: int) -> list[Step]:
        """What the mates carry of block k."""
        start, stop = cuts[k]
        bounds = [start + at for at in even_bounds(stop - start, carriers)]
        return [
            Copy(Span(OUT, a, b), shown(holder, k, a, b))
            for holder, a, b in zip(here.team[:carriers], bounds, bounds[1:], strict=False)
            if holder != rank
        ]

    def wait(count: int) -> list[Step]:
        return [Await(here.mates, count)] if here.mates and count > 0 else []

    steps: list[Step] = []
    rounds = range(len(cuts))
    if rank == root:
        # The n-th Publish of others says that n blocks are read.
        for k in rounds:
            steps += [*wait(k - 1), *show(k), Publish(), *forward(k)]
    elif not hops:
        for k in rounds:
            taken = Copy(Span(OUT, *cuts[k]), shown(root, k, *cuts[k]))
            steps += [Await((root,), k + 1), taken, Publish(), *forward(k)]
    else:
        frames = sum(a < b for a, b in map(mine, rounds))
        steps += [Grant(teams[here.host - 1][place], frames)] if frames else []
        for k in rounds:
            steps += [*receive(k), *forward(k), *wait(k)]
            steps += [*(collect(k - 1) if k else ()), *show(k), Publish()]
        if cuts:
            steps += [*wait(len(cuts)), *collect(len(cuts) - 1)]
    return Plan(
        "team_values.broadcast",
        rank,
        here.size,
        joined(steps),
        eager=False,
        shared=2 * width,
        publishes=len(cuts),
    )


def all_gather(rank: int, teams: Teams, lengths: Sequence[int], piece: int, lag: int = LAG) -> Plan:
    """Copy X[0:lengths[q]] of every rank q to all others. Mixed.

    OUT holds what comes from the other ranks, in rank order, without gaps and without the own part.
    X must not be OUT. In a round each rank sends a piece to its agent on each other host, and shows
    its team that piece, and those that came from other hosts for it. A rank hears from those whose
    parts are not empty.

    Between H hosts each part crosses H - 1 times, which is the least possible. Shared: two pieces
    for each part that a rank shows.
    """
    here = post(teams, rank)
    cuts = [pieces(0, length, piece) for length in lengths]
    starts = tuple(accumulate((0 if q == rank else n for q, n in enumerate(lengths)), initial=0))
    width = min(piece, max(lengths))
    slots = max(len(here.duties(q)) for q in range(here.size))
    count = max(map(len, cuts))
    agents = [here.agent(host, rank) for host in here.abroad()]
    away = sorted(set(here.duties(rank)) - {rank}, key=lambda owner: (owner - rank) % here.size)

    def part(owner: int, k: int) -> Span:
        """Where piece k of `owner` comes from or goes to, here."""
        start, stop = cuts[owner][k]
        at = 0 if owner == rank else starts[owner]
        return Span(X if owner == rank else OUT, at + start, at + stop)

    def shown(holder: int, owner: int, k: int) -> Span:
        at = ((k % 2) * slots + here.duties(holder).index(owner)) * width
        start, stop = cuts[owner][k]
        return Span(SHARED + holder, at, at + stop - start)

    def show(owner: int, k: int) -> list[Step]:
        return [Copy(shown(rank, owner, k), part(owner, k))] if here.mates else []

    def collect(k: int, crossed: bool) -> list[Step]:
        """What mates have shown of piece k: their own, or what has `crossed`."""
        return [
            Copy(part(owner, k), shown(mate, owner, k))
            for mate in here.mates
            for owner in here.duties(mate)
            if 0 <= k < len(cuts[owner]) and (owner != mate) is crossed
        ]

    steps: list[Step] = [Grant(owner, len(cuts[owner])) for owner in away if cuts[owner]]
    rounds = count + lag + 1
    for n in range(rounds):
        if n and here.mates:
            steps.append(Await(here.mates, n))
        if n < len(cuts[rank]):
            steps += [Send(agent, (part(rank, n),)) for agent in agents]
            steps += show(rank, n)
        steps += [*collect(n - 1, False), *collect(n - 1 - lag, True)]
        for owner in away:
            if 0 <= n - lag < len(cuts[owner]):
                steps += [Recv(owner, (part(owner, n - lag),)), *show(owner, n - lag)]
        if n + 1 < rounds:
            steps.append(Publish())
    return Plan(
        "team_values.all_gather",
        rank,
        here.size,
        joined(steps),
        eager=False,
        shared=2 * slots * width,
        publishes=rounds - 1,
    )
