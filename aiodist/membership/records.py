"""What has to outlive the coordinator, as records of a log: `Membership` emits them, and a machine
that is given all of them again (`Membership.restore`) knows what the one before knew.

Waiting joiners are not among them: they ask again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, get_args

import msgpack

from aiodist.wire.limits import MAX_MEMBERS, MAX_NAME, MAX_SECONDS, MAX_TEXT, MAX_VALUE
from aiodist.wire.messages import Epoch, Key, Name, NonEmptyName, Ranks, Request, Result, View
from aiodist.wire.schema import (
    blob,
    build,
    checked,
    flag,
    integer,
    optional,
    pack,
    seconds,
    struct,
    text,
)

Size = Annotated[int, integer(1, MAX_MEMBERS)]


@checked
@dataclass(frozen=True, slots=True)
class EpochGiven:
    """The last epoch of a name. With the empty name: a floor for all that are not named."""

    name: Annotated[str, text(MAX_NAME)]
    epoch: Annotated[int, integer(0, 2**62)]


@checked
@dataclass(frozen=True, slots=True)
class Formed:
    """`view` is the membership of its group from now on."""

    view: Annotated[View, struct(View)]
    run_id: Name
    fixed: Annotated[bool, flag]
    least: Size
    most: Size
    window: Annotated[float, seconds(0.0)]
    opener: Annotated[str, text(MAX_TEXT)]

    @property
    def key(self) -> tuple[str, str]:
        return self.view.group, self.run_id


@checked
@dataclass(frozen=True, slots=True)
class Gone:
    """`ranks` are members no more: lost for `reason`, or (None) they left."""

    group: NonEmptyName
    run_id: Name
    ranks: Ranks
    reason: Annotated[str | None, optional(text(MAX_TEXT))]


@checked
@dataclass(frozen=True, slots=True)
class Ended:
    """The group was deleted, in `epoch`."""

    group: NonEmptyName
    run_id: Name
    epoch: Epoch


@checked
@dataclass(frozen=True, slots=True)
class Stored:
    """`key` holds `value` (None: is deleted). `expires`: seconds since the Unix epoch."""

    group: NonEmptyName
    run_id: Name
    key: Key
    value: Annotated[bytes | None, optional(blob(MAX_VALUE))] = field(repr=False)
    expires: Annotated[float | None, optional(seconds(0.0, 1e12 + MAX_SECONDS))]


@checked
@dataclass(frozen=True, slots=True)
class Answered:
    """What request `request` of a member gave, in case that it asks again."""

    group: NonEmptyName
    run_id: Name
    member: NonEmptyName
    request: Request
    result: Annotated[Result, struct(Result)]


Record = EpochGiven | Formed | Gone | Ended | Stored | Answered

_CLASSES: tuple[type[Any], ...] = get_args(Record)
_CODES = {cls: code for code, cls in enumerate(_CLASSES)}


def encode_record(record: Record) -> bytes:
    """A record as bytes that `decode_records` can tell from those behind it."""
    return pack([_CODES[type(record)], record])


def decode_records(data: bytes) -> list[Record]:
    """The records that were encoded one behind the other. Raises ValueError."""
    unpacker = msgpack.Unpacker(max_array_len=MAX_MEMBERS, max_buffer_size=max(len(data), 1))
    unpacker.feed(data)
    records: list[Record] = []
    at = 0
    try:
        for code, fields in unpacker:
            records.append(build(_CLASSES[code], fields))
            at = unpacker.tell()
    except Exception as error:  # msgpack raises half a dozen unrelated types
        raise ValueError(f"no record at byte {at}: {type(error).__name__}: {error}") from None
    if at != len(data):
        raise ValueError(f"no whole record at byte {at} of {len(data)}")
    return records
