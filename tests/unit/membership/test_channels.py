"""Channels of weights, by what their participants say in their store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack

from aiodist.wire import channels, schema
from aiodist.wire.channels import Said
from aiodist.wire.messages import Leave, StoreSet, View

SAID = Said(False, 5, 7, 1000, 300, 2.5, 2000, 10, 20)


def come(world: Any, conn: int, said: Said | None = None, channel: str = "policy") -> str:
    """One more participant; its id."""
    who = f"{conn:024x}"
    name, store = channels.own_group(channel, who), channels.store_of(channel)
    assert isinstance(world.join(conn, name, size=1, store=store, host="h"), View)
    if said is not None:
        world.say(conn, StoreSet(channels.at(who), schema.pack(said), ttl=3.5))
    return who


def known(world: Any) -> Any:
    return world.machine.status()["channels"]


def test_who_has_which_version(world: Any) -> None:
    publisher = come(world, 1, replace(SAID, publishes=True, version=7, behind=0.0))
    come(world, 2, SAID)
    come(world, 3, replace(SAID, version=None, newest=None, nbytes=0))
    world.join(4, "train", size=1)
    [channel] = known(world)
    assert (channel["name"], channel["newest"], channel["nbytes"]) == ("policy", 7, 1000)
    first, second, third = channel["participants"]
    assert (first["publishes"], first["said"]["lag"], first["pid"]) == (True, 0, 1)
    assert second == {
        "id": "id-2", "name": "", "host": "h", "pid": 2, "publishes": False,
        "said": {
            "version": 5, "newest": 7, "nbytes": 1000, "here": 300, "behind": 2.5,
            "memory": 2000, "sent": 10, "received": 20, "lag": 2,
        },
    }  # fmt: skip
    assert third["said"]["lag"] is None
    of = {one["name"]: one["channel"] for one in world.machine.status()["groups"]}
    assert of == {channels.own_group("policy", f"{conn:024x}"): "policy" for conn in (1, 2, 3)} | {
        "train": ""
    }
    world.say(1, StoreSet(channels.PUBLISHER, msgpack.packb([[publisher, "h"]])), request=2)
    world.pass_time(4.0)  # no signs of life
    [channel] = known(world)
    assert (channel["newest"], channel["nbytes"]) == (None, 0)
    assert [one["said"] for one in channel["participants"]] == [None] * 3
    assert [one["publishes"] for one in channel["participants"]] == [True, False, False]


def test_who_is_gone_is_shown_no_more(world: Any) -> None:
    come(world, 1, SAID)
    come(world, 2, SAID)
    come(world, 3, SAID, channel="another")
    world.say(1, Leave())
    [[name, participants], another] = [
        (channel["name"], channel["participants"]) for channel in known(world)
    ]
    assert (name, [one["id"] for one in participants]) == ("policy", ["id-2"])
    assert another[0] == "another"
    world.cut(2)
    world.cut(3)
    world.pass_time(60.0)
    assert known(world) == []


def test_groups_that_only_have_such_a_name(world: Any) -> None:
    """One of two ranks, one that forms, and one whose store is its own."""
    who = f"{1:024x}"
    for conn in (1, 2):
        world.join(conn, channels.own_group("policy", who), size=2, rank=conn - 1)
    world.join(3, channels.own_group("policy", f"{3:024x}"), size=2)
    world.join(4, channels.own_group("other", who), size=1)
    [channel] = known(world)
    assert (channel["name"], channel["newest"]) == ("other", None)
    assert [one["said"] for one in channel["participants"]] == [None]
