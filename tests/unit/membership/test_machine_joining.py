"""Who gets in, with which rank, and when a group is complete."""

from __future__ import annotations

from typing import Any

import pytest

from aiodist.membership import group
from aiodist.membership.group import ranks_text
from aiodist.wire.messages import (
    EpochView,
    Evicted,
    Failed,
    Failure,
    JoinRequest,
    Leave,
    Left,
    Proof,
    Result,
    Status,
    StatusRequest,
    StoreCancel,
    StoreGet,
    StoreSet,
    Withdraw,
    Withdrawn,
)


def ranks(view: Any) -> dict[str, int]:
    assert isinstance(view, EpochView)
    return {member.id: member.rank for member in view.members}


def test_a_fixed_group_is_complete_with_its_last_joiner(world: Any) -> None:
    assert world.join(1, size=3, rank=2) == []
    assert world.join(2, size=3) == []
    assert world.mail == {}
    world.now = 5.0
    view = world.join(3, size=3, rank=0, name="n", host="h", metadata={"k": 1}, addresses=("a",))
    assert view.epoch == 1
    assert view.group == "g"
    assert ranks(view) == {"id-3": 0, "id-2": 1, "id-1": 2}
    first = view.members[0]
    assert (first.name, first.host, first.pid, first.metadata) == ("n", "h", 3, {"k": 1})
    assert (first.joined_at, view.members[1].joined_at) == (1005.0, 1000.0)
    assert first.addresses == ("a",)
    assert world.mail[1] == [(101, view)]
    assert world.mail[2] == [(102, view)]


def test_free_ranks_are_given_in_order_of_arrival(world: Any) -> None:
    world.join(5, size=4)
    world.join(3, size=4, rank=1)
    world.join(4, size=4)
    assert ranks(world.join(1, size=4)) == {"id-5": 0, "id-3": 1, "id-4": 2, "id-1": 3}


def test_a_taken_rank_is_refused_naming_its_holder(world: Any) -> None:
    world.join(1, size=3, rank=1, name="alpha", host="h1")
    refused = world.join(2, size=3, rank=1)
    assert refused.kind is Failure.RANK_TAKEN
    assert "rank 1 is held by 'alpha' (pid 1 on h1)" in refused.text
    assert "1 of 3 have joined; missing: ranks 0, 2" in refused.text
    assert world.mail == {}
    assert world.join(2, size=3, rank=2) == []


def test_another_size_is_refused(world: Any) -> None:
    world.join(1, size=3)
    refused = world.join(2, size=4, rank=3)
    assert refused.kind is Failure.SIZE_MISMATCH
    assert "with size 4, but the group was opened with size 3 by (pid 1 on" in refused.text
    assert "missing: any 2 (ranks are assigned)" in refused.text
    elastic = world.join(3, min_size=1)
    assert elastic.kind is Failure.SIZE_MISMATCH
    assert "asked to join with min_size 1, but" in elastic.text


def test_a_rank_outside_is_refused_and_leaves_no_group(world: Any) -> None:
    refused = world.join(1, size=2, rank=2)
    assert refused.kind is Failure.SIZE_MISMATCH
    assert "rank 2 is outside of a group with size 2: expected 0 to 1" in refused.text
    assert world.machine.is_empty


