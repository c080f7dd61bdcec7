"""What ranks do in a second, and how it is shown."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from surveyed import channel, participant

from aiodist_cli import top
from aiodist_cli.keys import keys_in


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
                "host": "h",
                "pid": 700 + rank,
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
        rates = {"a": top.Rate(1234.4, 2_500_000.0, 0.2)}
        console.print(top.View().render(top.Answer(found, rates), None))
    text = capture.get()
    assert text.startswith("coordinator tcp://h:1: 1 group\ngroup train: epoch 1, 2 of 2 ranks")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    assert [row for row in rows if row] == [
        ["0", "a", "1234", "2.5 MB", "0 bytes", "in no operation at t.py:5 in step"],
        ["1", "?[2J[red]", "", "", "", "no answer; last sign of life 3 s ago"],
    ]


def lines(view: top.View, found: dict[str, Any], height: int | None = None) -> list[str]:
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        console.print(view.render(top.Answer(found, {}, "asking again: gone" + 200 * "."), height))
    return capture.get().splitlines()


def selected(view: top.View, found: dict[str, Any], height: int | None = None) -> list[str]:
    """The names of the ranks whose lines are shown in reverse."""
    console = Console(width=100, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(view.render(top.Answer(found, {}), height))
    return re.findall(r"\x1b\[7m *(n\d+)", capture.get())


def several(count: int) -> dict[str, Any]:
    return answer(**{f"n{n}": (0.0, 7, 2, 3) for n in range(count)})


def test_the_arrows_select_a_rank() -> None:
    view, found = top.View(), several(3)
    assert selected(view, found) == []
    for key, name in [("down", "n0"), ("down", "n1"), ("up", "n0"), ("up", "n0")]:
        assert view.press(key, found)
        assert selected(view, found) == [name]
    assert view.press("left", found)
    assert selected(view, found) == []
    assert not view.press("quit", found)


def test_all_that_is_known_of_a_rank() -> None:
    view, found = top.View(), several(3)
    view.press("right", found)  # of none
    assert "┃ rank ┃" in "".join(lines(view, found))
    for key in ("down", "down", "right"):
        view.press(key, found)
    text = "\n".join(lines(view, found))
    assert "h, 701" in text
    assert "t.py:5 in step" in text
    assert "7, 2 bytes, 3 bytes" in text
    assert "".join(lines(view, found)).endswith(f"asking again: gone{200 * '.'}")
    for height in (24, 7):
        shown = lines(view, found, height)
        assert len(shown) <= height
        assert shown[-2].rstrip() == "left: back   q: quit"
        assert re.fullmatch(r"asking again: gone\.+…", shown[-1])
    view.press("left", found)
    assert selected(view, found) == ["n1"]


def test_the_selected_rank_is_the_same_one_whatever_comes_and_goes() -> None:
    view = top.View()
    for key in ("down", "down", "right"):
        view.press(key, several(3))
    moved = answer(n1=(0.0, 7, 2, 3), n2=(0.0, 7, 2, 3))
    assert "n1" in "".join(lines(view, moved))
    # Once it is gone: whoever has its place, in the table.
    assert selected(view, answer(n2=(0.0, 7, 2, 3))) == ["n2"]
    assert selected(view, answer()) == []
    view.press("down", answer())


def test_of_many_ranks_those_about_the_selected_one_have_a_place() -> None:
    view, found = top.View(), several(100)
    for _ in range(51):
        view.press("down", found)
    shown = lines(view, found, 24)
    assert len(shown) <= 24
    assert "(here 42 to 57)" in shown[1]
    assert selected(view, found, 24) == ["n50"]
    assert len(lines(view, found)) > 100


def test_keys() -> None:
    text = "\x1b[Ajq\x1b[C\x1b\x1bOB?\r"
    assert list(keys_in(text)) == ["up", "down", "quit", "right", "left", "down", "right"]


def test_channels_have_half_of_the_terminal_where_there_are_groups() -> None:
    """And all ranks that do not fit are found by the arrows, as without channels."""
    many = [channel(*map(participant, range(100)), name=name) for name in ("a", "b")]
    view = top.View()
    for height in (32, 50, 100):
        found = several(200) | {"channels": many}
        text = [line.rstrip() for line in lines(view, found, height)]
        assert len(text) <= height
        assert "channel b: version 7, 1.0 kB" in text
        assert len([line for line in text if line.startswith("│ takes")]) >= 4
        alone = lines(view, found | {"groups": []}, height)
        assert len(text) - 8 <= len(alone) <= height
    assert lines(view, several(3) | {"channels": []}) == lines(view, several(3))


def test_participants_are_no_ranks_to_select() -> None:
    found = several(2) | {"channels": [channel(participant(1))]}
    own = {**found["groups"][0], "name": "channel policy/0", "channel": "policy"}
    found["groups"].insert(0, own)
    assert not [line for line in lines(top.View(), found) if "policy/0" in line]
    view = top.View()
    for _ in range(4):
        view.press("down", found)
    assert selected(view, found) == ["n1"]
