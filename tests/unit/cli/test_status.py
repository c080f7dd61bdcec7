"""How the answer of a coordinator is shown."""

from __future__ import annotations

from typing import Any

import surveyed
from averagers_shown import averager
from rich.console import Console
from surveyed import channel, participant

from aiodist_cli import status

NOW = 1_000_000.0


def shown(**groups: Any) -> str:
    console = Console(width=160, no_color=True)
    groups = {"findings": []} | groups if groups else {}
    found = {"address": "tcp://h:1", "draining": False, "groups": [groups] if groups else []}
    with console.capture() as capture:
        console.print(status.render(found, NOW))
    return capture.get()


def member(rank: int | None, **more: object) -> dict[str, object]:
    doing = {"silent": 3.0, "doing": None}
    return {"rank": rank, "id": "x", "host": "10.0.0.1", "pid": 7, "name": "me"} | doing | more


def doing(**more: object) -> dict[str, object]:
    return {"age": 0.1, "busy": 0.0, "places": [], "last": "", "waits": []} | more


def test_no_groups() -> None:
    assert shown() == "coordinator tcp://h:1: 0 groups\n"


def test_nothing_that_a_terminal_obeys_is_shown() -> None:
    """Neither names, nor reasons that a member gave for the loss of another one."""
    evil = "\x1b]0;evil\x07\x9b2J\u202e"
    text = shown(
        name=evil,
        epoch=2,
        size=3,
        wanted="3",
        members=[member(0, joined_at=NOW, name=evil, host=evil, doing=doing(places=[evil]))],
        waiting=[],
        lost={"1": f"no link: {evil}"},
        left=[],
        absent=[2],
    )
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*text}
    assert "lost: no link: ?]0;evil??2J?" in text
    assert "may still come back to the coordinator" in text


def test_a_group_that_runs() -> None:
    text = shown(
        name="train",
        epoch=2,
        size=4,
        wanted="4",
        members=[
            member(0, joined_at=NOW - 5, doing=doing(places=["t.py:3 in f"])),
            member(1, joined_at=NOW - 600),
        ],
        waiting=[member(None, name="[red]x[/red]")],
        lost={"2": "its connection broke"},
        left=[3],
    )
    assert "group train: epoch 2, 2 of 4 ranks" in text
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    assert [row for row in rows if row] == [
        ["0", "me", "10.0.0.1", "7", "member for 5 s", "in no operation at t.py:3 in f"],
        [
            "1", "me", "10.0.0.1", "7", "member for 10 min",
            "no answer; last sign of life 3 s ago",
        ],
        ["any", "[red]x[/red]", "10.0.0.1", "7", "waiting to join", ""],
        ["2", "", "", "", "lost: its connection broke", ""],
        ["3", "", "", "", "left", ""],
    ]  # fmt: skip


WAIT = {"what": "all_reduce #57", "seconds": 12.3, "missing": "rank 2", "lacking": ""}


def test_who_holds_up_whom_and_where() -> None:
    busy = doing(busy=13.0, places=["t.py:57 in step", "t.py:80 in main"])
    text = shown(
        name="train",
        epoch=1,
        size=3,
        wanted="3",
        members=[
            member(0, joined_at=NOW, doing=doing(waits=[WAIT])),
            member(1, joined_at=NOW, doing=doing(waits=[WAIT, WAIT])),
            member(2, joined_at=NOW, doing=busy),
        ],
        waiting=[],
        lost={},
        left=[],
        findings=[
            {
                "culprits": [2],
                "held": [{"what": "all_reduce #57", "ranks": [0, 1], "seconds": 12.3}],
                "deadlock": False,
                "lacking": "",
            }
        ],
    )
    cells = " ".join(text.replace("│", " ").split())
    assert "12 s in all_reduce #57, for rank 2" in cells
    assert text.splitlines()[-3:] == [
        "rank 2 holds up others: ranks 0-1 in all_reduce #57 for 12 s",
        "  rank 2: busy for at least 13 s at t.py:57 in step",
        "    t.py:80 in main",
    ]


def test_what_nobody_has_set_and_who_waits_for_it() -> None:
    wait = {
        "what": "store.wait",
        "seconds": 12.3,
        "missing": "",
        "lacking": "key 'k\x1b' is not set",
    }
    text = shown(
        name="train",
        epoch=1,
        size=1,
        wanted="1",
        members=[member(0, joined_at=NOW, doing=doing(places=["t.py:3 in f"], waits=[wait]))],
        waiting=[],
        lost={},
        left=[],
        findings=[
            {
                "culprits": [],
                "held": [{"what": "store.wait", "ranks": [0], "seconds": 12.3}],
                "deadlock": False,
                "lacking": wait["lacking"],
            }
        ],
    )
    cells = " ".join(text.replace("│", " ").split())
    assert "12 s in store.wait, key 'k?' is not set at t.py:3 in f" in cells
    assert text.splitlines()[-1] == "key 'k?' is not set: rank 0 in store.wait for 12 s"


def test_many_culprits_and_a_deadlock_stay_readable() -> None:
    held = [{"what": f"recv tag {n}", "ranks": [n], "seconds": 2.0} for n in range(20)]
    text = shown(
        name="train",
        epoch=1,
        size=20,
        wanted="20",
        members=[member(n, joined_at=NOW) for n in range(20)],
        waiting=[],
        lost={},
        left=[],
        findings=[
            {"culprits": list(range(20)), "held": held, "deadlock": True, "lacking": ""},
        ],
    )
    last = text[text.index("ranks 0-19 wait for each other: ") :]
    assert last.endswith("  and 12 more\n")
    assert "recv tag 7 for 2 s; ..." in " ".join(last.split())