def test_a_complete_healthy_group_takes_nobody(world: Any) -> None:
    world.join(1)
    world.join(2)
    refused = world.join(3)
    assert refused.kind is Failure.COMPLETE
    assert "complete and healthy since epoch 1: all 2 ranks are members" in refused.text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"size": 2, "min_size": 1}, "one or the other"),
        ({"size": 2, "max_size": 2}, "one or the other"),
        ({"size": None}, "give size="),
        ({"min_size": 3, "max_size": 2}, "min_size=3 is over max_size=2"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(
    world: Any, fields: dict[str, int | None], text: str
) -> None:
    refused = world.join(1, **fields)
    assert refused.kind is Failure.INVALID
    assert text in refused.text
    assert world.machine.is_empty


def test_one_connection_is_one_member(world: Any) -> None:
    world.join(1)
    assert world.join(1, group="other").text == "this connection has joined already"


def test_the_number_that_waits_is_bounded(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "MAX_MEMBERS", 3)
    world.join(0, min_size=1, join_window=0)
    world.pass_time(1)
    for conn in (1, 2, 3):
        assert world.join(conn, min_size=1) == []
    assert "3 joiners wait already" in world.join(4, min_size=1).text


def test_an_elastic_group_says_how_many_it_needs(world: Any) -> None:
    world.join(1, min_size=2)
    assert world.say(1, Withdraw()).text.endswith("1 of at least 2 have joined")


def test_groups_and_runs_are_apart(world: Any) -> None:
    world.join(1, group="a", rank=0)
    world.join(2, group="b", rank=0)
    world.join(3, group="a", run_id="again", rank=0)
    assert ranks(world.join(4, group="a", run_id="again")) == {"id-3": 0, "id-4": 1}
    assert ranks(world.join(5, group="a")) == {"id-1": 0, "id-5": 1}
    assert world.read(2) == []


def test_a_waiting_joiner_that_disconnects_is_forgotten(world: Any) -> None:
    world.join(1, rank=0)
    world.cut(1)
    assert world.machine.is_empty
    world.join(2, rank=0)
    world.cut(7)
    assert ranks(world.join(3)) == {"id-2": 0, "id-3": 1}


def test_leaving_while_waiting_withdraws(world: Any) -> None:
    world.join(1)
    assert world.say(1, Leave()) == Left()
    assert world.machine.is_empty
    assert world.say(1, Leave()) == Left()


def test_who_gives_up_is_told_how_far_the_group_had_come(world: Any) -> None:
    world.join(1, size=4, rank=0)
    world.join(2, size=4, rank=2)
    assert world.say(1, Withdraw()) == Withdrawn(
        "the group is not complete: 2 of 4 have joined; missing: ranks 1, 3", (1, 3)
    )
    assert world.say(2, Withdraw()) == Withdrawn(
        "the group is not complete: 2 of 4 have joined (1 of them gave up waiting); missing: "
        "ranks 1, 3",
        (1, 3),
    )
    assert world.machine.is_empty
    assert world.say(2, Withdraw()) == []


def test_who_gives_up_is_told_of_those_that_were_refused(world: Any) -> None:
    world.join(1, size=2, rank=0)
    world.join(2, size=3, rank=1)
    world.join(3, size=2, rank=0)
    assert world.say(1, Withdraw()) == Withdrawn(
        "the group is not complete: 1 of 2 have joined; missing: rank 1; refused meanwhile: "
        "(pid 2 on an unknown host): asked to join with size 3, but the group was opened with "
        "size 2 by (pid 1 on an unknown host); (pid 3 on an unknown host): rank 0 is held by "
        "(pid 1 on an unknown host), which waits for the group to become complete",
        (1,),
    )


def test_a_process_that_was_refused_and_came_again_is_no_reason(world: Any) -> None:
    world.join(1, size=3, rank=0)
    world.join(2, size=3, rank=0)
    world.join(2, size=3, rank=1)
    assert world.say(1, Withdraw()) == Withdrawn(
        "the group is not complete: 2 of 3 have joined; missing: rank 2", (2,)
    )


def test_the_last_ones_that_were_refused_are_named(world: Any) -> None:
    world.join(1, size=2, rank=0)
    for conn in range(2, 7):
        world.join(conn, size=3, rank=1)
    text = world.say(1, Withdraw()).text
    assert [f"(pid {pid} " in text.partition("meanwhile")[2] for pid in range(2, 7)] == [
        False, False, True, True, True,
    ]  # fmt: skip


def test_those_who_came_too_early_are_not_called_missing(world: Any) -> None:
    world.join(1, size=3, rank=0)
    world.join(2, size=3, rank=1)
    world.say(1, Withdraw())
    world.join(3, size=3, rank=2)
    text = world.say(2, Withdraw()).text
    assert text.endswith("3 of 3 have joined (1 of them gave up waiting)")


def test_the_count_forgets_those_who_came_back(world: Any) -> None:
    world.join(1, size=4, rank=0)
    world.join(2, size=4, rank=1)
    world.join(3, size=4)
    world.say(1, Withdraw())
    world.say(3, Withdraw())
    world.join(4, size=4, rank=0)
    world.join(3, size=4)
    text = world.say(2, Withdraw()).text
    assert text.endswith("3 of 4 have joined; missing: any 1 (ranks are assigned)")


def test_withdrawing_after_the_view_changes_nothing(world: Any) -> None:
    world.join(1)
    world.join(2)
    world.read(1)
    assert world.say(1, Withdraw()) == []
    assert len(world.group()["members"]) == 2


def test_an_elastic_group_forms_at_once_with_its_largest_size(world: Any) -> None:
    world.join(1, min_size=1, max_size=2, rank=1)
    assert ranks(world.join(2, min_size=1, max_size=2)) == {"id-1": 1, "id-2": 0}
    assert world.machine.deadline() == 15.0  # the leases, no window


def test_an_elastic_group_forms_once_nobody_joined_for_the_window(world: Any) -> None:
    world.join(1, min_size=2, join_window=2.0)
    world.pass_time(10.0)
    assert world.read(1) == []
    world.join(2, min_size=2, join_window=9.0)
    world.pass_time(1.5)
    world.join(3, min_size=2)
    world.pass_time(1.5)
    assert world.read(1) == []
    world.pass_time(0.5)
    assert ranks(world.read(1)) == {"id-1": 0, "id-2": 1, "id-3": 2}


def test_an_elastic_group_that_shrinks_below_its_least_waits_on(world: Any) -> None:
    world.join(1, min_size=2, lease=100)
    world.join(2, min_size=2, lease=100)
    world.join(3, min_size=2, lease=100)
    world.cut(3)
    world.pass_time(0.5)
    world.cut(2)
    world.pass_time(5.0)
    assert world.read(1) == []
    world.join(4, min_size=2, lease=100)
    world.pass_time(1.0)
    assert ranks(world.read(1)) == {"id-1": 0, "id-4": 1}


def test_in_an_elastic_group_a_rank_is_a_wish(world: Any) -> None:
    world.join(1, min_size=2, max_size=9, rank=8)
    world.join(2, min_size=2, max_size=9, rank=1)
    world.pass_time(1.0)
    assert ranks(world.read(1)) == {"id-1": 0, "id-2": 1}


def test_max_size_alone_makes_an_elastic_group_of_one_or_more(world: Any) -> None:
    world.join(1, max_size=3)
    world.pass_time(1.0)
    assert ranks(world.read(1)) == {"id-1": 0}


def test_later_joiners_of_an_elastic_group_wait(world: Any) -> None:
    world.join(1, max_size=1)
    assert world.join(2, max_size=1) == []
    assert "runs in epoch 1 (it is elastic)" in world.say(2, Withdraw()).text


def test_a_silent_joiner_is_dropped(world: Any) -> None:
    world.join(1, size=3, lease=2.0)
    world.pass_time(1.5)
    world.join(2, size=3, lease=2.0)
    world.pass_time(0.5)
    assert world.read(1) == Evicted("no sign of life for 2 s")
    assert world.closed == {1: "no sign of life for 2 s"}
    assert [one["id"] for one in world.group()["waiting"]] == ["id-2"]


def test_a_silent_joiner_is_not_part_of_what_forms_at_that_moment(world: Any) -> None:
    world.join(1, min_size=1, join_window=2.0, lease=2.0)
    world.pass_time(2.0)
    assert world.read(1) == []
    assert world.closed == {1: "all of its group fell silent"}
    assert world.machine.is_empty


def test_the_store_is_for_members(world: Any) -> None:
    assert world.say(1, StoreGet("k")).kind is Failure.NOT_A_MEMBER
    assert world.say(1, StoreCancel(1)) == []
    world.join(1)
    assert world.say(1, StoreGet("k")).kind is Failure.NOT_A_MEMBER
    world.join(2)
    world.read(1)
    assert world.say(1, StoreSet("k", b"v")) == Result(None)
    assert world.say(2, StoreGet("k")) == Result(b"v")


def test_a_ttl_ends_by_the_clock(world: Any) -> None:
    world.join(1, size=1, lease=100.0)
    world.say(1, StoreSet("k", b"v", 5.0))
    world.pass_time(4.0)
    assert world.say(1, StoreGet("k")) == Result(b"v")
    world.pass_time(1.0)
    assert world.say(1, StoreGet("k")) == Result(None)


def test_what_a_member_does_not_say_closes_its_connection_alone(world: Any) -> None:
    world.join(1)
    assert world.say(2, Proof(b"")) == []
    assert world.say(1, Proof(b"")) == []
    assert world.closed == dict.fromkeys((1, 2), "a member does not send Proof messages")
    assert world.machine.is_empty


def test_the_status_tells_what_there_is(world: Any) -> None:
    world.join(1, size=2, rank=1, run_id="r", name="n")
    reply = world.say(9, StatusRequest())
    assert isinstance(reply, Status)
    assert reply.status == {
        "draining": False,
        "groups": [
            {
                "name": "g",
                "run_id": "r",
                "wanted": "size 2",
                "epoch": None,
                "size": None,
                "members": [],
                "waiting": [{"rank": 1, "id": "id-1", "host": "", "pid": 1, "name": "n"}],
                "lost": {},
                "left": [],
                "absent": [],
                "store": {"keys": 0, "bytes": 0},
                "channel": "",
                "averager": "",
            }
        ],
        "channels": [],
        "averagers": [],
    }
    world.join(2, size=2, run_id="r")
    world.say(2, StoreSet("k", b"v"))
    world.cut(1)
    found = world.group()
    assert (found["epoch"], found["size"]) == (1, 2)
    assert found["members"] == [
        {"rank": 0, "id": "id-2", "host": "", "pid": 2, "name": "", "joined_at": 1000.0}
    ]
    assert found["lost"] == {"1": "it broke"}
    assert found["store"] == {"keys": 1, "bytes": 2}


def test_texts_of_any_names_can_be_sent(world: Any) -> None:
    long = "\U0010ffff" * 256
    world.join(1, group=long, size=3, rank=0, name=long, host=long)
    refused = world.say(
        2, JoinRequest(group=long, id="2", size=2, rank=0, name=long, host=long), request=1
    )
    assert isinstance(refused, Failed)
    assert len(refused.text) <= 4096


def test_ranks_are_listed_in_stretches() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([2, 0, 1, 5]) == "ranks 0-2, 5"
    assert ranks_text(range(0, 80, 2)).endswith("28, 30, ...")
