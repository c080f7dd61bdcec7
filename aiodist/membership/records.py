"""What has to outlive the coordinator, as records of a log: `Membership` emits them, and a machine
that is given all of them again (`Membership.restore`) knows what the one before knew.

Waiting joiners are not among them: they ask again.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, get_args

import msgpack

from aiodist.wire import averaging, schema
from aiodist.wire.limits import MAX_MEMBERS, MAX_NAME, MAX_SECONDS, MAX_TEXT, MAX_VALUE
from aiodist.wire.messages import Epoch, Key, Name, NonEmptyName, Ranks, Request, Result, View

Size = Annotated[int, schema.integer(1, MAX_MEMBERS)]


class EpochGiven(schema.Struct):
    """The last epoch of a name. With the empty name: a floor for all that are not named."""

    name: Annotated[str, schema.text(MAX_NAME)]
    epoch: Annotated[int, schema.integer(0, 2**62)]


class Formed(schema.Struct):
    """`view` is the membership of its group from now on."""

    view: Annotated[View, schema.struct(View)]
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
    """`ranks` are members no more: lost for `reason`, or (None) they left."""

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
    """What request `request` of a member gave, in case that it asks again."""

    group: NonEmptyName
    run_id: Name
    member: NonEmptyName
    request: Request
    result: Annotated[Result, schema.struct(Result)]


class Published(schema.Struct):
    """What was published last in a channel, whose store has this name (None: it begins anew). See
    `aiodist.wire.channels.PUBLISHED`."""

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
    """A round is over, and `holders` have its result; or (`reopened`) it is open again."""

    group: NonEmptyName
    run_id: Name
    outcome: Annotated[averaging.Outcome, schema.struct(averaging.Outcome)]
    holders: averaging.Names
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
    """A record as bytes that `decode_records` can tell from those behind it."""
    return schema.pack([_CODES[type(record)], record])


def decode_records(data: bytes) -> list[Record]:
    """The records that were encoded one behind the other. Raises ValueError."""
    # Records stand behind each other without lengths, as msgpack says itself where a value ends.
    # What is read here has passed a checksum, so it is what some coordinator wrote. The bounds are
    # for damage that a checksum does not see: no length in it reserves memory that no record needs.
    unpacker = msgpack.Unpacker(max_array_len=MAX_MEMBERS, max_buffer_size=max(len(data), 1))
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
