"""What participants of channels say, and how their groups are called."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest

from aiodist.wire import channels, schema
from aiodist.wire.channels import Said

WHO = "0123456789abcdef01234567"
SAID = Said(False, 5, 7, 1000, 300, 2.5, 2000, 10, 20, 30, 0.25, 2, 1, 250)


def has(
    version: int | None = 5,
    *,
    newest: int | None,
    whole: int = 0,
    slices: int = 0,
    publishes: bool = False,
) -> Said:
    here = whole + slices
    return replace(
        SAID, version=version, newest=newest, here=here, publishes=publishes, whole=whole
    )


@pytest.mark.parametrize("channel", ["policy", "a/b", "x\ny", WHO])
def test_groups_of_a_channel_are_known_by_their_names(channel: str) -> None:
    own = channels.own_group(channel, WHO)
    assert channels.participant_in(own) == (channel, WHO)
    pair = f"{own}/{'0' * 16}"
    assert channels.participant_in(pair) is None
    assert channels.channel_of(own) == channels.channel_of(pair) == channel


@pytest.mark.parametrize("name", ["train", "channel policy", f"channel /{WHO}", f"policy/{WHO}"])
def test_other_groups_are_of_no_channel(name: str) -> None:
    assert channels.channel_of(name) == ""
    assert channels.participant_in(name) is None


def test_what_was_said_is_read() -> None:
    assert channels.said_in(schema.pack(SAID)) == SAID


@pytest.mark.parametrize("value", [None, b"", b"\xc1", schema.pack([1, 2]), b"host"])
def test_what_makes_no_sense_is_not(value: bytes | None) -> None:
    assert channels.said_in(value) is None


def test_who_publishes() -> None:
    assert channels.publishers_in(msgpack.packb([["a", "h"], ["b", "h"], [3]])) == {"a", "b"}
    assert channels.publishers_in(None) == channels.publishers_in(b"\x07") == frozenset()


@pytest.mark.parametrize(
    ("said", "may"),
    [
        (None, True),  # unreadable
        (has(newest=None), True),  # it had not heard of version 6
        (has(newest=5, version=5, whole=9), True),
        (has(newest=6, version=5), False),
        (has(newest=6, whole=4, slices=9, version=5), False),  # no more than those that ask have
        (has(newest=6, whole=5, version=5), True),
        (has(newest=7, version=None), True),  # it may take version 6 now
        (has(newest=7, version=5), True),
        (has(newest=7, version=6), True),
        (has(newest=7, version=7), False),  # it has forgotten older ones
        (has(newest=7, version=7, publishes=True), True),  # it keeps some
        (has(newest=7, version=None, publishes=True), False),  # it has begun anew
    ],
)
def test_who_may_have_some_of_a_version(said: channels.Said | None, may: bool) -> None:
    found = channels.that_may_have({"a": said}, 6, 4)
    assert found == ({"a"} if may else set())


def test_who_may_have_slices_of_a_version() -> None:
    heard = {"a": has(newest=6), "b": has(newest=6, whole=1), "c": has(newest=6, slices=1)}
    assert channels.that_may_have(heard, 6) == {"b", "c"}
