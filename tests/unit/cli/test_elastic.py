"""What becomes of ranks that die, as long as the run can spare them."""

from __future__ import annotations

import asyncio

import pytest

from aiodist_cli.elastic import Spare, keep
from aiodist_cli.summary import Exit


class Ranks:
    """Ranks that end in the order of `ends`."""

    def __init__(self, size: int, ends: list[Exit]) -> None:
        self.living = size
        self.done = 0
        self.ends = iter(ends)
        self.started: list[tuple[int, int]] = []
        self.told: list[str] = []

    async def next_death(self, interruption: object) -> Exit | None:
        for end in self.ends:
            if end.code:
                self.living -= 1
                return end
            self.done += 1
        return None

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


BUG = Exit(1, 3, [b"disk full"])
IN_VAIN = Exit(1, 1, [b"aiodist.errors.JoinTimeoutError: gave up joining after 4 s"])
STARTED = "aiodist run: rank 1 of 2 failed with exit code 3; started again, restarts left: 8"
ENDED = "not started again, because 1 of 2 ended with 0 and a group needs 2"


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        ([Exit(0, 0), BUG], [f"aiodist run: rank 1 of 2 failed with exit code 3; {ENDED}"]),
        (
            [BUG, Exit(0, 0), IN_VAIN],
            [STARTED, f"aiodist run: rank 1 of 2 failed with exit code 1; {ENDED}"],
        ),
    ],
)
def test_a_rank_is_not_started_again_without_enough_others_for_a_group(
    ends: list[Exit], told: list[str]
) -> None:
    """A rank that was started again before the others ended waits for them in vain. The failure is
    what it died of before."""
    ranks = Ranks(2, ends)
    assert ranks.kept(Spare(2, 9), 2) is BUG
    assert ranks.told == told


def test_a_run_whose_other_ranks_are_done_ends_well() -> None:
    ranks = Ranks(3, [Exit(0, 0), Exit(2, 0), BUG])
    assert ranks.kept(Spare(2, 9), 3) is None
    assert ranks.started == []
    assert ranks.told == [
        "aiodist run: rank 1 of 3 failed with exit code 3; not started again, because 2 of 3 ended "
        "with 0 and a group needs 2; the others go on, living or done: 2"
    ]
