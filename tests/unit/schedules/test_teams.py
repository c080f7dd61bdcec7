"""Plans of groups that span hosts, run by the simulator over layouts, lengths and interleavings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
from plans import assert_reduced, outcome_of

from aiodist.schedules import team_slices, team_values, team_whole
from aiodist.schedules.plan import OUT, TMP, Await, Copy, Plan, Publish, Recv, Reduce, Send, Span, X
from aiodist.schedules.teams import Teams, in_order, parted, spans_hosts, team_view, teams_of
from aiodist.testing.plan_simulator import SimulationResult, Unit

LAYOUTS: list[Teams] = [
    ((0, 1), (2, 3)),
    ((0, 2), (1, 3)),
    ((0,), (1, 2)),
    ((0, 1, 2), (3, 4)),
    ((0, 1), (2,), (3, 4, 5)),
    ((0, 3), (1, 2), (4, 5)),
    ((0, 5, 6), (1,), (2, 3), (4,)),
]
layouts = pytest.mark.parametrize("teams", LAYOUTS, ids=str)
lags = pytest.mark.parametrize("lag", [1, 2, 7])


def run(
    plan: Callable[[int], Plan],
    teams: Teams,
    inputs: int | Sequence[int] = 0,
    outputs: int | Sequence[int] = 0,
    **options: Any,
) -> SimulationResult:
    """See `outcome_of`. Frames go between hosts alone."""
    size = sum(map(len, teams))
    plans = [plan(rank) for rank in range(size)]
    assert plans == [plan(rank) for rank in range(size)], "plans must be pure"
    for made in plans:
        team = team_view(teams, made.rank).team
        assert not any(isinstance(s, Send) and s.peer in team for s in made.steps)
    return outcome_of(plans, inputs, outputs, seed=size, teams=teams, **options)


def ranks_of(teams: Teams) -> list[int]:
    """In the order in which they are reduced."""
    return [rank for team in teams for rank in team]


def lengths(size: int) -> list[int]:
    return [1, 2 * size + 1, 9 * size + 2]


# -- layouts ----------------------------------------------------------------------------------


def test_teams_are_ranks_with_one_host() -> None:
    assert teams_of("aab") == ((0, 1), (2,))
    assert teams_of(["x", "y", "x", "y"]) == ((0, 2), (1, 3))
    assert in_order(teams_of("aabb"))
    assert not in_order(teams_of("abab"))
    assert spans_hosts(teams_of("aab"))
    assert not spans_hosts(teams_of("aa"))


def test_hosts_with_many_ranks_fall_into_parts() -> None:
    assert parted(teams_of("aabbb"), 3) == ((0, 1), (2, 3, 4))
    assert parted(teams_of("aaaaa"), 2) == ((0,), (1, 2), (3, 4))
    assert parted(teams_of("aba"), 1) == ((0,), (1,), (2,))
    # In the order of their lowest ranks, as hosts are.
    assert parted(teams_of("abaaba"), 2) == ((0, 2), (1, 4), (3, 5))
    parts = parted((tuple(range(1000)),), 64)
    assert [rank for part in parts for rank in part] == list(range(1000))
    assert {len(part) for part in parts} == {62, 63}


@layouts
def test_every_rank_has_one_agent_on_each_host(teams: Teams) -> None:
    for host, team in enumerate(teams):
        for rank in ranks_of(teams):
            agent = team_view(teams, team[0]).agent(host, rank)
            assert [mate for mate in team if rank in team_view(teams, mate).duties(mate)] == [agent]
        for mate in team:
            assert team_view(teams, mate).agent(host, mate) == mate


def test_who_is_in_no_team() -> None:
    with pytest.raises(ValueError, match="rank 3 is in none of the teams"):
        team_view(((0, 1), (2,)), 3)


# -- whole values -----------------------------------------------------------------------------


@layouts
def test_share(teams: Teams) -> None:
    size = len(ranks_of(teams))
    outcome = run(lambda r: team_whole.share(r, teams), teams, outputs=size)
    everything = tuple(Unit(rank, OUT, rank) for rank in range(size))
    assert outcome.out == (everything,) * size
    # Each host gets the blobs of all others once.
    assert sum(outcome.units) == (len(teams) - 1) * size


@layouts
def test_share_by_hub(teams: Teams) -> None:
    """The blob of the root crosses as often as by any plan, and frames are the fewest."""
    hosts, size = len(teams), len(ranks_of(teams))
    everything = tuple(Unit(rank, OUT, rank) for rank in range(size))
    for root in (None, *range(size)):
        outcome = run(
            lambda r, root=root: team_whole.share(r, teams, True, root), teams, outputs=size
        )
        assert outcome.out == (everything,) * size
        plans = [team_whole.share(rank, teams, True, root) for rank in range(size)]
        sends = [step for plan in plans for step in plan.steps if isinstance(step, Send)]
        assert len(sends) == 2 * (hosts - 1)
        if root is not None:
            blobs = [span.start for step in sends for span in step.spans]
            assert blobs.count(root) == hosts - 1
        assert_barrier(plans)
        home = None if root is None else team_view(teams, root).host
        for plan in plans:
            here = team_view(teams, plan.rank)
            if here.host not in (0, home) and plan.rank == here.team[0] != here.team[-1]:
                # It says what it has and hears of all, whenever its mates come.
                waits = [step for step in plan.steps if isinstance(step, (Await, Recv))]
                assert [type(step) for step in waits] == [Recv]


@layouts
@pytest.mark.parametrize("length", [1, 3])
def test_broadcast_of_wholes(teams: Teams, length: int) -> None:
    size = len(ranks_of(teams))
    for root in range(size):
        outcome = run(
            lambda r, root=root: team_whole.broadcast(r, teams, root, length),
            teams,
            [length if rank == root else 0 for rank in range(size)],
            [0 if rank == root else length for rank in range(size)],
            segment=max(1, length),
        )
        for rank in range(size):
            if rank != root:
                assert outcome.out[rank] == tuple(Unit(root, X, at) for at in range(length))
        assert sum(outcome.units) == (len(teams) - 1) * length


@layouts
@pytest.mark.parametrize("in_place", [False, True])
def test_all_reduce_of_wholes(teams: Teams, in_place: bool) -> None:
    size = len(ranks_of(teams))
    places = range(size) if in_place else ()
    outcome = run(
        lambda r: team_whole.all_reduce(r, teams, 3), teams, 3, 3, in_place=places, segment=3
    )
    for out in outcome.out:
        assert_reduced(out, range(3), ranks_of(teams))
    if len(teams) == 2:
        assert sum(outcome.units) == 2 * 3


@layouts
def test_reduce_of_wholes(teams: Teams) -> None:
    size = len(ranks_of(teams))
    for root in range(size):
        outcome = run(
            lambda r, root=root: team_whole.reduce(r, teams, root, 3),
            teams,
            3,
            [3 if rank == root else 0 for rank in range(size)],
            in_place=[root],
        )
        assert_reduced(outcome.out[root], range(3), ranks_of(teams))
        assert sum(outcome.units) == (len(teams) - 1) * 3


@layouts
def test_wholes_synchronise(teams: Teams) -> None:
    size = len(ranks_of(teams))
    assert_barrier([team_whole.share(rank, teams) for rank in range(size)])
    assert_barrier([team_whole.all_reduce(rank, teams, 2) for rank in range(size)])
    assert_barrier([team_whole.reduce(rank, teams, size - 1, 2) for rank in range(size)])


@layouts
@lags
def test_all_reduce_synchronises(teams: Teams, lag: int) -> None:
    size = len(ranks_of(teams))
    assert_barrier([team_slices.all_reduce(r, teams, 3 * size, 1, lag) for r in range(size)])


def assert_barrier(plans: Sequence[Plan]) -> None:
    """While one rank does nothing, no other comes to its end."""
    for slow in range(len(plans)):
        frames = dict.fromkeys(((a.rank, b.rank) for a in plans for b in plans), 0)
        published = [0] * len(plans)
        left = {plan.rank: list(plan.steps) for plan in plans if plan.rank != slow}
        moved = True
        while moved:
            moved = False
            for rank, steps in left.items():
                while steps and _can_do(steps[0], rank, frames, published):
                    steps.pop(0)
                    moved = True
        assert all(left.values())


def _can_do(
    step: object, rank: int, frames: dict[tuple[int, int], int], published: list[int]
) -> bool:
    """Do `step` if that is possible. (All sends are granted: it takes no less without.)"""
    match step:
        case Send(peer):
            frames[rank, peer] += 1
        case Publish():
            published[rank] += 1
        case Await(peers, count):
            return all(published[peer] >= count for peer in peers)
        case _ if hasattr(step, "peer") and hasattr(step, "spans"):
            frames[step.peer, rank] -= 1
            if frames[step.peer, rank] < 0:
                frames[step.peer, rank] = 0
                return False
        case _:
            pass
    return True


# -- slices -----------------------------------------------------------------------------------


@layouts
@lags
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.sample(17)
def test_all_reduce(teams: Teams, lag: int, in_place: bool) -> None:
    size = len(ranks_of(teams))
    for length in lengths(size):
        outcome = run(
            lambda r, n=length: team_slices.all_reduce(r, teams, n, 2, lag),
            teams,
            length,
            length,
            in_place=range(size) if in_place else (),
            segment=2,
        )
        for out in outcome.out:
            assert_reduced(out, range(length), ranks_of(teams))
        assert len({*outcome.out}) == 1
        assert sum(outcome.units) == 2 * (len(teams) - 1) * length


@layouts
@lags
@pytest.mark.sample(9)
def test_reduce(teams: Teams, lag: int) -> None:
    size = len(ranks_of(teams))
    for root in (0, size // 2, size - 1):
        for length in lengths(size):
            outcome = run(
                lambda r, n=length, root=root: team_slices.reduce(r, teams, root, n, 2, lag),
                teams,
                length,
                [length if rank == root else 0 for rank in range(size)],
                in_place=[root],
                segment=2,
            )
            assert_reduced(outcome.out[root], range(length), ranks_of(teams))
            assert sum(outcome.units) == (len(teams) - 1) * length


@layouts
@lags
def test_reduce_scatter(teams: Teams, lag: int) -> None:
    size = len(ranks_of(teams))
    for scale in (1, 4):
        slots = [(3 * rank + 2) % 5 * scale for rank in range(size)]
        bounds = tuple(accumulate(slots, initial=0))
        outcome = run(
            lambda r, bounds=bounds: team_slices.reduce_scatter(r, teams, bounds, 2, lag),
            teams,
            bounds[-1],
            slots,
            segment=2,
        )
        for rank, out in enumerate(outcome.out):
            assert_reduced(out, range(bounds[rank], bounds[rank + 1]), ranks_of(teams))
        assert sum(outcome.units) == (len(teams) - 1) * bounds[-1]


def test_a_lag_of_no_rounds() -> None:
    with pytest.raises(ValueError, match="at least one round"):
        team_slices.all_reduce(0, LAYOUTS[0], 8, 2, 0)


# -- values -----------------------------------------------------------------------------------


@layouts
def test_broadcast(teams: Teams) -> None:
    size = len(ranks_of(teams))
    for root in range(size):
        for length in (0, *lengths(size)):
            outcome = run(
                lambda r, n=length, root=root: team_values.broadcast(r, teams, root, n, 2),
                teams,
                [length if rank == root else 0 for rank in range(size)],
                [0 if rank == root else length for rank in range(size)],
                segment=2,
            )
            value = tuple(Unit(root, X, at) for at in range(length))
            assert [out for rank, out in enumerate(outcome.out) if rank != root] == [value] * (
                size - 1
            )
            assert sum(outcome.units) == (len(teams) - 1) * length


@layouts
@lags
def test_all_gather(teams: Teams, lag: int) -> None:
    size = len(ranks_of(teams))
    for scale in (1, 4):
        parts = tuple((3 * rank + 2) % 5 * scale for rank in range(size))
        outcome = run(
            lambda r, parts=parts: team_values.all_gather(r, teams, parts, 2, lag),
            teams,
            parts,
            [sum(parts) - part for part in parts],
            segment=2,
        )
        for rank, out in enumerate(outcome.out):
            assert out == tuple(
                Unit(q, X, at) for q in range(size) if q != rank for at in range(parts[q])
            )
        assert sum(outcome.units) == (len(teams) - 1) * sum(parts)


def test_steps_of_hosts_as_those_of_their_leaders() -> None:
    def doubled(span: Span) -> tuple[Span, ...]:
        # What would be copied to TMP stands there already.
        buffer = TMP if span.buffer == X else span.buffer
        return (Span(buffer, 2 * span.start, 2 * span.stop),)

    x, tmp, out = Span(X, 0, 3), Span(TMP, 0, 3), Span(OUT, 0, 3)
    steps = [Send(1, (x,)), Recv(2, (out,)), Copy(tmp, x), Copy(out, tmp), Reduce(out, (x, out))]
    assert team_whole._between(steps, [0, 5, 7], doubled) == [
        Send(5, (Span(TMP, 0, 6),)),
        Recv(7, (Span(OUT, 0, 6),)),
        Copy(Span(OUT, 0, 6), Span(TMP, 0, 6)),
        Reduce(Span(OUT, 0, 6), (Span(TMP, 0, 6), Span(OUT, 0, 6))),
    ]
    with pytest.raises(ValueError, match="has no meaning among leaders"):
        team_whole._between([Publish()], [0, 5, 7], doubled)
