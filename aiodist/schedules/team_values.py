"""Moving large values over several hosts: what crosses does so once, and is then shared.

Every rank of a team carries another part.

Source: Karonis et al., "Exploiting hierarchy in parallel computer networks to optimize collective
operation performance", 2000, with all ranks as carriers; between hosts a pipelined chain
(broadcast) and direct exchange (all-gather).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from aiodist.schedules.cuts import Cut, even_bounds, pieces
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
from aiodist.schedules.script import Script
from aiodist.schedules.teams import Teams, TeamView, most_duties, team_view

LAG = 2
"""The default number of rounds for pieces to arrive."""


def broadcast(rank: int, teams: Teams, root: int, length: int, piece: int) -> Plan:
    """Copy X[0:length] of `root` to OUT[0:length] of the others. Mixed.

    At `root` OUT is not used; elsewhere X is not. A round takes a block of `piece` units for each
    carrier. Carriers are the ranks at the first places of each team, as many as the smallest team
    has. Blocks go from host to host, beginning with that of `root`. Ranks may complete before all
    have entered.

    Between H hosts cross H - 1 times `length`, which is the least possible. Shared: two blocks.
    """
    program = _Broadcast(team_view(teams, rank), team_view(teams, root), length, piece)
    if rank == root:
        script = program.begin()
    elif program.hops:
        script = program.pass_on()
    else:
        script = program.follow()
    return Plan(
        "team_values.broadcast",
        rank,
        program.here.size,
        script.steps(joined),
        eager=False,
        shared=2 * program.width,
        publishes=len(program.cuts),
    )


class _Broadcast:
    """The steps of one rank in a broadcast."""

    def __init__(self, here: TeamView, root: TeamView, length: int, piece: int) -> None:
        hosts = len(here.teams)
        self.here, self._root = here, root.rank
        self._carriers = min(map(len, here.teams))
        self.cuts = pieces(0, length, piece * self._carriers)
        self.width = self.cuts[0][1] if self.cuts else 0
        self._place = here.team.index(here.rank)
        # How many hosts from the root's host to this one.
        self.hops = (here.host - root.host) % hosts
        self._before = here.teams[here.host - 1]
        self._after = here.teams[(here.host + 1) % hosts] if self.hops + 1 < hosts else None
        self._source = X if here.rank == root.rank else OUT

    def begin(self) -> Script:
        """The steps of the root. The n-th Publish of others says that n blocks are read."""
        return self._for_each_block(
            lambda k: [*self._wait(k - 1), *self._show(k), Publish(), *self._forward(k)]
        )

    def follow(self) -> Script:
        """The steps of other ranks on the host of the root."""

        def turn(k: int) -> list[Step]:
            cut = self.cuts[k]
            taken = Copy(Span(OUT, *cut), self._shown(self._root, k, *cut))
            return [Await((self._root,), k + 1), taken, Publish(), *self._forward(k)]

        return self._for_each_block(turn)

    def pass_on(self) -> Script:
        """The steps of ranks on the other hosts."""
        count = len(self.cuts)

        def turn(k: int) -> list[Step]:
            steps = [*self._receive(k), *self._forward(k), *self._wait(k)]
            return [*steps, *(self._collect(k - 1) if k else ()), *self._show(k), Publish()]

        script = Script()
        # Of each block before the last one this rank carries as much as of the first.
        frames = (count - 1) * self._carries(0) + self._carries(count - 1) if count else 0
        if frames:
            script.append(Grant(self._before[self._place], frames))
        script += self._for_each_block(turn)
        if count:
            script += [*self._wait(count), *self._collect(count - 1)]
        return script

    def _for_each_block(self, turn: Callable[[int], list[Step]]) -> Script:
        script = Script()
        script.repeat(len(self.cuts), turn, margin=2, period=2)
        return script

    def _carries(self, k: int) -> bool:
        """Whether this rank carries anything of block k."""
        start, stop = self._mine(k)
        return start < stop

    def _mine(self, k: int) -> Cut:
        """The units of block k that this rank carries."""
        start, stop = self.cuts[k]
        at, bounds = self._place, even_bounds(stop - start, self._carriers)
        return (start + bounds[at], start + bounds[at + 1]) if at < self._carriers else (0, 0)

    def _shown(self, holder: int, k: int, start: int, stop: int) -> Span:
        at = (k % 2) * self.width - self.cuts[k][0]
        return Span(SHARED + holder, at + start, at + stop)

    def _forward(self, k: int) -> list[Step]:
        start, stop = self._mine(k)
        if start == stop or self._after is None:
            return []
        return [Send(self._after[self._place], (Span(self._source, start, stop),))]

    def _receive(self, k: int) -> list[Step]:
        start, stop = self._mine(k)
        return [Recv(self._before[self._place], (Span(OUT, start, stop),))] if start < stop else []

    def _show(self, k: int) -> list[Step]:
        rank = self.here.rank
        cut = self.cuts[k] if rank == self._root else self._mine(k)
        return (
            [Copy(self._shown(rank, k, *cut), Span(self._source, *cut))] if self.here.mates else []
        )

    def _collect(self, k: int) -> list[Step]:
        """Take the units of block k that the mates carry."""
        start, stop = self.cuts[k]
        bounds = [start + at for at in even_bounds(stop - start, self._carriers)]
        return [
            Copy(Span(OUT, a, b), self._shown(holder, k, a, b))
            for holder, (a, b) in zip(self.here.team, pairwise(bounds), strict=False)
            if holder != self.here.rank
        ]

    def _wait(self, count: int) -> list[Step]:
        return [Await(self.here.mates, count)] if self.here.mates and count > 0 else []


def all_gather(rank: int, teams: Teams, lengths: Sequence[int], piece: int, lag: int = LAG) -> Plan:
    """Copy X[0:lengths[q]] of every rank q to all others. Mixed.

    OUT receives the parts of the other ranks, in rank order, without gaps and without the own part.
    X must not be OUT. In a round each rank sends a piece to its agent on each other host. It shows
    its team that piece, and the pieces that it has received as an agent. A rank cannot complete
    before those ranks have entered whose parts are not empty.

    Between H hosts each part crosses H - 1 times, which is the least possible. Shared: two pieces
    for each part that a rank shows.
    """
    here = team_view(teams, rank)
    cuts = [pieces(0, length, piece) for length in lengths]
    starts = tuple(accumulate((0 if q == rank else n for q, n in enumerate(lengths)), initial=0))
    width = min(piece, max(lengths))
    slots = most_duties(teams)
    count = max(map(len, cuts))
    agents = [here.agent(host, rank) for host in here.abroad()]
    away = sorted(set(here.duties(rank)) - {rank}, key=lambda owner: (owner - rank) % here.size)

    def part(owner: int, k: int) -> Span:
        """The place of piece k of `owner` here: in X if `owner` is this rank, else in OUT."""
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
        """Take piece k of the parts that mates have shown: their own, or those that have
        `crossed`."""
        return [
            Copy(part(owner, k), shown(mate, owner, k))
            for mate in here.mates
            for owner in here.duties(mate)
            if 0 <= k < len(cuts[owner]) and (owner != mate) is crossed
        ]

    rounds = count + lag + 1

    def turn(n: int) -> list[Step]:
        steps: list[Step] = []
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
        return steps

    script = Script(Grant(owner, len(cuts[owner])) for owner in away if cuts[owner])
    script.repeat(rounds, turn, map(len, cuts), lag + 3, 2)
    return Plan(
        "team_values.all_gather",
        rank,
        here.size,
        script.steps(joined),
        eager=False,
        shared=2 * slots * width,
        publishes=rounds - 1,
    )
