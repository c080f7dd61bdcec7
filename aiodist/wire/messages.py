"""Control messages between a member and the coordinator.

A message is one frame (see `aiodist.wire.frames`): its header is the msgpack array
``[type, request]``, its payload ("body") the msgpack array of the fields in the order below. A
request carries a number of the sender's choice that the replies to it repeat; 0 stands for a
message that belongs to no request.

Every field is checked when it is decoded: type, range, length. What does not fit raises
ProtocolError, and no length on the wire makes the decoder allocate more than the bytes that came.

The exception are the members of a view, which go to all of them: they travel as compressed columns
(`aiodist.wire.columns`), and unpacking them is bounded by the largest reply. Only a member takes
such messages, from a coordinator that has shown who it is.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

import msgpack

from aiodist.errors import MessageTooLargeError, ProtocolError
from aiodist.wire.columns import pack_rows, unpack_rows
from aiodist.wire.frames import Frame, encode, pack_fields, unpack_fields
from aiodist.wire.limits import (
    MAX_ADDRESSES,
    MAX_BODY,
    MAX_KEY,
    MAX_MEMBERS,
    MAX_METADATA,
    MAX_NAME,
    MAX_TEXT,
    MAX_VALUE,
    MAX_WAIT_KEYS,
    PROTOCOL_VERSION,
)
from aiodist.wire.schema import (
    blob,
    build,
    checked,
    either,
    field_names,
    flag,
    integer,
    one_of,
    optional,
    pack,
    plain,
    seconds,
    sequence,
    struct,
    text,
    tree,
)

MAGIC = "aiodist"
"""The first field of both greetings: who does not send it is no aiodist peer."""


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


Name = Annotated[str, text(MAX_NAME)]
NonEmptyName = Annotated[str, text(MAX_NAME, 1)]
Text = Annotated[str, text(MAX_TEXT)]
Key = Annotated[str, text(MAX_KEY, 1)]
Value = Annotated[bytes, blob(MAX_VALUE)]
OptionalValue = Annotated[bytes | None, optional(blob(MAX_VALUE))]
Nonce = Annotated[bytes, blob(64)]
Rank = Annotated[int, integer(0, MAX_MEMBERS - 1)]
Ranks = Annotated[tuple[int, ...], sequence(integer(0, MAX_MEMBERS - 1), MAX_MEMBERS)]
OptionalRank = Annotated[int | None, optional(integer(0, MAX_MEMBERS - 1))]
OptionalSize = Annotated[int | None, optional(integer(1, MAX_MEMBERS))]
Epoch = Annotated[int, integer(1, 2**62)]
Pid = Annotated[int, integer(0, 2**32)]
Request = Annotated[int, integer(0, 2**32 - 1)]
Lifetime = Annotated[float | None, optional(seconds(1e-3))]
Metadata = Annotated[Mapping[str, Any], tree(MAX_METADATA)]
Addresses = Annotated[tuple[str, ...], sequence(text(MAX_NAME, 1), MAX_ADDRESSES)]


class Message:
    """Base of all control messages."""

    __slots__ = ()
    code: ClassVar[int]


_CLASSES: dict[int, type[Message]] = {}
_ROWS: dict[type[Any], int] = {}
"""Messages that have a field of many rows, and which one it is."""
_M = TypeVar("_M")


def control_message(code: int, *, rows: str = "") -> Callable[[type[_M]], type[_M]]:
    """Decorates a dataclass that is a control message of type `code`. `rows`: a field that is a
    sequence of structs, and travels as columns."""

    def register(cls: type[_M]) -> type[_M]:
        cls.code = code  # type: ignore[attr-defined]
        _CLASSES[code] = cls  # type: ignore[assignment]
        checked(cls)
        if rows:
            _ROWS[cls] = field_names(cls).index(rows)
        return cls

    return register


def message_types() -> tuple[type[Message], ...]:
    """All control messages that there are, of the modules that were imported."""
    return tuple(_CLASSES.values())


# Greeting: Hello →, ← Challenge, Proof →, ← Welcome (or Failed, and the end).


@control_message(1)
@dataclass(frozen=True, slots=True)
class Hello(Message):
    """The first message of a connection, from the member. `nonce`: 32 random bytes."""

    nonce: Nonce
    magic: Name = MAGIC
    version: Annotated[int, integer(0, 2**31)] = PROTOCOL_VERSION


@control_message(2)
@dataclass(frozen=True, slots=True)
class Challenge(Message):
    """The coordinator's answer to Hello. `token_needed`: the member has to prove that it has the
    token."""

    nonce: Nonce
    token_needed: Annotated[bool, flag]
    magic: Name = MAGIC
    version: Annotated[int, integer(0, 2**31)] = PROTOCOL_VERSION


@control_message(3)
@dataclass(frozen=True, slots=True)
class Proof(Message):
    """The member's answer to Challenge: see `aiodist.wire.proof`. Empty where no token is
    needed."""

    mac: Nonce


@control_message(4)
@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Tells a member that it is let in. `mac`: the coordinator's own proof. `seen_host`: the host
    part of the address it sees the member come from.

    `coordinator` names the coordinator, over restarts if it keeps a state file; `incarnation`
    counts these. `returns`: when it goes away, another may come to its address.
    """

    seen_host: Name
    mac: Nonce
    coordinator: Name
    incarnation: Annotated[int, integer(1, 2**62)]
    returns: Annotated[bool, flag]


