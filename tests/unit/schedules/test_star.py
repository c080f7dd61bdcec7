"""Sharing by way of one rank: what it takes, and that it meets whatever others have called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
from plans import run, sizes

from aiodist.schedules import dissemination, recursive_doubling, ring, star
from aiodist.schedules.choose_reductions import Shape, choose_all_reduce, choose_reduce
from aiodist.schedules.plan import OUT, Grant, Plan, Recv, Send
from aiodist.testing.plan_simulator import Unit


@sizes
def test_each_other_rank_sends_one_frame_and_gets_one(size: int) -> None:
    outcome = run(lambda rank: star.all_gather(rank, size), size, outputs=size)
    for out in outcome.out:
        assert out == tuple(Unit(rank, OUT, rank) for rank in range(size))
    assert outcome.rounds == (2 if size > 1 else 0)
    assert list(outcome.frames) == [size - 1] + [1] * (size - 1)


@sizes
def test_it_is_a_barrier(size: int) -> None:
    for slow in range(size):
        others = {rank: star.all_gather(rank, size) for rank in range(size) if rank != slow}
        _, ended = stuck(others, dict.fromkeys(others, ""))
        assert not ended


def stuck(plans: dict[int, Plan], calls: dict[int, str]) -> tuple[set[tuple[int, int]], set[int]]:
    """Where ranks go on as far as they can, and take only what is of their own call: who has sent
    a word to whom that called something else, and who has come to the end."""
    met: set[tuple[int, int]] = set()
    frames: Counter[tuple[int, int]] = Counter()
    grants: Counter[tuple[int, int]] = Counter()
    left = {rank: list(plan.steps) for rank, plan in plans.items()}
    moved = True
    while moved:
        moved = False
        for rank, steps in left.items():
            while steps:
                step = steps[0]
                if isinstance(step, Send):
                    if not plans[rank].eager and not grants[step.peer, rank]:
                        break
                    grants[step.peer, rank] -= 1
                    frames[rank, step.peer] += 1
                elif isinstance(step, Grant):
                    grants[rank, step.peer] += step.count
                elif isinstance(step, Recv):
                    if not frames[step.peer, rank]:
                        break
                    frames[step.peer, rank] -= 1
                if isinstance(step, (Send, Grant)) and calls.get(step.peer) != calls[rank]:
                    met.add((rank, step.peer))
                    if isinstance(step, Send):
                        frames[rank, step.peer] -= 1
                    else:
                        grants[rank, step.peer] -= step.count
                steps.pop(0)
                moved = True
    return met, {rank for rank, steps in left.items() if not steps}


def chosen(choose: Callable[[Shape, int], object], nbytes: int) -> Callable[[int, int], Plan]:
    def plan(rank: int, size: int) -> Plan:
        choice = choose(Shape(nbytes, 1, 1), size)
        made: Plan = choice.algorithm(rank, size, *choice.args)  # type: ignore[attr-defined]
        return made

    return plan


OTHERS: dict[str, Callable[[int, int], Plan]] = {
    "dissemination": dissemination.all_gather,
    "small all_reduce": recursive_doubling.all_reduce,
    "whole all_reduce": lambda rank, size: recursive_doubling.all_reduce_whole(rank, size, 9, 4),
    "all_reduce": chosen(choose_all_reduce, 1 << 16 | 8),
    "large all_reduce": chosen(choose_all_reduce, 1 << 26),
    "ring": lambda rank, size: ring.all_reduce(rank, size, 64, 4),
    "reduce": chosen(lambda x, size: choose_reduce(x, size, size - 1), 1 << 17),
}
"""What else a collective may begin with."""


@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize("other", OTHERS)
def test_who_calls_something_else_meets_it(other: str, size: int) -> None:
    """Whoever calls which: a word of one call comes to a rank that has called the other. So nobody
    waits until its deadline to learn of that."""
    for calls in product(("star", other), repeat=size):
        if len({*calls}) == 2:
            plans = {
                rank: (star.all_gather if call == "star" else OTHERS[call])(rank, size)
                for rank, call in enumerate(calls)
            }
            met, _ = stuck(plans, dict(enumerate(calls)))
            assert met, calls


def test_a_hub_for_each_root_would_not_be_met() -> None:
    """Why it is rank 0 for all. Where only rank 1 takes itself for the root, it waits for the
    others, the others wait for rank 0, and that waits for rank 1."""
    plans = {rank: star.all_gather(rank, 3) for rank in (0, 2)}
    plans[1] = Plan("turned", 1, 3, (Recv(0, ()), Recv(2, ()), Send(0, ()), Send(2, ())), True)
    met, ended = stuck(plans, {0: "by 0", 1: "by 1", 2: "by 0"})
    assert not met
    assert not ended
