"""What becomes of ranks that die, as long as the run can spare them."""

from __future__ import annotations

import asyncio

import pytest

from aiodist_cli.elastic import Spare, keep
from aiodist_cli.summary import Exit


class Ranks:
    """Ranks that die in the order of `deaths`."""

    def __init__(self, size: int, deaths: list[Exit]) -> None:
        self.living = size
        self.deaths = iter(deaths)
        self.started: list[tuple[int, int]] = []
        self.told: list[str] = []

    async def next_death(self, interruption: object) -> Exit | None:
        died = next(self.deaths, None)
        self.living -= died is not None
        return died

    async def start(self, rank: int, restarts: int) -> None:
        self.living += 1
        self.started.append((rank, restarts))

    async def tell(self, text: str, died: Exit) -> None:
        self.told.append(text)

    def kept(self, spare: Spare, size: int) -> Exit | None:
        coroutine = keep(self, spare, size, None, self.start, self.tell)
        return asyncio.run(coroutine)


def test_the_dead_are_started_again_then_done_without_then_missed() -> None:
    last = Exit(2, 7)
    ranks = Ranks(3, [Exit(1, -9), Exit(1, 1), Exit(0, 1), last])
    assert ranks.kept(Spare(2, 2), 3) is last
    assert ranks.started == [(1, 1), (1, 2)]
    assert ranks.told == [
        "aiodist run: rank 1 of 3 failed with signal SIGKILL; started again, restarts left: 1",
        "aiodist run: rank 1 of 3 failed with exit code 1; started again, restarts left: 0",
        "aiodist run: rank 0 of 3 failed with exit code 1; the others go on, living or done: 2",
    ]


@pytest.mark.parametrize("deaths", [[], [Exit(0, 1)]])
def test_it_ends_well_with_enough(deaths: list[Exit]) -> None:
    assert Ranks(3, deaths).kept(Spare(2, 0), 3) is None
