"""Records of the log of a coordinator.

`Membership` emits them. A machine that reads all of them (`Membership.restore`) knows what the
earlier one knew. Waiting joiners are left out, because they ask again.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, get_args

import msgpack

from aiodist.wire import averaging, schema
from aiodist.wire.limits import (
    MAX_MEMBERS,
    MAX_METADATA,
    MAX_NAME,
    MAX_SECONDS,
    MAX_TEXT,
    MAX_VALUE,
)
from aiodist.wire.messages import Epoch, EpochView, Key, Name, NonEmptyName, Ranks, Request, Result

Size = Annotated[int, schema.integer(1, MAX_MEMBERS)]


class EpochGiven(schema.Struct):
    """The last epoch of a name. An empty name: the floor for all names that are not listed."""

    name: Annotated[str, schema.text(MAX_NAME)]
    epoch: Annotated[int, schema.integer(0, 2**62)]


class Formed(schema.Struct):
    """`view` is the membership of its group from now on."""

    view: Annotated[EpochView, schema.struct(EpochView)]
    run_id: Name
    fixed: Annotated[bool, schema.flag]
    least: Size
    most: Size
    window: Annotated[float, schema.seconds(0.0)]
    opener: Annotated[str, schema.text(MAX_TEXT)]

    @property
    def key(self) -> tuple[str, str]:
        return self.view.group, self.run_id


class Gone(schema.Struct):
    """`ranks` are no longer members: lost for `reason`, or (None) they left."""

    group: NonEmptyName
    run_id: Name
    ranks: Ranks
    reason: Annotated[str | None, schema.optional(schema.text(MAX_TEXT))]


class Ended(schema.Struct):
    """The group was deleted, in `epoch`."""

    group: NonEmptyName
    run_id: Name
    epoch: Epoch


class Stored(schema.Struct):
    """`key` holds `value` (None: is deleted). `expires`: seconds since the Unix epoch."""

    group: NonEmptyName
    run_id: Name
    key: Key
    value: Annotated[bytes | None, schema.optional(schema.blob(MAX_VALUE))] = field(repr=False)
    expires: Annotated[float | None, schema.optional(schema.seconds(0.0, 1e12 + MAX_SECONDS))]


class Answered(schema.Struct):
    """The result of a member's request `request`, in case the member asks again."""

    group: NonEmptyName
    run_id: Name
    member: NonEmptyName
    request: Request
    result: Annotated[Result, schema.struct(Result)]


class Published(schema.Struct):
    """What was published last in the channel with this store (None: the channel begins anew).

    See `aiodist.wire.channels.PUBLISHED`.
    """

    store: NonEmptyName
    run_id: Name
    value: Annotated[bytes | None, schema.optional(schema.blob(MAX_VALUE))] = field(repr=False)


class AveragerEntered(schema.Struct):
    """The member `id`, whose group of one has this name, takes part in an averager."""

    group: NonEmptyName
    run_id: Name
    id: NonEmptyName
    rules: Annotated[averaging.Rules, schema.struct(averaging.Rules)]
    parts: Annotated[tuple[str, ...], schema.sequence(schema.text(MAX_NAME), averaging.MAX_PARTS)]
    keep: Annotated[int, schema.integer(0, 2**31)]


class AveragerDecided(schema.Struct):
    """A round of the averager of that group of one is moving. `form`: of the part's values."""

    group: NonEmptyName
    run_id: Name
    form: averaging.Form
    text: Annotated[str, schema.text(MAX_TEXT)]
    decision: Annotated[averaging.AverageDecision, schema.struct(averaging.AverageDecision)]


class AveragerRecorded(schema.Struct):
    """A round is over, and `holders` have its result; or (`reopened`) it is open again. `attempts`:
    the number of all attempts of that part so far."""

    group: NonEmptyName
    run_id: Name
    outcome: Annotated[averaging.Outcome, schema.struct(averaging.Outcome)]
    holders: averaging.Names
    attempts: averaging.Round
    reopened: Annotated[bool, schema.flag] = False


Record = (
    EpochGiven
    | Formed
    | Gone
    | Ended
    | Stored
    | Answered
    | Published
    | AveragerEntered
    | AveragerDecided
    | AveragerRecorded
)

_CLASSES: tuple[type[Any], ...] = get_args(Record)
_CODES = {cls: code for code, cls in enumerate(_CLASSES)}


def encode_record(record: Record) -> bytes:
    """Encode a record. Encoded records may be joined without lengths."""
    return schema.pack([_CODES[type(record)], record])


def decode_records(data: bytes) -> list[Record]:
    """Decode joined records. Raises ValueError if they are damaged."""
    # Records have no lengths, because a msgpack value says where it ends. A checksum has been
    # checked before. The limits are for damage that it missed: no length may reserve more memory
    # than a record needs. The longest arrays are lists in metadata.
    unpacker = msgpack.Unpacker(max_array_len=MAX_METADATA, max_buffer_size=max(len(data), 1))
    unpacker.feed(data)
    records: list[Record] = []
    at = 0
    try:
        for code, fields in unpacker:
            records.append(schema.build(_CLASSES[code], fields))
            at = unpacker.tell()
    except Exception as error:  # msgpack raises half a dozen unrelated types
        raise ValueError(f"no record at byte {at}: {type(error).__name__}: {error}") from None
    if at != len(data):
        raise ValueError(f"no whole record at byte {at} of {len(data)}")
    return records