def test_nothing_from_the_network_steers_the_terminal() -> None:
    text = shown(
        name="g",
        epoch=1,
        size=1,
        wanted="1",
        members=[member(0, joined_at=NOW, name="a\x1b[2Jb", doing=doing(places=["\x1b]0;x\x07"]))],
        waiting=[],
        lost={},
        left=[],
    )
    assert "\x1b" not in text
    assert "a?[2Jb" in text


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


def test_a_narrow_terminal_hides_no_line_of_a_program() -> None:
    there = doing(places=["a_folder/of_long_names/training_loop.py:1234 in main"])
    found = {"name": "g", "epoch": 1, "size": 1, "wanted": "1", "waiting": [], "lost": {}}
    group = found | {"members": [member(0, joined_at=NOW, doing=there)], "left": [], "findings": []}
    console = Console(width=70, no_color=True)
    with console.capture() as capture:
        console.print(status.render({"address": "a", "draining": False, "groups": [group]}, NOW))
    lines = [line.split("│")[-2].strip() for line in capture.get().splitlines() if "│" in line]
    assert "training_loop.py:1234" in "".join(lines)


def test_draining_is_said() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(status.render({"address": "a", "draining": True, "groups": []}, NOW))
    assert "draining: it takes no new members" in capture.get()


def channels_shown(*channels: dict[str, Any], groups: list[dict[str, Any]] | None = None) -> str:
    console = Console(width=160, no_color=True)
    answer = surveyed.found() | {"channels": list(channels), "groups": groups or []}
    with console.capture() as capture:
        console.print(status.render(answer, NOW))
    return capture.get()


def test_what_differences_between_versions_did() -> None:
    out = participant(0, changed=0.0225) | {"publishes": True}
    text = channels_shown(
        channel(out, participant(1, saved=5_000_000, chain=3, fallbacks=2), participant(2, chain=1))
    )
    assert "2.25% changed" in text
    assert "chain of 3, 5.0 MB saved, 2 chunks failed" in text
    assert "chain of 1" not in text
    assert "deltas" not in channels_shown(channel(participant(1)))


def test_channels_and_who_is_behind() -> None:
    out = participant(0, version=7, lag=0, behind=0.0, here=1000, sent=5000)
    silent = participant(3) | {"said": None, "name": "\x1b[2J"}
    none = participant(2, version=None, lag=None, behind=8.0, nbytes=0)
    own = surveyed.group(surveyed.member(0), name="channel policy/0", channel="policy")
    text = channels_shown(
        channel(participant(1), none, silent, out | {"publishes": True}), groups=[own]
    )
    assert [line.rstrip() for line in text.splitlines()[:2]] == [
        "coordinator tcp://127.0.0.1:1: 0 groups",
        "channel policy: version 7, 1.0 kB",
    ]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    assert [row for row in rows if row] == [
        ["publishes", "", "h", "100", "7", "", "100 %", "0 bytes", "5.0 kB", "0 bytes"],
        ["takes", "?[2J", "h", "103", "", "no sign of life", "", "", "", ""],
        ["takes", "", "h", "102", "none", "8 s", "", "0 bytes", "0 bytes", "0 bytes"],
        ["takes", "", "h", "101", "5", "by 2, 3 s", "0 %", "0 bytes", "0 bytes", "0 bytes"],
    ]
    assert "channel policy: no version yet" in channels_shown(channel(newest=None))


def test_of_many_who_are_behind_some_are_listed() -> None:
    text = channels_shown(channel(*map(participant, range(status.MOST_PARTICIPANTS + 6))))
    assert text.splitlines()[-1] == "and 6 more, none of which is further behind"


def test_averagers_and_who_is_late() -> None:
    own = surveyed.group(surveyed.member(0), name="averager outer/0", averager="outer")
    text = averagers_shown(averager(), groups=[own])
    assert "0 groups" in text
    assert "averager outer: 3 members, quorum 2, grace auto, int8(block=256)" in text
    assert "3.0 kB saved" in text
    assert "m2 3 s " in text
    assert "open, 1 in" in text
    fresh = averager(grace=2.0, codec="")
    fresh["parts"][0] |= {"rounds": [], "round": 0, "late": {}}
    for one in fresh["members"]:
        one["said"] = None
    text = averagers_shown(fresh, groups=[])
    assert "quorum 2, grace 2 s" in text
    assert "saved" not in text
    assert "m2" not in text
    later = averager()
    later["parts"][0]["round"] = 9
    assert "m2 3 s (round 7)" in averagers_shown(later, groups=[])


def test_what_codecs_have_saved_a_group() -> None:
    saved = [surveyed.member(rank, doing=surveyed.doing(saved=2000)) for rank in range(2)]
    text = averagers_shown(averager(), groups=[surveyed.group(*saved)])
    assert "group train: epoch 1, 2 of 2 ranks, 4.0 kB saved by codecs" in text


def averagers_shown(one: dict[str, Any], groups: list[dict[str, Any]]) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        answer = surveyed.found() | {"averagers": [one], "groups": groups}
        console.print(status.render(answer, NOW))
    return capture.get()
