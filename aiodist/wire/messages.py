"""Control messages between a member and the coordinator.

A message is one frame (see `aiodist.wire.frames`). Its header is the msgpack array ``[type,
request]``. Its payload, the body, is the msgpack array of the fields in the order below. A request
carries a number that the sender chooses, and replies repeat it. A message with the number 0 belongs
to no request.

Every field is checked when it is decoded: type, range, length. A bad field raises ProtocolError,
and no length on the wire makes the decoder allocate more than the bytes that came. The exception
are the members of a view: they travel as compressed columns (`aiodist.wire.columns`), and the
largest reply bounds what they unpack to. Only a member takes such messages, from a coordinator that
has shown that it is the right one.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import field
from functools import cached_property
from typing import Annotated, Any, ClassVar

from aiodist.errors import ProtocolError
from aiodist.wire import schema
from aiodist.wire.frames import pack_fields
from aiodist.wire.limits import (
    MAX_ADDRESSES,
    MAX_KEY,
    MAX_MEMBERS,
    MAX_METADATA,
    MAX_NAME,
    MAX_REQUEST,
    MAX_TEXT,
    MAX_VALUE,
    MAX_WAIT_KEYS,
    PROTOCOL_VERSION,
)

MAGIC = "aiodist"
"""The first field of both greetings. A program that does not send it is not an aiodist peer."""


class Failure(enum.StrEnum):
    """What went wrong with a request."""

    RANK_TAKEN = "rank_taken"
    SIZE_MISMATCH = "size_mismatch"
    COMPLETE = "complete"
    DRAINING = "draining"
    INVALID = "invalid"
    NOT_A_MEMBER = "not_a_member"
    TOO_LARGE = "too_large"
    NOT_AN_INTEGER = "not_an_integer"
    AUTHENTICATION = "authentication"
    VERSION = "version"
    BUSY = "busy"
    MISMATCH = "mismatch"


Name = Annotated[str, schema.text(MAX_NAME)]
NonEmptyName = Annotated[str, schema.text(MAX_NAME, 1)]
Text = Annotated[str, schema.text(MAX_TEXT)]
Key = Annotated[str, schema.text(MAX_KEY, 1)]
Value = Annotated[bytes, schema.blob(MAX_VALUE)]
OptionalValue = Annotated[bytes | None, schema.optional(schema.blob(MAX_VALUE))]
Nonce = Annotated[bytes, schema.blob(64)]
Rank = Annotated[int, schema.integer(0, MAX_MEMBERS - 1)]
Ranks = Annotated[tuple[int, ...], schema.sequence(schema.integer(0, MAX_MEMBERS - 1), MAX_MEMBERS)]
OptionalRank = Annotated[int | None, schema.optional(schema.integer(0, MAX_MEMBERS - 1))]
OptionalSize = Annotated[int | None, schema.optional(schema.integer(1, MAX_MEMBERS))]
Epoch = Annotated[int, schema.integer(1, 2**62)]
Pid = Annotated[int, schema.integer(0, 2**32)]
Request = Annotated[int, schema.integer(0, MAX_REQUEST)]
Lifetime = Annotated[float | None, schema.optional(schema.seconds(1e-3))]
Metadata = Annotated[Mapping[str, Any], schema.tree(MAX_METADATA)]
Addresses = Annotated[tuple[str, ...], schema.sequence(schema.text(MAX_NAME, 1), MAX_ADDRESSES)]


class Message(schema.Struct):
    """The base of all control messages.

    `code` is the type on the wire. `rows` names a field that is a sequence of structs and travels
    as columns, and `at` is its place among the fields.
    """

    code: ClassVar[int]
    at: ClassVar[int | None]

    def __init_subclass__(cls, *, code: int, rows: str = "", kw_only: bool = False) -> None:
        super().__init_subclass__(kw_only=kw_only)
        cls.code, cls.at = code, schema.field_names(cls).index(rows) if rows else None
        _CLASSES[code] = cls


_CLASSES: dict[int, type[Message]] = {}


def message_types() -> tuple[type[Message], ...]:
    """Return all control messages of the modules that were imported."""
    return tuple(_CLASSES.values())


def message_type(code: object) -> type[Message]:
    """Return the message class with that code. Raises ProtocolError if there is none."""
    cls = _CLASSES.get(code) if type(code) is int else None
    if cls is None:
        raise ProtocolError(f"control message of unknown type {code!r}")
    return cls


# Greeting: Hello →, ← Challenge, Proof →, ← Welcome (or Failed, and the end).


class Hello(Message, code=1):
    """The first message of a connection, from the member. `nonce` has 32 random bytes."""

    nonce: Nonce
    magic: Name = MAGIC
    version: Annotated[int, schema.integer(0, 2**31)] = PROTOCOL_VERSION


class Challenge(Message, code=2):
    """The coordinator's answer to Hello. `token_needed`: the member has to prove that it has the
    token."""

    nonce: Nonce
    token_needed: Annotated[bool, schema.flag]
    magic: Name = MAGIC
    version: Annotated[int, schema.integer(0, 2**31)] = PROTOCOL_VERSION


class Proof(Message, code=3):
    """The member's answer to Challenge: see `aiodist.wire.proof`. Empty if no token is needed."""

    mac: Nonce