@control_message(5)
@dataclass(frozen=True, slots=True)
class Failed(Message):
    """The reply to a request that failed."""

    kind: Annotated[Failure, one_of(Failure)]
    text: Text


# Membership.


@control_message(10)
@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest(Message):
    """Asks to become a member of `group`. Replies: View once the group is complete, or Failed.

    Either `size` (a fixed group) or `min_size` and/or `max_size` (an elastic one). `id` is unique
    to this membership. `join_window` and `lease` are seconds. `host` is what peers are told,
    `host_id` equal for processes that can share memory, `addresses` where peers may dial.
    Members with different `run_id` never meet: they are of different groups of one name.
    """

    group: NonEmptyName
    id: NonEmptyName
    rank: OptionalRank = None
    size: OptionalSize = None
    min_size: OptionalSize = None
    max_size: OptionalSize = None
    join_window: Annotated[float, seconds(0.0)] = 1.0
    lease: Annotated[float, seconds(0.05)] = 15.0
    pid: Pid = 0
    host: Name = ""
    host_id: Name = ""
    name: Name = ""
    metadata: Metadata = field(default_factory=dict)
    addresses: Addresses = ()
    run_id: Name = ""


@checked
@dataclass(frozen=True, slots=True)
class MemberInfo:
    """One member of a view. `joined_at`: seconds since the Unix epoch, the coordinator's clock.
    `lease`: seconds of silence after which it counts as lost."""

    rank: Rank
    id: NonEmptyName
    host: Name
    pid: Pid
    name: Name
    metadata: Metadata
    joined_at: Annotated[float, seconds(0.0, 1e12)]
    host_id: Name
    addresses: Addresses
    lease: Annotated[float, seconds(0.05)] = 15.0


@control_message(11, rows="members")
@dataclass(frozen=True)
class View(Message):
    """The members of an epoch, by rank: the answer to a join, or to a vote that began the epoch.
    It is the same for all: find yourself by `id`."""

    group: NonEmptyName
    epoch: Epoch
    members: Annotated[tuple[MemberInfo, ...], sequence(struct(MemberInfo), MAX_MEMBERS)]

    def rank_of(self, member_id: str) -> int:
        """The rank of the member with this id. Raises KeyError."""
        return self.ranks[member_id]

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        """The ranks of the members, by id."""
        return {member.id: member.rank for member in self.members}

    @cached_property
    def digest(self) -> bytes:
        """Equal for views of the same group, epoch and members."""
        ids = [member.id for member in self.members]
        return hashlib.blake2b(pack_fields(self.group, self.epoch, *ids), digest_size=16).digest()

    @property
    def context(self) -> bytes:
        """What names the group of this view in frames, and in votes."""
        return self.digest[:8]


@control_message(12)
@dataclass(frozen=True, slots=True)
class Withdraw(Message):
    """Stops waiting for the group to become complete. Reply: Withdrawn, or nothing but the View
    that is already on its way."""


@control_message(13)
@dataclass(frozen=True, slots=True)
class Withdrawn(Message):
    """The answer to Withdraw: how far the group had come, for the error text; and which ranks are
    missing, where that is known."""

    text: Text
    missing: Ranks = ()


@control_message(14)
@dataclass(frozen=True, slots=True)
class Leave(Message):
    """Leaves the group, or stops waiting for it. Reply: Left."""


