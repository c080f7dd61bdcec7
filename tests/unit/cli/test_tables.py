"""Tables leave columns out where the terminal has no room for them."""

from __future__ import annotations

from typing import Any

import pytest
import surveyed
from rich.console import Console

from aiodist_cli import status, top
from aiodist_cli.bench_cases import Case, Result
from aiodist_cli.bench_report import tables
from aiodist_cli.tables import WIDE, NarrowingTable, console

WAITS = surveyed.doing(
    waits=[surveyed.wait(12.0, missing="ranks 1 and 3")],
    places=["a_folder/of_long_names/training_loop.py:1234 in main"],
)
MEMBERS = [
    surveyed.member(rank, name=f"node17.example.org:{rank}", host="10.100.100.100", doing=WAITS)
    for rank in range(2)
]
FOUND = surveyed.found(surveyed.group(*MEMBERS)) | {
    "channels": [
        surveyed.channel(
            *(surveyed.participant(number) | {"name": "node17.example.org"} for number in (1, 2))
        )
    ]
}
SUMMARY = [
    Result(Case("all_reduce", 1 << 20, 2), name, None, "no", processor=1e-5)
    for name in ("aiodist", "gloo")
]


def headings(width: int, *shown: Any) -> list[list[str]]:
    narrow = Console(width=width, no_color=True)
    with narrow.capture() as capture:
        narrow.print(*shown)
    lines = capture.get().splitlines()
    assert all(len(line) <= width for line in lines)
    return [
        [cell.strip() for cell in line.split("┃")[1:-1]] for line in lines if line.startswith("┃")
    ]


def test_columns_are_left_out_in_order_and_what_is_left_is_whole() -> None:
    def table() -> NarrowingTable:
        made = NarrowingTable("title", ("b", "a"))
        for name in ("a", "number", "b"):
            made.add_column(name, no_wrap=True)
        made.add_column("text")
        made.add_row("aaaa", "1", "bbbb", "long " * 20)
        return made

    whole = 1 + 7 + 9 + 7 + 27
    assert headings(whole, table()) == [["a", "number", "b", "text"]]
    assert headings(whole - 1, table()) == [["a", "number", "text"]]
    assert headings(whole - 7, table()) == [["a", "number", "text"]]
    assert headings(whole - 8, table()) == [["number", "text"]]
    assert headings(20, table()) == [["number", "text"]]


@pytest.mark.parametrize(
    ("width", "group", "channel"),
    [
        (160, ["rank", "name", "host", "pid", "state", "doing"], 10),
        (80, ["rank", "name", "state", "doing"], 6),
    ],
)
def test_status(width: int, group: list[str], channel: int) -> None:
    first, second = headings(width, status.render(FOUND, 0.0))
    assert first == group
    assert len(second) == channel
    assert {"", "name", "version", "behind"} <= {*second}


def test_top() -> None:
    answer = top.Answer(FOUND, {"id0": top.Rate(12000.0, 1.5e9, 1.5e9)})
    first, _ = headings(80, top.View().render(answer, None))
    assert first == ["rank", "calls/s", "sent/s", "recv/s", "doing"]


def test_what_is_no_terminal_has_room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console().width == WIDE
    monkeypatch.setenv("COLUMNS", "50")
    assert console().width == 50


def test_bench() -> None:
    (first,) = headings(80, *tables(SUMMARY))
    assert first == [
        "size",
        "library",
        "median",
        "p99",
        "mean",
        "processor",
        "bandwidth",
        "relative",
    ]
    (first,) = headings(70, *tables(SUMMARY))
    assert first == ["size", "library", "median", "p99", "mean", "bandwidth", "relative"]