class Welcome(Message, code=4):
    """Tells a member that it is let in. `mac` is the coordinator's own proof.

    `seen_host` is the host part of the address that the member comes from. `coordinator` names the
    coordinator, over restarts if it keeps a state file, and `incarnation` counts these. `returns`:
    if it goes away, another one may come to its address.
    """

    seen_host: Name
    mac: Nonce
    coordinator: Name
    incarnation: Annotated[int, schema.integer(1, 2**62)]
    returns: Annotated[bool, schema.flag]


class Failed(Message, code=5):
    """The reply to a request that failed."""

    kind: Annotated[Failure, schema.one_of(Failure)]
    text: Text


# Membership.


class JoinRequest(Message, code=10, kw_only=True):
    """Asks to become a member of `group`. Replies: EpochView once the group is complete, Failed, or
    Withdrawn.

    A fixed group has `size`, and an elastic group `min_size`, `max_size` or both. `id` is unique to
    this membership. `join_window` and `lease` are seconds. Peers are told `host`. `host_id` is
    equal for processes that can share memory. Peers may dial `addresses`.

    Members with different `run_id` never meet, because they are of different groups with one name.
    `store` names a store that the group shares with all groups of its run that name it ("": its
    own). That store lives as long as one of these groups, and is not in the state file.
    """

    group: NonEmptyName
    id: NonEmptyName
    rank: OptionalRank = None
    size: OptionalSize = None
    min_size: OptionalSize = None
    max_size: OptionalSize = None
    join_window: Annotated[float, schema.seconds(0.0)] = 1.0
    lease: Annotated[float, schema.seconds(0.05)] = 15.0
    pid: Pid = 0
    host: Name = ""
    host_id: Name = ""
    name: Name = ""
    metadata: Metadata = field(default_factory=dict)
    addresses: Addresses = ()
    run_id: Name = ""
    store: Name = ""


class MemberInfo(schema.Struct):
    """One member of a view.

    `joined_at` is in seconds since the Unix epoch, by the coordinator's clock. After `lease`
    seconds of silence the member counts as lost.
    """

    rank: Rank
    id: NonEmptyName
    host: Name
    pid: Pid
    name: Name
    metadata: Metadata
    joined_at: Annotated[float, schema.seconds(0.0, 1e12)]
    host_id: Name
    addresses: Addresses
    lease: Annotated[float, schema.seconds(0.05)] = 15.0


class EpochView(Message, code=11, rows="members"):
    """The members of an epoch, by rank: the answer to a join, or to a vote that began the epoch.

    It is the same for all members. A member finds itself by `id`.
    """

    group: NonEmptyName
    epoch: Epoch
    members: Annotated[
        tuple[MemberInfo, ...], schema.sequence(schema.struct(MemberInfo), MAX_MEMBERS)
    ]

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        """The ranks of the members, by id."""
        return {member.id: member.rank for member in self.members}

    @cached_property
    def digest(self) -> bytes:
        """Equal for views of the same group, epoch and members."""
        # The ids suffice, because an id is random and belongs to one membership alone.
        ids = [member.id for member in self.members]
        return hashlib.blake2b(pack_fields(self.group, self.epoch, *ids), digest_size=16).digest()

    @property
    def context(self) -> bytes:
        """The id of this view's group in frames and in votes."""
        return self.digest[:8]


class Withdraw(Message, code=12):
    """Stops waiting for the group to become complete. Reply: Withdrawn, or only the EpochView if
    that is already on its way."""


class Withdrawn(Message, code=13):
    """Says how far the group has come. It answers Withdraw, Stalled of a rank that waits to join,
    and JoinRequest if the rank that serves the coordinator gives up.

    `missing` are the ranks that are missing, if they are known.
    """

    text: Text
    missing: Ranks = ()


