"""The lines of a story: what is done alike at about the same time is one line."""

from __future__ import annotations

import pytest

from aiodist.testing.story import StoryEvent, told

HERE, THERE = ("program.py", 3), ("program.py", 7)
KILL = ("", 0)
"""The place of what the program does not do itself."""


def event(
    rank: int | None,
    *,
    time: float = 1.0,
    place: tuple[str, int] = HERE,
    text: str = "barrier()",
    how: str = "",
) -> StoryEvent:
    return StoryEvent(time, rank, place, text, how)


def assert_lines(events: list[StoryEvent], *expected: str) -> None:
    assert [" ".join(line.split()) for line in told(events, 0.5)] == [*expected]


def test_what_ranks_do_alike_is_one_line() -> None:
    assert_lines([event(2), event(0)], "500.0 ms ranks 0, 2 program.py:3 barrier()")


def test_what_a_rank_does_again_and_again_is_counted() -> None:
    events = [event(1), event(1, time=1.1), event(1, time=1.2)]
    assert_lines(events, "500.0 ms rank 1 program.py:3 barrier() (3 times)")


@pytest.mark.parametrize(
    "other", [{"place": THERE}, {"text": "recv()"}, {"how": "PeerLostError"}, {"place": KILL}]
)
def test_what_differs_has_a_line_of_its_own(other: dict) -> None:
    assert len(told([event(0), event(1, **other)], 0.5)) == 2


def test_faults_are_not_joined() -> None:
    faults = [event(rank, place=KILL, text="is killed") for rank in (0, 1)]
    assert_lines(faults, "500.0 ms rank 0 is killed", "500.0 ms rank 1 is killed")


def test_others_in_between_at_the_same_time_part_nothing() -> None:
    events = [event(0), event(1, place=THERE), event(2)]
    assert_lines(
        events,
        "500.0 ms ranks 0, 2 program.py:3 barrier()",
        "500.0 ms rank 1 program.py:7 barrier()",
    )


def test_what_comes_later_is_joined_to_the_last_line_only() -> None:
    events = [event(0), event(1, time=1.1, place=THERE), event(2, time=1.2)]
    assert_lines(
        events,
        "500.0 ms rank 0 program.py:3 barrier()",
        "600.0 ms rank 1 program.py:7 barrier()",
        "700.0 ms rank 2 program.py:3 barrier()",
    )
