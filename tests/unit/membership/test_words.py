"""What people are told in words."""

from __future__ import annotations

from typing import Any

import pytest

from aiodist.membership import words


def wait(**more: Any) -> dict[str, Any]:
    return {"what": "barrier #3", "seconds": 4.0, "missing": "rank 2", "lacking": "", **more}


@pytest.mark.parametrize(
    ("doing", "text"),
    [
        (None, "no answer; last sign of life 9 s ago"),
        ({"busy": 240.0, "waits": []}, "busy for at least 4 min"),
        ({"busy": 0.0, "waits": []}, "in no operation"),
        ({"busy": 0.0, "waits": [wait()]}, "4 s in barrier #3, for rank 2"),
        (
            {"busy": 0.0, "waits": [wait(missing="", lacking="the key x"), wait()]},
            "4 s in barrier #3, the key x (and 1 more)",
        ),
    ],
)
def test_what_a_rank_does(doing: dict[str, Any] | None, text: str) -> None:
    assert words.doing({"silent": 9.0, "doing": doing}) == text


def finding(count: int = 1, **more: Any) -> dict[str, Any]:
    held = [{"what": f"all_reduce #{n}", "ranks": (0, 1), "seconds": 12.0} for n in range(count)]
    return {"culprits": (2,), "held": held, "deadlock": False, "lacking": "", **more}


def test_who_is_to_blame() -> None:
    assert words.verdict(finding()) == "rank 2 holds up others"
    assert words.verdict(finding(culprits=(2, 3))) == "ranks 2-3 hold up others"
    assert (
        words.verdict(finding(culprits=(0, 5), deadlock=True)) == "ranks 0, 5 wait for each other"
    )
    assert words.verdict(finding(culprits=(), lacking="nobody sets x")) == "nobody sets x"
    assert words.held(finding()) == "ranks 0-1 in all_reduce #0 for 12 s"
    assert words.held(finding(2), times=False) == (
        "ranks 0-1 in all_reduce #0; ranks 0-1 in all_reduce #1"
    )
    assert words.held(finding(20)).endswith("#7 for 12 s; ...")


def test_times() -> None:
    assert [words.duration(one) for one in (-1, 3.4, 119, 120, 7199, 7200)] == [
        "0 s", "3 s", "119 s", "2 min", "120 min", "2.0 h",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("event", "ranks", "fields", "text"),
    [
        ("formed", "", {"epoch": 1, "size": 4}, "epoch 1 begins with 4 ranks"),
        ("went on", "", {"epoch": 2, "size": 1}, "epoch 2 goes on with 1 rank"),
        ("restored", "", {"epoch": 2, "size": 3}, "epoch 2 of 3 ranks is known again"),
        ("waiting", "rank 1", {"who": "n1"}, "rank 1 asked to join: n1"),
        ("waiting", "", {"who": "n1"}, "a process asked to join: n1"),
        ("withdrawn", "", {"who": "n1", "reason": "gone"}, "n1 does not wait any more: gone"),
        ("lost", "ranks 1-2", {"reason": "no sign of life"}, "ranks 1-2 lost: no sign of life"),
        ("aborted", "rank 1", {"reason": "it aborted: x"}, "rank 1 aborted: it aborted: x"),
        ("left", "rank 1", {}, "rank 1 left"),
        ("back", "rank 1", {}, "rank 1 came back to the coordinator"),
        ("silent", "", {"ranks": 3}, "nothing is heard of any member (3 ranks)"),
        (
            "stalled",
            "rank 0",
            {"what": "barrier #3", "missing": "rank 2", "seconds": 11.6, "why": "rank 2: busy"},
            "a stall begins: barrier #3 has waited for 12 s for rank 2, says rank 0: rank 2: busy",
        ),
        (
            "stalled",
            "",
            {"what": "join", "seconds": 10.0, "why": "1 of 2 have joined"},
            "a stall begins: join has waited for 10 s, says a process: 1 of 2 have joined",
        ),
        ("stall over", "", {"seconds": 40.2}, "the stall is over, after 40 s"),
        ("deleted", "", {}, "the group has ended"),
        ("join refused", "", {"who": "n1", "kind": "taken"}, "n1 may not join: taken"),
        ("return refused", "", {"who": "n1", "reason": "late"}, "n1 may not come back: late"),
    ],
)
def test_what_happened(event: str, ranks: str, fields: dict[str, Any], text: str) -> None:
    assert words.happened(event, ranks, fields) == text
