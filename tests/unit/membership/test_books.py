"""Stores that groups have in common: for as long as one of them is there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aiodist.membership.effects import Tick
from aiodist.membership.records import decode_records
from aiodist.membership.silence import RETURN_SECONDS
from aiodist.wire.messages import (
    EpochView,
    Failed,
    JoinRequest,
    Leave,
    Left,
    Result,
    StoreChanged,
    StoreGet,
    StoreSet,
    StoreWatch,
)
from aiodist.wire.returning import Rejoin, Rejoined, ViewWanted


def join(world, conn, name=None, store="channel", **fields):
    return world.join(conn, name or f"g{conn}", size=1, store=store, **fields)


def test_groups_that_name_a_store_have_it_in_common(world):
    for conn in (1, 2):
        assert isinstance(join(world, conn), EpochView)
    assert isinstance(join(world, 3, store=""), EpochView)
    assert isinstance(join(world, 4, run_id="another"), EpochView)
    assert world.say(1, StoreSet("k", b"value")) == Result(None)
    assert world.say(2, StoreGet("k")) == Result(b"value")
    assert world.say(3, StoreGet("k")) == Result(None)
    assert world.say(4, StoreGet("k")) == Result(None)


def test_a_watch_hears_what_another_group_does_and_a_ttl_ends(world):
    join(world, 1)
    join(world, 2)
    assert world.say(1, StoreWatch("k"), request=7) == Result(None)
    world.say(2, StoreSet("k", b"v", ttl=2.0))
    assert world.read(1) == StoreChanged("k", b"v")
    world.pass_time(3)
    assert world.read(1) == StoreChanged("k", None)
    assert world.say(2, StoreGet("k")) == Result(None)


@pytest.mark.parametrize("end", ["leave", "cut"])
def test_the_last_one_takes_it_along(world, end):
    join(world, 1)
    join(world, 2)
    world.say(1, StoreSet("k", b"v", ttl=10.0))

    def go(conn):
        if end == "leave":
            assert world.say(conn, Leave()) == Left()
        else:
            world.cut(conn)

    go(1)
    assert world.say(2, StoreGet("k")) == Result(b"v")
    go(2)
    assert world.machine.deadline() is None  # nor is its ttl left
    join(world, 3)
    assert world.say(3, StoreGet("k")) == Result(None)


def test_a_ttl_that_is_over_in_the_moment_in_which_the_last_one_is_lost(world):
    join(world, 1, lease=5.0)
    world.say(1, StoreSet("k", b"v", ttl=5.0 + RETURN_SECONDS))
    world.pass_time(5.0)  # nobody is heard any more
    world.now = 5.0 + RETURN_SECONDS
    world.step(Tick())
    assert world.machine.is_empty
    assert world.machine.deadline() is None


def test_members_of_one_group_ask_for_the_same_store(world):
    assert world.join(1, size=2, store="one") == []
    refused = world.join(2, size=2, store="other")
    assert isinstance(refused, Failed)
    assert "asked for the store 'other'" in refused.text
    assert "has 'one'" in refused.text


@pytest.mark.parametrize("durable", [True, False])
def test_a_coordinator_that_comes_back_has_it_empty_and_in_common(world, durable):
    """Which store it is, each member says when it comes back; what was in it, they write again."""
    first = type(world)(keep=True)
    views = {conn: join(first, conn) for conn in (1, 2)}
    first.say(1, StoreSet("k", b"before"))
    back = type(world)(keep=True)
    if durable:
        back.machine.restore(decode_records(first.kept), 0.0)
    records = list(first.machine.records())
    assert b"before" not in repr(records).encode()
    for conn, view in views.items():
        claim = Rejoin(ask(conn), 0, view.epoch, view.digest, (), ())
        reply = back.say(conn, claim)
        if not durable:
            assert reply == ViewWanted()
            reply = back.say(conn, Rejoin(ask(conn), 0, view.epoch, view.digest, (), (), view))
        assert reply == Rejoined((), ())
    assert back.say(2, StoreGet("k")) == Result(None)
    back.say(1, StoreSet("k", b"after"))
    assert back.say(2, StoreGet("k")) == Result(b"after")


def test_a_join_that_was_written_down_and_not_answered_is_for_the_store_in_common(world):
    first = type(world)(keep=True)
    join(first, 1)
    back = type(world)(keep=True)
    back.machine.restore(decode_records(first.kept), 0.0)
    for conn in (1, 2):
        assert isinstance(join(back, conn), EpochView)
    back.say(2, StoreSet("k", b"v"))
    assert back.say(1, StoreGet("k")) == Result(b"v")


def ask(conn):
    return JoinRequest(group=f"g{conn}", id=f"id-{conn}", pid=conn, size=1, store="channel")


def test_who_comes_back_with_another_store_changes_nothing(world):
    views = {conn: join(world, conn) for conn in (1, 2)}
    world.say(1, StoreSet("k", b"v"))
    world.cut(1)
    view = join(world, 1)
    for number, store in ((11, "other"), (12, "")):
        claim = Rejoin(replace(ask(1), store=store), 0, view.epoch, view.digest, (), ())
        assert world.say(number, claim) == Rejoined((), ())
        assert world.say(number, StoreGet("k")) == Result(b"v")
    assert views[2].group == "g2"
    for conn in (2, 12):
        world.say(conn, Leave())
    assert world.machine.is_empty
    assert not world.machine._books._shared
