"""Who is done with a pull plan may leave its group: nobody may need anybody any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from plans import plans_of, sizes, uneven

from aiodist.schedules import pull_direct, pull_scan, pull_slices, pull_values, pull_whole
from aiodist.schedules.plan import Await, Plan, Publish, Step

LENGTH = 11


class Running:
    """The ranks of plans, each as far as it has been brought."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.steps: list[list[Step]] = [list(plan.steps) for plan in plans]
        self.published = [0] * len(plans)

    def step(self, rank: int) -> tuple[int, int] | None:
        """Do one step of `rank`. If it has to wait: for whom, and until so many are published."""
        step = self.steps[rank][0]
        if isinstance(step, Await):
            for peer in step.peers:
                if self.published[peer] < step.count:
                    return peer, step.count
        self.published[rank] += isinstance(step, Publish)
        del self.steps[rank][0]
        return None

    def publish(self, rank: int, count: int) -> None:
        """Bring `rank` to where it has published so much, and the others no further than needed."""
        while self.published[rank] < count:
            self.go_on(rank)

    def end(self, rank: int) -> None:
        """The same, to its end."""
        while self.steps[rank]:
            self.go_on(rank)

    def go_on(self, rank: int) -> None:
        while (needed := self.step(rank)) is not None:
            self.publish(*needed)

    def ends_alone(self, rank: int) -> bool:
        """Whether it needs nothing that is not there."""
        while self.steps[rank]:
            if self.step(rank) is not None:
                return False
        return True


PLANS: dict[str, Callable[[int, int], Plan]] = {
    "whole all_reduce": lambda rank, size: pull_whole.all_reduce(rank, size, LENGTH),
    "whole in pieces": lambda rank, size: pull_whole.all_reduce_in_pieces(rank, size, LENGTH, 2, 2),
    "whole reduce": lambda rank, size: pull_whole.reduce(rank, size, size // 2, LENGTH),
    "whole scan": lambda rank, size: pull_whole.scan(rank, size, LENGTH, False),
    "all_reduce": lambda rank, size: pull_slices.all_reduce(rank, size, 5 * LENGTH, 2, 2),
    "reduce": lambda rank, size: pull_slices.reduce(rank, size, size // 2, 5 * LENGTH, 2, 2),
    "reduce_scatter": lambda rank, size: pull_slices.reduce_scatter(rank, size, uneven(size), 1, 2),
    "broadcast": lambda rank, size: pull_values.broadcast(rank, size, size // 2, LENGTH, 2, 2),
    "short broadcast": lambda rank, size: pull_values.broadcast(rank, size, size // 2, 3, 2, 2),
    "all_gather": lambda rank, size: pull_values.all_gather(
        rank, size, [3 * peer % 7 for peer in range(size)], 2, 2
    ),
    "direct all_reduce": lambda rank, size: pull_direct.all_reduce(rank, size, 5 * LENGTH, 2),
    "direct reduce_scatter": lambda rank, size: pull_direct.reduce_scatter(
        rank, size, uneven(size), 1
    ),
    "scan": lambda rank, size: pull_scan.scan(rank, size, LENGTH, False, 2, 2),
    "scan that fits": lambda rank, size: pull_scan.scan(rank, size, LENGTH, False, 2, 9),
    "exscan": lambda rank, size: pull_scan.scan(rank, size, LENGTH, True, 2, 3),
}


@sizes
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_nobody_needs_another_once_one_is_done(plan: Callable[[int, int], Plan], size: int) -> None:
    plans = plans_of(lambda rank: plan(rank, size), size)
    for first in range(size):
        ranks = Running(plans)
        ranks.end(first)
        reached = [list(steps) for steps in ranks.steps], list(ranks.published)
        for other in range(size):
            ranks.steps, ranks.published = [list(each) for each in reached[0]], list(reached[1])
            assert ranks.ends_alone(other), f"rank {other} needs others after rank {first} is done"
