"""Small values over several hosts: every team shows its values to its leader, the leaders exchange
them, and each leader shows its team the result.

Source: Karonis et al., "Exploiting hierarchy in parallel computer networks to optimize collective
operation performance", 2000. The leaders use the plans for small values of one host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aiodist.schedules import dissemination, recursive_doubling, tree
from aiodist.schedules.plan import (
    OUT,
    SHARED,
    TMP,
    Await,
    Copy,
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
from aiodist.schedules.teams import Teams, TeamView, team_view


def share(rank: int, teams: Teams, by_hub: bool = False, root: int | None = None) -> Plan:
    """Gather one blob a rank on every rank. Mixed, eager.

    Units are blobs, of any lengths: OUT[0:P]. The own blob stands in OUT[rank] before; X is not
    used. With empty blobs it is a barrier, because no rank completes before all have entered.

    Each host receives the blobs of all others once, which is the least possible, in ceil(log2 H)
    frames of each leader (`dissemination.all_gather`). `by_hub`: see `_share_by_hub`. Shared: P.
    """
    here = team_view(teams, rank)
    leader = here.team[0]
    if by_hub:
        return _share_by_hub(here, root)
    if rank != leader:
        steps = [_show(here), Publish(), Await((leader,), 1), _take_all(here)]
        return _plan("team_whole.share", here, steps, shared=here.size)
    among_leaders = dissemination.all_gather(here.host, len(teams))

    def blobs(span: Span) -> tuple[Span, ...]:
        return tuple(
            each for host in range(span.start, span.stop) for each in _blobs_of(here, host)
        )

    steps = _collect(here)
    steps += _between(among_leaders.steps, [team[0] for team in teams], blobs)
    if here.mates:
        steps.append(_show_all(here))
    return _plan("team_whole.share", here, [*steps, Publish()], shared=here.size)


def _share_by_hub(here: TeamView, root: int | None) -> Plan:
    """Share by way of the first rank, in the fewest frames of all together (see `star`).

    Every host gets all blobs back, even its own. Only the host of `root`, whose blob is the large
    one, does not get its own. The last rank of a team sends the team's blobs to the hub, and its
    first rank receives all blobs. So each of them waits for one thing only, and is not woken to
    pass on what another has shown.
    """
    teams, rank, hub = here.teams, here.rank, here.teams[0][0]
    home = None if root is None else team_view(teams, root).host
    leader = here.team[0]

    def speaker(host: int) -> int:
        return teams[host][0 if host == home else -1]

    def shown_to(host: int) -> tuple[Span, ...]:
        hosts = (each for each in range(len(teams)) if not each == host == home)
        return tuple(span for each in hosts for span in _blobs_of(here, each))

    own, others = here.host, range(1, len(teams))
    up: list[Step] = [Send(hub, _blobs_of(here, own))]
    down: list[Step] = [Recv(hub, shown_to(own))]
    if rank == hub:
        steps = _collect(here)
        steps += [Recv(speaker(host), _blobs_of(here, host)) for host in others]
        steps += [Send(teams[host][0], shown_to(host)) for host in others]
    elif rank == leader == speaker(own):
        steps = [*_collect(here), *up, *down]
    elif rank == leader:
        steps = [_show(here), Publish(), *down]
    else:
        steps = [_show(here), Publish()]
        if own and rank == speaker(own):
            steps += [*_collect(here), *up]
        steps += [Await((leader,), 2), _take_all(here)]
    if rank == leader and here.mates:
        steps.append(_show_all(here))
    # All ranks publish twice. The mates of a leader await its second Publish, which it makes when
    # it shows all blobs.
    said = sum(isinstance(step, Publish) for step in steps)
    steps = [*steps, Publish()] if said else [Publish(), *steps, Publish()]
    return _plan("team_whole.share", here, steps, shared=here.size, publishes=2)


def _blobs_of(here: TeamView, host: int) -> tuple[Span, ...]:
    return tuple(Span(OUT, owner, owner + 1) for owner in here.teams[host])


def _show(here: TeamView) -> Step:
    """Show the own blob."""
    own = Span(OUT, here.rank, here.rank + 1)
    return Copy(_at(here.rank, own), own)


def _collect(here: TeamView) -> list[Step]:
    """Take the blobs that the others of the team show."""
    steps: list[Step] = [Await(here.mates, 1)] if here.mates else []
    own = [Span(OUT, mate, mate + 1) for mate in here.mates]
    return [*steps, *(Copy(blob, _at(blob.start, blob)) for blob in own)]


def _show_all(here: TeamView) -> Step:
    every = Span(OUT, 0, here.size)
    return Copy(_at(here.rank, every), every)


def _take_all(here: TeamView) -> Step:
    """Take the blobs of all ranks that the leader shows."""
    every = Span(OUT, 0, here.size)
    return Copy(every, _at(here.team[0], every))


def all_reduce(rank: int, teams: Teams, length: int) -> Plan:
    """Reduce X[0:length] of all ranks into OUT[0:length] of all. Mixed, eager.

    Any operator will do, because each Reduce covers whole arrays. X may be OUT; otherwise it is not
    altered. Operands stand in rank order if that is the order of the hosts. TMP may hold a wider
    type than X and OUT, because partial results lie in TMP and are sent from there. No rank
    completes before all have entered.

    Rounds between H hosts, frames and scratch: those of `recursive_doubling.all_reduce` over H, of
    `length`. Between 2 hosts `length` crosses each way, which is the least possible. Shared:
    `length`.
    """
    name, here = "team_whole.all_reduce", team_view(teams, rank)
    leader = here.team[0]
    result = Span(OUT, 0, length)
    if rank != leader:
        return _plan(name, here, _follow(here, leader, length, result), shared=length)
    among_leaders = recursive_doubling.all_reduce(here.host, len(teams))

    def scaled(span: Span) -> tuple[Span]:
        # The partial result of the team stands at the place that the leaders' plan copies its input
        # to.
        buffer = TMP if span.buffer == X else span.buffer
        return (Span(buffer, span.start * length, span.stop * length),)

    steps = _lead(here, length, Span(TMP, 0, length))
    steps += _between(among_leaders.steps, [team[0] for team in teams], scaled)
    if here.mates:
        steps.append(Copy(_at(leader, result), result))
    scratch = max(1, among_leaders.scratch) * length
    return _plan(name, here, [*steps, Publish()], shared=length, scratch=scratch)


def reduce(rank: int, teams: Teams, root: int, length: int) -> Plan:
    """Reduce X[0:length] of all ranks into OUT[0:length] of `root`. Mixed, eager.

    This is `all_reduce`, but at the other ranks OUT is not used. `root` leads its team, and sends
    the other leaders an empty frame once it has all partial results.

    Between H hosts cross H - 1 times `length`, which is the least possible. Scratch: at `root` H
    times `length`, at other leaders `length`.
    """
    name, here = "team_whole.reduce", team_view(teams, rank)
    home = team_view(teams, root).host
    leaders = [root if host == home else team[0] for host, team in enumerate(teams)]
    leader = leaders[here.host]
    if rank != leader:
        return _plan(name, here, _follow(here, leader, length, None), shared=length)
    cells = [Span(TMP, host * length, (host + 1) * length) for host in range(len(teams))]
    if rank != root:
        steps = _lead(here, length, cells[0])
        steps += [Send(root, (cells[0],)), Recv(root, ()), Publish()]
        return _plan(name, here, steps, shared=length, scratch=length)
    steps = _lead(here, length, cells[here.host])
    steps += [Recv(leaders[host], (cells[host],)) for host in here.abroad()]
    steps += [Send(leaders[host], ()) for host in here.abroad()]
    steps += [Publish(), Reduce(Span(OUT, 0, length), tuple(cells))]
    return _plan(name, here, steps, shared=length, scratch=len(teams) * length)


def broadcast(rank: int, teams: Teams, root: int, length: int) -> Plan:
    """Copy X[0:length] of `root` to OUT[0:length] of the others. Mixed, eager.

    At `root` OUT is not used; elsewhere X is not. `root` leads its team. Between the leaders the
    array goes down a tree (`tree.broadcast`), in one frame. Ranks may complete before all have
    entered.

    Between H hosts cross H - 1 times `length`, which is the least possible. Shared: `length`.
    """
    here, home = team_view(teams, rank), team_view(teams, root).host
    leaders = [root if host == home else team[0] for host, team in enumerate(teams)]
    leader, result = leaders[here.host], Span(OUT, 0, length)
    if rank != leader:
        steps: list[Step] = [Await((leader,), 1), Copy(result, _at(leader, result)), Publish()]
        return _plan("team_whole.broadcast", here, steps, shared=length)
    down = tree.broadcast(here.host, len(teams), home, length, max(1, length))
    steps = _between(list(down.steps), leaders, lambda span: (span,))
    if here.mates:
        source = result._replace(buffer=X) if rank == root else result
        steps.append(Copy(_at(rank, result), source))
    return _plan("team_whole.broadcast", here, [*steps, Publish()], shared=length)


def _lead(here: TeamView, length: int, partial: Span) -> list[Step]:
    """Reduce the arrays of the team into `partial`."""
    operands = tuple(
        Span(X if mate == here.rank else SHARED + mate, 0, length) for mate in here.team
    )
    waiting: list[Step] = [Await(here.mates, 1)] if here.mates else []
    return [*waiting, Reduce(partial, operands, final=False)]


def _follow(here: TeamView, leader: int, length: int, result: Span | None) -> list[Step]:
    """Show the leader the own array, wait for the leader, and take the result."""
    shown = Copy(Span(SHARED + here.rank, 0, length), Span(X, 0, length))
    steps: list[Step] = [shown, Publish(), Await((leader,), 1)]
    return steps if result is None else [*steps, Copy(result, _at(leader, result))]


def _at(holder: int, span: Span) -> Span:
    """The place of `span` in the shared memory of `holder`."""
    return span._replace(buffer=SHARED + holder)


def _between(
    steps: Sequence[Step], leaders: Sequence[int], placed: Callable[[Span], tuple[Span, ...]]
) -> list[Step]:
    """The steps of a plan among hosts as steps of their leaders. `placed` maps each span of that
    plan to the spans here."""

    def place(span: Span) -> Span:
        (only,) = placed(span)
        return only

    def spread(spans: Sequence[Span]) -> tuple[Span, ...]:
        return tuple(part for span in spans for part in placed(span))

    result: list[Step] = []
    for step in steps:
        match step:
            case Send(peer, spans):
                result.append(Send(leaders[peer], spread(spans)))
            case Recv(peer, spans):
                result.append(Recv(leaders[peer], spread(spans)))
            case Reduce(into, operands, final):
                result.append(Reduce(place(into), tuple(map(place, operands)), final))
            case Copy(into, source):
                if place(into) != place(source):
                    result.append(Copy(place(into), place(source)))
            case _:
                raise ValueError(f"{step} has no meaning among leaders")
    return result


def _plan(
    name: str,
    here: TeamView,
    steps: Sequence[Step],
    *,
    shared: int,
    scratch: int = 0,
    publishes: int = 1,
) -> Plan:
    return Plan(
        name,
        here.rank,
        here.size,
        joined(steps),
        eager=True,
        scratch=scratch,
        shared=shared,
        publishes=publishes,
    )