class Leave(Message, code=14):
    """Leaves the group, or stops waiting for it. Reply: Left."""


class Left(Message, code=15):
    """The answer to Leave or Abort: the sender is no longer a member."""


class Renew(Message, code=16):
    """A sign of life. No reply. (Every other message is one, too.)"""


class MemberLost(Message, code=17):
    """Tells the others that `ranks` of `epoch` are dead, or silent for longer than their lease."""

    epoch: Epoch
    ranks: Ranks
    reason: Text


class MemberLeft(Message, code=18):
    """Tells the others that `ranks` of `epoch` have left in order."""

    epoch: Epoch
    ranks: Ranks


class Evicted(Message, code=19):
    """Tells a member that it was ruled lost, before its connection is closed."""

    reason: Text


class Draining(Message, code=20):
    """Says that the coordinator is about to stop. It takes no joins and waits for its groups to
    end."""


class Goodbye(Message, code=21):
    """Says that the coordinator stops now."""


class StatusRequest(Message, code=22):
    """Asks what the coordinator knows. Reply: Status. Members and others may ask.

    `ask_members`: the coordinator asks its members what they are doing, and waits a moment for
    their answers (`aiodist.wire.activity`).
    """

    ask_members: Annotated[bool, schema.flag] = False


class Status(Message, code=23):
    """The answer to StatusRequest: what the coordinator knows, as plain data.

    See `Membership.status`.
    """

    status: Annotated[Mapping[str, Any], schema.tree(None)]


class Abort(Message, code=28):
    """Leaves the group at once. The others see the sender as lost, for the reason that it gives.

    Reply: Left. A coordinator that does not know this message closes the connection. The sender is
    then lost, too, but without the reason.
    """

    reason: Text


class ClockRequest(Message, code=29):
    """Asks for the time at the coordinator. Reply: Clock, at once."""


class Clock(Message, code=40):
    """The answer to ClockRequest: `seconds` of a monotonic clock of the coordinator."""

    seconds: Annotated[float, schema.seconds(0.0)]


# The store of the sender's group. Replies: Result or Failed.


class StoreGet(Message, code=30):
    """Asks for the value of `key`. Result: the value, or None if there is none."""

    key: Key


class StoreSet(Message, code=31):
    """Sets `key` to `value`. Result: None. After `ttl` seconds the key is deleted; None keeps
    it."""

    key: Key
    value: Value = field(repr=False)
    ttl: Lifetime = None


class StoreWait(Message, code=32):
    """Waits until all `keys` exist at the same time. Result: None, then."""

    keys: Annotated[tuple[str, ...], schema.sequence(schema.text(MAX_KEY, 1), MAX_WAIT_KEYS)]


class StoreAdd(Message, code=33):
    """Adds `amount` to the decimal number that the key holds (0 if it does not exist). Result: the
    sum."""

    key: Key
    amount: Annotated[int, schema.integer(-(2**63), 2**63 - 1)]
    ttl: Lifetime = None


class StoreCompareSet(Message, code=34):
    """Sets the key to `desired` if it holds `expected` (None: does not exist). Result: whether it
    did."""

    key: Key
    expected: OptionalValue = field(repr=False)
    desired: Value = field(repr=False)
    ttl: Lifetime = None


class StoreDelete(Message, code=35):
    """Deletes `key`. Result: whether it existed."""

    key: Key


class StoreWatch(Message, code=36):
    """Asks to be told of every change of `key`.

    Result: None, then a StoreChanged for every change, until StoreCancel. `again`: the watch goes
    on after a restart of the coordinator. The first StoreChanged then comes at once, with what the
    key holds now.
    """

    key: Key
    again: Annotated[bool, schema.flag] = False


StoreWrite = StoreSet | StoreAdd | StoreCompareSet | StoreDelete
StoreRequest = StoreWrite | StoreGet | StoreWait | StoreWatch


class StoreCancel(Message, code=37):
    """Ends the wait or watch with this request number. No reply."""

    request: Request


class StoreChanged(Message, code=38):
    """Tells those that watch a key that it was set to `value`, or deleted (None)."""

    key: Key
    value: OptionalValue = field(repr=False)


class Result(Message, code=39):
    """The answer to a request to the store: its result."""

    value: Annotated[
        bytes | int | bool | None,
        schema.optional(
            schema.either(schema.flag, schema.integer(-(2**63), 2**63 - 1), schema.blob(MAX_VALUE))
        ),
    ] = field(repr=False)
