"""Long plans, of which the rounds that are alike are written down twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, product
from typing import Any

import pytest

from aiodist.schedules import (
    bruck,
    chain,
    direct_exchange,
    halving_doubling,
    prefixes,
    pull_direct,
    pull_scan,
    pull_slices,
    pull_values,
    recursive_doubling,
    reduce,
    reduce_scatter,
    reduce_scatter_all_gather,
    ring,
    script,
    spread,
    team_slices,
    team_values,
    tree,
)
from aiodist.schedules.plan import OUT, Await, Copy, Grant, Plan, Publish, Recv, Send, Span, Step, X
from aiodist.schedules.script import Pages, Script, Steps, ahead, receives_of, written_down

Case = tuple[Callable[..., Plan], tuple[Any, ...]]

LENGTHS = {2: [(331, 331), (0, 97)], 3: [(130, 130, 130), (60, 0, 211)], 4: [(1, 80, 33, 80)]}
"""Units of the parts of 2, 3 and 4 ranks."""


def _cases() -> Iterator[Case]:
    """Every algorithm for large arrays, cut in hundreds of pieces."""
    for size, length, segment in ((2, 401, 1), (3, 900, 3), (4, 333, 1)):
        for rank in range(size):
            here, cut = (rank, size), (length, segment)
            yield chain.broadcast, (*here, 1, *cut)
            yield chain.scan, (*here, *cut, rank % 2 == 0)
            yield chain.scan, (*here, *cut, False, True)
            yield direct_exchange.uniform, (*here, *cut)
            yield halving_doubling.all_reduce, (*here, *cut, 8 * segment)
            yield halving_doubling.reduce, (*here, 1, *cut, 8 * segment)
            yield prefixes.scan, (*here, *cut, False)
            yield bruck.all_to_all, (*here, *cut)
            yield pull_direct.all_reduce, (*here, *cut)
            yield pull_scan.scan, (*here, length, False, segment, 3)
            yield pull_slices.all_reduce, (*here, *cut, 3)
            yield pull_slices.reduce, (*here, 0, *cut, 2)
            yield pull_values.broadcast, (*here, 0, *cut, 3)
            yield recursive_doubling.all_reduce_whole, (*here, *cut)
            yield reduce.scatter_gather, (*here, 0, *cut)
            yield reduce_scatter_all_gather.all_reduce, (*here, *cut)
            yield ring.all_reduce, (*here, *cut)
            yield spread.straight, (*here, 0, *cut)
            yield spread.tree, (*here, 0, *cut)
            yield tree.broadcast, (*here, 0, *cut)
    for size, several in LENGTHS.items():
        for rank, lengths in product(range(size), several):
            here, bounds = (rank, size), tuple(accumulate(lengths, initial=0))
            yield bruck.all_gather, (*here, lengths, 2)
            yield direct_exchange.all_gather, (*here, lengths, 2)
            yield direct_exchange.all_to_all, (*here, bounds, bounds, 2)
            yield direct_exchange.gather, (*here, 1, lengths, 2)
            yield direct_exchange.scatter, (*here, 1, lengths, 2)
            yield pull_direct.reduce_scatter, (*here, bounds, 2)
            yield pull_direct.take, (*here, (0,) * size, bounds, 0, 2)
            yield pull_slices.reduce_scatter, (*here, bounds, 2, 3)
            yield pull_values.all_gather, (*here, lengths, 2, 3)
            yield pull_values.exchange, (*here, bounds, bounds, 200, 2, 3)
            yield reduce_scatter.direct, (*here, bounds, 2)
            yield reduce_scatter.whole, (*here, bounds, 2)
            yield ring.reduce_scatter, (*here, bounds, 2)
            yield tree.gather, (*here, 1, lengths, 2)
            yield tree.scatter, (*here, 1, lengths, 2)
    for teams, rank in [(((0, 1), (2, 3)), 1), (((0, 2), (1,)), 1), (((0,), (1,)), 0)]:
        size = sum(map(len, teams))
        bounds = tuple(accumulate((300, 0, 123, 300)[:size], initial=0))
        yield team_slices.all_reduce, (rank, teams, 800 * size, 1)
        yield team_slices.reduce, (rank, teams, 0, 400 * size, 1)
        yield team_slices.reduce_scatter, (rank, teams, bounds, 1)
        for root in range(size):
            yield team_values.broadcast, (rank, teams, root, 300, 1)
        yield team_values.all_gather, (rank, teams, (300, 0, 123, 300)[:size], 1)


def _name(case: Case) -> str:
    algorithm, args = case
    return f"{algorithm.__module__.rpartition('.')[2]}.{algorithm.__name__}{args}"


def _by_name() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for case in _cases():
        found.setdefault(_name(case).partition("(")[0], []).append(case)
    return found


BY_NAME = _by_name()


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.sample(13)
def test_a_long_plan_has_the_steps_that_all_its_rounds_have(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorter = 0
    for case in BY_NAME[name]:
        algorithm, args = case
        with monkeypatch.context() as patch:
            patch.setattr(script, "FEWEST", 10**9)
            each = algorithm(*args)
        with monkeypatch.context() as patch:
            patch.setattr(script, "LISTED", 0)
            folded = algorithm(*args)
        listed = [*each.steps]
        assert listed == [*folded.steps], _name(case)
        assert each._replace(steps=()) == folded._replace(steps=())
        shorter += written_down(folded.steps) < len(listed)
        _agree(folded.steps, listed)
    assert shorter, "none of them has rounds that are alike"


def _agree(steps: Any, each: list[Step]) -> None:
    """Whatever is asked of `steps` is what a list of `each` of them says."""
    count = len(each)
    assert len(steps) == count
    assert [steps[at] for at in range(0, count, 7)] == each[::7]
    assert count == 0 or steps[-1] == each[-1]
    assert [*steps[2:9]] == each[2:9]
    assert [*steps[9:2:-3]] == each[9:2:-3]
    middle = count // 2
    assert [*steps[middle : middle + 40]] == each[middle : middle + 40]
    if isinstance(steps, Steps):
        pages = Pages(steps)
        assert len(pages) == count
        assert [pages[at] for at in range(count)] == each
    assert sum(times for _, times in ahead(steps)) == count
    for at in (1, count // 3, count // 2, count - 1):
        left = each[at:] if at >= 0 else []
        found = list(ahead(steps, max(at, 0)))
        for peer in range(4):
            receives = [s for s in left if isinstance(s, Recv) and s.peer == peer]
            hits = [n for s, n in found if isinstance(s, Recv) and s.peer == peer]
            assert sum(hits) == len(receives)
            counts = [s.count for s in left if isinstance(s, Await) and peer in s.peers]
            last = [s.count for s, _ in found if isinstance(s, Await) and peer in s.peers]
            assert max(last, default=0) == max(counts, default=0)
    for peer, those in receives_of(steps).items():
        assert [*those] == [s for s in each if isinstance(s, Recv) and s.peer == peer]


def _passed_on(k: int) -> list[Step]:
    span = Span(OUT, 4 * k, 4 * k + 4)
    return [Recv(0, (span,)), Send(2, (span,)), Publish(), Await((0,), k + 1), Grant(0, 1)]


def test_rounds_that_are_alike_are_written_down_twice() -> None:
    plan = Script([Publish()])
    plan.repeat(10**12, _passed_on)
    steps = plan.steps()
    assert isinstance(steps, Steps)
    assert (len(steps), written_down(steps)) == (5 * 10**12 + 1, 6 + 5 + 3 + 5)
    k = 123456789012
    assert [*steps[5 * k + 1 : 5 * k + 6]] == _passed_on(k)
    assert steps[-5:] == tuple(_passed_on(10**12 - 1))
    assert receives_of(steps)[0][k] == _passed_on(k)[0]
    with pytest.raises(IndexError):
        steps[len(steps)]


def test_rounds_without_steps_are_nothing() -> None:
    plan = Script()
    plan.repeat(10**6, lambda k: ())
    plan.append(Publish())
    assert plan.steps() == (Publish(),)


@pytest.mark.parametrize("wrong", [1, 500])
def test_rounds_that_are_not_alike_are_refused(wrong: int) -> None:
    def rounds(k: int) -> list[Step]:
        at = k * (k + 1) // 2 if wrong == 500 else k
        kinds: list[Step] = [Send(0, (Span(X, k, k + 1),)), Recv(0, (Span(X, k, k + 1),))]
        here = kinds[k == 2] if wrong == 1 else Copy(Span(OUT, at, at + 1), Span(X, at, at + 1))
        return [here]

    with pytest.raises(ValueError, match="not alike"):
        Script().repeat(1000, rounds)


def test_receives_of_a_list_are_those_of_each_peer_in_order() -> None:
    first, second, other = (
        Recv(peer, (Span(OUT, at, at + 1),)) for at, peer in enumerate((1, 1, 2))
    )
    steps: list[Step] = [first, Send(1, (Span(X, 0, 1),)), other, second]
    assert receives_of(steps) == {1: [first, second], 2: [other]}
