"""What participants of channels say, and how their groups are called."""

from __future__ import annotations

import msgpack
import pytest

from aiodist.wire import channels, schema
from aiodist.wire.channels import Said

WHO = "0123456789abcdef01234567"
SAID = Said(False, 5, 7, 1000, 300, 2.5, 2000, 10, 20, 30, 0.25, 2, 1)


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