@control_message(15)
@dataclass(frozen=True, slots=True)
class Left(Message):
    """The answer to Leave, or to Abort: its sender is a member no more."""


@control_message(16)
@dataclass(frozen=True, slots=True)
class Renew(Message):
    """A sign of life. No reply. (Every other message is one too.)"""


@control_message(17)
@dataclass(frozen=True, slots=True)
class MemberLost(Message):
    """Tells the others that `ranks` of `epoch` are dead, or silent for longer than their lease."""

    epoch: Epoch
    ranks: Ranks
    reason: Text


@control_message(18)
@dataclass(frozen=True, slots=True)
class MemberLeft(Message):
    """Tells the others that `ranks` of `epoch` have left in order."""

    epoch: Epoch
    ranks: Ranks


@control_message(19)
@dataclass(frozen=True, slots=True)
class Evicted(Message):
    """Tells a member that it was ruled lost, before its connection is closed."""

    reason: Text


@control_message(20)
@dataclass(frozen=True, slots=True)
class Draining(Message):
    """Says that the coordinator is about to stop: it takes no joins and waits for its groups to
    end."""


@control_message(21)
@dataclass(frozen=True, slots=True)
class Goodbye(Message):
    """Says that the coordinator stops now."""


@control_message(22)
@dataclass(frozen=True, slots=True)
class StatusRequest(Message):
    """Asks what the coordinator knows. Reply: Status. Members and others may ask.

    `ask_members`: the coordinator asks its members what they are doing, and waits a moment for
    their answers (`aiodist.wire.activity`).
    """

    ask_members: Annotated[bool, flag] = False


@control_message(23)
@dataclass(frozen=True, slots=True)
class Status(Message):
    """The answer to StatusRequest: what the coordinator knows, as plain data. See
    `Membership.status`."""

    status: Annotated[Mapping[str, Any], tree(None)]


@control_message(28)
@dataclass(frozen=True, slots=True)
class Abort(Message):
    """Leave the group at once: to the others the sender is lost, for the reason that it gives.
    Reply: Left. A coordinator that does not know this message closes the connection: then, too, the
    sender is lost, and the others hear of no reason."""

    reason: Text


# The store of the sender's group. Replies: Result or Failed.


@control_message(30)
@dataclass(frozen=True, slots=True)
class StoreGet(Message):
    """Asks for the value of `key`. Result: the value, or None where there is none."""

    key: Key


@control_message(31)
@dataclass(frozen=True, slots=True)
class StoreSet(Message):
    """Sets `key` to `value`. Result: None. `ttl`: seconds after which the key is deleted; None
    keeps it."""

    key: Key
    value: Value = field(repr=False)
    ttl: Lifetime = None


@control_message(32)
@dataclass(frozen=True, slots=True)
class StoreWait(Message):
    """Waits until all `keys` exist at the same time. Result: None, then."""

    keys: Annotated[tuple[str, ...], sequence(text(MAX_KEY, 1), MAX_WAIT_KEYS)]


@control_message(33)
@dataclass(frozen=True, slots=True)
class StoreAdd(Message):
    """Adds `amount` to the number that the key holds in decimal (0 where it is absent). Result: the
    sum."""

    key: Key
    amount: Annotated[int, integer(-(2**63), 2**63 - 1)]
    ttl: Lifetime = None


@control_message(34)
@dataclass(frozen=True, slots=True)
class StoreCompareSet(Message):
    """Sets the key to `desired` if it holds `expected` (None: is absent). Result: whether it
    was."""

    key: Key
    expected: OptionalValue = field(repr=False)
    desired: Value = field(repr=False)
    ttl: Lifetime = None


@control_message(35)
@dataclass(frozen=True, slots=True)
class StoreDelete(Message):
    """Deletes `key`. Result: whether it existed."""

    key: Key


@control_message(36)
@dataclass(frozen=True, slots=True)
class StoreWatch(Message):
    """Asks to be told of every change of `key`. Result: None, then a StoreChanged for every change,
    until StoreCancel.

    `again`: the watch goes on after a restart of the coordinator. Then the first StoreChanged,
    which comes at once, says what the key holds now.
    """

    key: Key
    again: Annotated[bool, flag] = False


@control_message(37)
@dataclass(frozen=True, slots=True)
class StoreCancel(Message):
    """Ends the wait or watch with this request number. No reply."""

    request: Request


