"""Channels of weights, by what their participants say in their store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack

from aiodist.membership.records import decode_records
from aiodist.wire import channels, schema
from aiodist.wire.channels import Said
from aiodist.wire.messages import (
    EpochView,
    Failed,
    Failure,
    Leave,
    Result,
    StoreDelete,
    StoreGet,
    StoreSet,
)

SAID = Said(False, 5, 7, 1000, 300, 2.5, 2000, 10, 20, 30, 0.25, 2, 1, 250)


def come(world: Any, conn: int, said: Said | None = None, channel: str = "policy") -> str:
    """One more participant; its id."""
    who = f"{conn:024x}"
    name, store = channels.own_group(channel, who), channels.store_of(channel)
    assert isinstance(world.join(conn, name, size=1, store=store, host="h"), EpochView)
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
            "memory": 2000, "sent": 10, "received": 20, "saved": 30, "changed": 0.25,
            "chain": 2, "fallbacks": 1, "whole": 250, "lag": 2,
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


def _release(version: int, share: int = 0, shares: int = 1, check: int = 7) -> list[Any]:
    return [version, 10, 100, 64, check, share, shares, False, "host", "offer", b"key"]


def _published(*releases: list[Any], before: bytes | None = None) -> Any:
    value = channels.published(before, msgpack.packb(releases))
    return value and [(one[0], one[5]) for one in msgpack.unpackb(value)]


def test_what_was_published_last_never_goes_back() -> None:
    assert _published(_release(1), _release(3)) == [(3, 0)]
    three = channels.published(None, msgpack.packb([_release(3)]))
    assert three is not None
    assert b"offer" not in three
    assert _published(_release(2), before=three) == [(3, 0)]
    assert _published(before=three) == [(3, 0)]
    # Of two shares, and of those that were begun since, the last one of each share.
    two = [_release(4, 0, 2), _release(4, 1, 2), _release(5, 0, 2), _release(6, 0, 2)]
    assert _published(*two, before=three) == [(4, 0), (4, 1), (6, 0)]
    for nonsense in (b"\xc1", b"\x07", msgpack.packb([[]]), msgpack.packb([["x"] * 11])):
        assert channels.published(three, nonsense) == three


def test_what_was_published_outlives_the_channel_and_the_coordinator(world: Any) -> None:
    first = type(world)(keep=True)
    come(first, 1)
    first.say(1, StoreSet(channels.RELEASES, msgpack.packb([_release(7)])))
    first.say(1, Leave())
    again = type(world)(keep=True)
    again.machine.restore(decode_records(first.kept), 0.0)
    compacted = type(world)(keep=True)
    compacted.machine.restore(first.machine.records(), 0.0)
    for one in (first, again, compacted):
        come(one, 2)
        assert one.say(2, StoreGet(channels.RELEASES)) == Result(None)
        value = one.say(2, StoreGet(channels.PUBLISHED)).value
        assert msgpack.unpackb(value) == [_release(7)[:7]]
    come(first, 3, channel="another")
    assert first.say(3, StoreGet(channels.PUBLISHED)) == Result(None)


def test_it_is_forgotten_when_nobody_takes_anything(world: Any) -> None:
    world = type(world)(keep=True)
    me = come(world, 1)
    world.say(1, StoreSet(channels.PUBLISHER, msgpack.packb([[me, "h"]])))
    world.say(1, StoreSet(channels.RELEASES, msgpack.packb([_release(7)])), request=2)
    come(world, 2)
    refused = world.say(1, StoreDelete(channels.PUBLISHED))
    assert refused == Failed(
        Failure.INVALID, "there are subscribers (1), which wait for higher numbers"
    )
    world.cut(2)  # it may come back, and is not there
    assert world.say(1, StoreDelete(channels.PUBLISHED), request=3) == Result(True)
    world.say(1, Leave())
    after = type(world)()
    after.machine.restore(decode_records(world.kept), 0.0)
    for one in (world, after):
        come(one, 3)
        assert one.say(3, StoreGet(channels.PUBLISHED)) == Result(None)
