"""How messages travel: limits, and what ranks of one process share."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from aiodist.errors import MessageTooLargeError, ProtocolError
from aiodist.wire import codec
from aiodist.wire.frames import Decoder, Frame
from aiodist.wire.limits import MAX_BODY, MAX_REPLY, MAX_TEXT
from aiodist.wire.messages import EpochView, Evicted, MemberInfo, Renew, Status

VIEW = EpochView("g", 1, (MemberInfo(0, "a", "host", 1, "", {}, 0.0, "", ()),))


def framed(data: bytes) -> Frame:
    [frame] = Decoder(max_payload=MAX_REPLY).feed(data)
    return frame


def test_ranks_of_one_process_share_what_has_many_rows() -> None:
    frame = framed(codec.encode_message(VIEW, 3))
    number, first = codec.decode_message(frame)
    assert (number, first) == (3, VIEW)
    assert codec.decode_message(frame)[1] is first
    other = framed(codec.encode_message(replace(VIEW, epoch=2)))
    assert codec.decode_message(other)[1] is not first


def test_what_nobody_has_is_not_kept() -> None:
    before = len(codec._shared)
    found = codec.decode_message(framed(codec.encode_message(replace(VIEW, epoch=77))))
    assert len(codec._shared) == before + 1
    del found
    gc.collect()
    assert len(codec._shared) == before


def test_only_who_expects_them_takes_many_rows() -> None:
    with pytest.raises(ProtocolError, match="the message EpochView is not expected here"):
        codec.decode_message(framed(codec.encode_message(VIEW)), rows=False)
    assert codec.decode_message(framed(codec.encode_message(Renew())), rows=False) == (0, Renew())


def test_who_makes_a_message_that_would_be_refused_hears_so() -> None:
    with pytest.raises(ValueError, match=f"a Evicted message needs .* {MAX_TEXT} characters"):
        codec.encode_message(Evicted("x" * (MAX_TEXT + 1)))
    large = Status({"x": "y" * MAX_BODY})
    with pytest.raises(MessageTooLargeError, match="a Status message of"):
        codec.encode_message(large)
    assert codec.encode_message(large, max_body=MAX_REPLY)


def test_a_body_is_the_same_for_all_who_are_sent_it() -> None:
    body = codec.encode_body(Evicted("why"))
    for request in (0, 9):
        assert codec.frame_of(Evicted("why"), request, body) == codec.encode_message(
            Evicted("why"), request
        )