@control_message(38)
@dataclass(frozen=True, slots=True)
class StoreChanged(Message):
    """Tells whoever watches a key that it was set to `value`, or deleted (None)."""

    key: Key
    value: OptionalValue = field(repr=False)


@control_message(39)
@dataclass(frozen=True, slots=True)
class Result(Message):
    """The answer to a request to the store: what it gives."""

    value: Annotated[
        bytes | int | bool | None,
        optional(either(flag, integer(-(2**63), 2**63 - 1), blob(MAX_VALUE))),
    ] = field(repr=False)


_check_request = integer(0, 2**32 - 1)

_shared: WeakValueDictionary[bytes, Message] = WeakValueDictionary()
"""Messages of many rows that somebody in this process holds, by what was decoded. Ranks that share
a process are sent the same view: thousands of them would not have the memory for one each."""


def encode_message(message: Message, request: int = 0, *, max_body: int = MAX_BODY) -> bytes:
    """The frame of a message.

    Raises MessageTooLargeError for a body over `max_body` bytes; ValueError for a message that the
    other side would refuse, TypeError for values that msgpack does not know.
    """
    return frame_of(message, request, encode_body(message, max_body=max_body))


def frame_of(message: Message, request: int, body: bytes) -> bytes:
    """The frame of a message whose body is encoded: that is the same for all who are sent it."""
    return encode(pack_fields(message.code, request), body)


def encode_body(message: Message, *, max_body: int = MAX_BODY) -> bytes:
    """What a message says. Raises as `encode_message` does."""
    body = pack(_as_sent(message))
    if len(body) > max_body:
        raise MessageTooLargeError(
            f"a {type(message).__name__} message of {len(body)} bytes, over the limit of {max_body}"
        )
    # What the other side would refuse ends the connection there, and says nothing here: so whoever
    # made the mistake is told at once.
    try:
        build(type(message), _received(type(message), body))
    except (ValueError, ProtocolError) as error:
        raise ValueError(f"a {type(message).__name__} message needs {error}") from None
    return body


def decode_message(frame: Frame, *, rows: bool = True) -> tuple[int, Message]:
    """(request number, message) of a frame. Raises ProtocolError for anything else. `rows`: whether
    to take messages of many rows, which become more than the bytes that came."""
    header = unpack_fields(frame.header)
    if len(header) != 2:
        raise ProtocolError(f"a control header is [type, request], not {len(header)} fields")
    code, request = header
    cls = _CLASSES.get(code) if type(code) is int else None
    if cls is None:
        raise ProtocolError(f"control message of unknown type {code!r}")
    if cls in _ROWS and not rows:
        raise ProtocolError(f"{cls.__name__} is no message for here, or not yet")
    try:
        return _check_request(request), _decoded(cls, frame.payload)
    except ValueError as error:
        raise ProtocolError(f"a bad {cls.__name__} message: expected {error}") from None


def _decoded(cls: type[Message], body: bytes) -> Message:
    if cls not in _ROWS:
        message: Message = build(cls, _unpack(body))
        return message
    key = hashlib.blake2b(body, digest_size=16, salt=bytes([cls.code])).digest()
    found = _shared.get(key)
    if found is None:
        found = _shared[key] = build(cls, _received(cls, body))
    return found


def _as_sent(message: Message) -> list[Any]:
    """The fields as they travel."""
    values: list[Any] = plain(message)
    if (at := _ROWS.get(type(message))) is not None:
        values[at] = pack_rows([plain(row) for row in values[at]])
    return values


def _received(cls: type[Message], body: bytes) -> list[Any]:
    """The fields of a body, for `build`."""
    values = _unpack(body)
    at = _ROWS.get(cls, len(values))
    if at < len(values):
        values[at] = unpack_rows(values[at])
    return values


def _unpack(body: bytes) -> list[Any]:
    # The bounds on array and map lengths keep nested forged lengths from reserving memory.
    try:
        values = msgpack.unpackb(
            body, max_array_len=MAX_MEMBERS, max_map_len=MAX_MEMBERS, max_ext_len=0
        )
    except Exception as error:  # msgpack raises half a dozen unrelated types
        raise ProtocolError(f"not msgpack: {type(error).__name__}: {error}") from None
    if type(values) is not list:
        raise ProtocolError(f"a body is a msgpack array, not {type(values).__name__}")
    return values
