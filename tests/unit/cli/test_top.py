"""What ranks do in a second, and how it is shown."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from aiodist_cli import top


def answer(**members: Any) -> dict[str, Any]:
    """What a coordinator says of one group: (age, collectives, sent, received) of each member."""
    group = {
        "name": "train",
        "epoch": 1,
        "size": len(members),
        "members": [
            {
                "rank": rank,
                "id": name,
                "name": name,
                "silent": 3.0,
                "doing": None
                if said is None
                else dict(zip(("age", "collectives", "sent", "received"), said, strict=True))
                | {"busy": 0.0, "places": ["t.py:5 in step"], "waits": [], "last": ""},
            }
            for rank, (name, said) in enumerate(members.items())
        ],
        "findings": [],
    }
    return {"address": "tcp://h:1", "draining": False, "groups": [group]}


def test_between_two_answers() -> None:
    rates = top.Rates()
    assert rates.since_last(answer(a=(0.0, 100, 1000, 0)), 50.0) == {}
    found = rates.since_last(answer(a=(0.5, 115, 4000, 30)), 52.0)  # said 1.5 s later
    assert found == {"a": top.Rate(10.0, 2000.0, 20.0)}
    assert rates.since_last(answer(a=(0.0, 115, 4000, 30)), 53.5) == {"a": top.Rate(0.0, 0.0, 0.0)}


def test_who_is_new_or_does_not_answer() -> None:
    rates = top.Rates()
    rates.since_last(answer(a=(0.0, 1, 0, 0)), 1.0)
    assert rates.since_last(answer(a=None, b=(0.0, 7, 0, 0)), 2.0) == {}
    # Over all the time since it answered last.
    found = rates.since_last(answer(a=(0.0, 21, 0, 0), b=(0.0, 8, 0, 0)), 3.0)
    assert found == {"a": top.Rate(10.0, 0.0, 0.0), "b": top.Rate(1.0, 0.0, 0.0)}


def test_the_same_word_of_a_busy_rank_again() -> None:
    rates = top.Rates()
    rates.since_last(answer(a=(0.0, 1, 0, 0)), 1.0)
    assert rates.since_last(answer(a=(1.001, 1, 0, 0)), 2.0) == {}


def test_who_is_gone_is_forgotten() -> None:
    rates = top.Rates()
    rates.since_last(answer(a=(0.0, 1, 0, 0), b=(0.0, 1, 0, 0)), 1.0)
    rates.since_last(answer(b=(0.0, 1, 0, 0)), 2.0)
    assert rates.since_last(answer(a=(0.0, 9, 0, 0)), 3.0) == {}


def test_tables() -> None:
    console = Console(width=100, no_color=True)
    found = answer(a=(0.0, 1, 2, 3), b=None)
    found["groups"][0]["members"][1]["name"] = "\x1b[2J[red]"
    with console.capture() as capture:
        console.print(top.render(found, {"a": top.Rate(1234.4, 2_500_000.0, 0.2)}))
    text = capture.get()
    assert text.startswith("coordinator tcp://h:1: 1 group\ngroup train: epoch 1, 2 of 2 ranks")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    assert [row for row in rows if row] == [
        ["0", "a", "1234", "2.5 MB", "0 bytes", "in no operation at t.py:5 in step"],
        ["1", "?[2J[red]", "", "", "", "no answer; last sign of life 3 s ago"],
    ]
