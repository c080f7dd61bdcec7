"""How the answer of a coordinator is shown."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from aiodist_cli import status

NOW = 1_000_000.0


def shown(**groups: Any) -> str:
    console = Console(width=120, no_color=True)
    found = {"address": "tcp://h:1", "draining": False, "groups": [groups] if groups else []}
    with console.capture() as capture:
        console.print(status.render(found, NOW))
    return capture.get()


def member(rank: int | None, **more: object) -> dict[str, object]:
    return {"rank": rank, "id": "x", "host": "10.0.0.1", "pid": 7, "name": "me"} | more


def test_no_groups() -> None:
    assert shown() == "coordinator tcp://h:1: 0 groups\n"


def test_a_group_that_runs() -> None:
    text = shown(
        name="train",
        epoch=2,
        size=4,
        wanted="4",
        members=[member(0, joined_at=NOW - 5), member(1, joined_at=NOW - 600)],
        waiting=[member(None, name="[red]x[/red]")],
        lost={"2": "its connection broke"},
        left=[3],
    )
    assert "group train: epoch 2, 2 of 4 ranks" in text
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    assert [row for row in rows if row] == [
        ["0", "me", "10.0.0.1", "7", "member for 5 s"],
        ["1", "me", "10.0.0.1", "7", "member for 10 min"],
        ["any", "[red]x[/red]", "10.0.0.1", "7", "waiting to join"],
        ["2", "", "", "", "lost: its connection broke"],
        ["3", "", "", "", "left"],
    ]


def test_a_group_that_forms() -> None:
    text = shown(
        name="g",
        epoch=None,
        size=None,
        wanted="3",
        members=[],
        waiting=[member(1)],
        lost={},
        left=[],
    )
    assert "group g: forming, 1 of 3 here" in text


def test_draining_is_said() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(status.render({"address": "a", "draining": True, "groups": []}, NOW))
    assert "draining: it takes no new members" in capture.get()


def test_durations() -> None:
    assert status._duration(-1) == "0 s"
    assert status._duration(119.4) == "119 s"
    assert status._duration(7199) == "120 min"
    assert status._duration(7200) == "2.0 h"
