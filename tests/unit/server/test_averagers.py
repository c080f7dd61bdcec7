"""Averagers, as the page is told of them."""

from __future__ import annotations

import json
from typing import Any

from averagers_shown import averager
from surveyed import found

from aiodist_server import averagers as limits
from aiodist_server.averagers import averagers


def shown(one: dict[str, Any]) -> Any:
    """As the page reads it."""
    [plain] = json.loads(json.dumps(averagers(found() | {"averagers": [one]})))
    return plain


def test_members_have_a_cell_for_each_round() -> None:
    one = averager()
    one["members"][1]["said"] = None
    plain = shown(one)
    assert (plain["name"], plain["count"], plain["silent"]) == ("outer", 3, 1)
    assert (plain["quorum"], plain["grace"], plain["codec"]) == (2, None, "int8(block=256)")
    assert plain["saved"] == 2000
    [part] = plain["parts"]
    assert (part["part"], part["round"], part["state"]) == ("encoder", 7, "open")
    assert (part["contributed"], part["missing"], part["rounds"]) == (1, ["m1"], [[7, 1.5]])
    assert [(row["name"], row["where"], row["cells"]) for row in part["members"]] == [
        ("m0", "pid 0 on h", [["in", 1.0]]),
        ("m1", "pid 1 on h", [["in", 2.0]]),
        ("m2", "pid 2 on h", [["late", 3.0]]),
    ]
    assert "id1" not in json.dumps(plain)


def test_members_that_are_gone_are_shown_with_their_rounds() -> None:
    one = averager()
    last = one["parts"][0]["rounds"][0]
    later = {**last, "round": 8, "contributors": ["m0", "m3"], "late": {}}
    one["parts"][0]["rounds"] = [last, later]
    del one["members"][1]  # m1, which was in round 7
    [part] = shown(one)["parts"]
    assert [(row["name"], row["gone"]) for row in part["members"]] == [
        ("m0", False), ("m2", False), ("m1", True), ("m3", True),
    ]  # fmt: skip
    assert part["members"][2]["cells"] == [["in", 2.0], ["out", None]]
    assert part["members"][1]["cells"] == [["late", 3.0], ["out", None]]


def test_a_part_shows_only_members_that_take_part_in_it() -> None:
    one = averager()
    one["parts"].append({**one["parts"][0], "part": "decoder", "rounds": [], "missing": []})
    one["members"][2]["parts"] = ["encoder", "decoder"]
    encoder, decoder = shown(one)["parts"]
    assert len(encoder["members"]) == 3
    assert [row["name"] for row in decoder["members"]] == ["m2"]
    assert decoder["members"][0]["cells"] == []


def test_much_is_cut(monkeypatch: Any) -> None:
    monkeypatch.setattr(limits, "MOST_MEMBERS", 2)
    monkeypatch.setattr(limits, "MOST_PARTS", 1)
    one = averager()
    one["parts"] += [{**one["parts"][0], "part": "decoder"}]
    plain = shown(one)
    assert plain["left_out"] == 1
    [part] = plain["parts"]
    assert (len(part["members"]), part["left_out"]) == (2, 1)
