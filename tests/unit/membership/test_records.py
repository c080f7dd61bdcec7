"""Records of the log: what is written is read, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aiodist.membership.records import (
    Answered,
    AveragerDecided,
    AveragerEntered,
    AveragerRecorded,
    Ended,
    EpochGiven,
    Formed,
    Gone,
    Published,
    Stored,
    decode_records,
    encode_record,
)
from aiodist.wire import averaging
from aiodist.wire.limits import MAX_METADATA
from aiodist.wire.messages import EpochView, MemberInfo, Result

VIEW = EpochView("g", 3, (MemberInfo(0, "a", "host", 1, "", {}, 0.0, "", ()),))
LONG = EpochView("g", 3, (replace(VIEW.members[0], metadata={"a": [1] * (MAX_METADATA - 6)}),))
RECORDS = [
    EpochGiven("g", 3),
    Formed(VIEW, "run", True, 1, 1, 0.0, "someone"),
    Gone("g", "run", (0,), "it crashed"),
    Gone("g", "run", (0,), None),
    Formed(LONG, "run", True, 1, 1, 0.0, "someone"),
    Ended("g", "run", 3),
    Stored("g", "run", "k", b"v", 12.5),
    Stored("g", "run", "k", None, None),
    Answered("g", "run", "a", 7, Result(True)),
    Published("channel policy", "run", b"v"),
    Published("channel policy", "run", None),
    AveragerEntered("g", "run", "a", averaging.Rules(2, None, "AVG", ""), ("", "x"), 1),
    AveragerDecided(
        "g",
        "run",
        b"form",
        "float32[3]",
        averaging.AverageDecision("", 1, b"", 2, 3, VIEW.members, (1.0,), (7,), (0,)),
    ),
    AveragerRecorded(
        "g", "run", averaging.Outcome("", 1, b"", b"d", ("a",), ("A",), (1.0,)), ("a",), 2
    ),
    AveragerRecorded("g", "run", averaging.Outcome("", 1, b"", b"", (), (), ()), (), 2, True),
]


def test_what_is_written_is_read() -> None:
    assert decode_records(b"".join(map(encode_record, RECORDS))) == RECORDS
    assert decode_records(b"") == []


def test_the_key_of_a_group_is_its_name_and_run() -> None:
    formed = RECORDS[1]
    assert isinstance(formed, Formed)
    assert formed.key == ("g", "run")


@pytest.mark.parametrize("cut", [1, 5])
def test_a_record_that_is_not_whole_is_refused(cut: int) -> None:
    first, second = map(encode_record, RECORDS[:2])
    with pytest.raises(ValueError, match=f"no whole record at byte {len(first)}"):
        decode_records(first + second[:-cut])


@pytest.mark.parametrize(
    "data", [b"\x92\x63\x90", b"\xc1", encode_record(RECORDS[0])[:1] + b"\xff"]
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="record at byte 0"):
        decode_records(data)


def test_what_no_record_may_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="an integer from 1"):
        decode_records(encode_record(Ended("g", "run", 0)))
