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
    MAX_TEXT,
    MAX_VALUE,
    MAX_WAIT_KEYS,
    PROTOCOL_VERSION,
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
Request = Annotated[int, schema.integer(0, 2**32 - 1)]
Lifetime = Annotated[float | None, schema.optional(schema.seconds(1e-3))]
Metadata = Annotated[Mapping[str, Any], schema.tree(MAX_METADATA)]
Addresses = Annotated[tuple[str, ...], schema.sequence(schema.text(MAX_NAME, 1), MAX_ADDRESSES)]


class Message(schema.Struct):
    """Base of all control messages. `code` says on the wire which it is. `rows`: a field that is a
    sequence of structs, and travels as columns; `at` is its place among the fields."""

    code: ClassVar[int]
    at: ClassVar[int | None]

    def __init_subclass__(cls, *, code: int, rows: str = "", kw_only: bool = False) -> None:
        super().__init_subclass__(kw_only=kw_only)
        cls.code, cls.at = code, schema.field_names(cls).index(rows) if rows else None
        _CLASSES[code] = cls


_CLASSES: dict[int, type[Message]] = {}


def message_types() -> tuple[type[Message], ...]:
    """All control messages that there are, of the modules that were imported."""
    return tuple(_CLASSES.values())


def message_type(code: object) -> type[Message]:
    """The control messages of that code. Raises ProtocolError where there are none."""
    cls = _CLASSES.get(code) if type(code) is int else None
    if cls is None:
        raise ProtocolError(f"control message of unknown type {code!r}")
    return cls


# Greeting: Hello →, ← Challenge, Proof →, ← Welcome (or Failed, and the end).


class Hello(Message, code=1):
    """The first message of a connection, from the member. `nonce`: 32 random bytes."""

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
    """The member's answer to Challenge: see `aiodist.wire.proof`. Empty where no token is
    needed."""

    mac: Nonce


class Welcome(Message, code=4):
    """Tells a member that it is let in. `mac`: the coordinator's own proof. `seen_host`: the host
    part of the address it sees the member come from.

    `coordinator` names the coordinator, over restarts if it keeps a state file; `incarnation`
    counts these. `returns`: when it goes away, another may come to its address.
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
    """Asks to become a member of `group`. Replies: View once the group is complete, or Failed.

    Either `size` (a fixed group) or `min_size` and/or `max_size` (an elastic one). `id` is unique
    to this membership. `join_window` and `lease` are seconds. `host` is what peers are told,
    `host_id` equal for processes that can share memory, `addresses` where peers may dial.
    Members with different `run_id` never meet: they are of different groups of one name. `store`:
    the name of a store that the group has in common with all groups of its run that name it, for as
    long as there is one of them ("": it has one of its own). It is not in the state file.
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
    """One member of a view. `joined_at`: seconds since the Unix epoch, the coordinator's clock.
    `lease`: seconds of silence after which it counts as lost."""

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


class View(Message, code=11, rows="members"):
    """The members of an epoch, by rank: the answer to a join, or to a vote that began the epoch.
    It is the same for all: find yourself by `id`."""

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
        # Of the ids and not of all that is known of the members: an id is random and of one
        # membership alone, so equal ids are equal members.
        ids = [member.id for member in self.members]
        return hashlib.blake2b(pack_fields(self.group, self.epoch, *ids), digest_size=16).digest()

    @property
    def context(self) -> bytes:
        """What names the group of this view in frames, and in votes."""
        return self.digest[:8]


class Withdraw(Message, code=12):
    """Stops waiting for the group to become complete. Reply: Withdrawn, or nothing but the View
    that is already on its way."""


class Withdrawn(Message, code=13):
    """The answer to Withdraw, and to Stalled of a rank that waits to join: how far the group has
    come, in words; and which ranks are missing, where that is known."""

    text: Text
    missing: Ranks = ()


class Leave(Message, code=14):
    """Leaves the group, or stops waiting for it. Reply: Left."""


class Left(Message, code=15):
    """The answer to Leave, or to Abort: its sender is a member no more."""


class Renew(Message, code=16):
    """A sign of life. No reply. (Every other message is one too.)"""


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
    """Says that the coordinator is about to stop: it takes no joins and waits for its groups to
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
    """The answer to StatusRequest: what the coordinator knows, as plain data. See
    `Membership.status`."""

    status: Annotated[Mapping[str, Any], schema.tree(None)]


class Abort(Message, code=28):
    """Leave the group at once: to the others the sender is lost, for the reason that it gives.
    Reply: Left. A coordinator that does not know this message closes the connection: then, too, the
    sender is lost, and the others hear of no reason."""

    reason: Text


class ClockRequest(Message, code=29):
    """Asks what time it is at the coordinator. Reply: Clock, at once."""


class Clock(Message, code=40):
    """The answer to ClockRequest: `seconds` of a clock of the coordinator that only goes on."""

    seconds: Annotated[float, schema.seconds(0.0)]


# The store of the sender's group. Replies: Result or Failed.


class StoreGet(Message, code=30):
    """Asks for the value of `key`. Result: the value, or None where there is none."""

    key: Key


class StoreSet(Message, code=31):
    """Sets `key` to `value`. Result: None. `ttl`: seconds after which the key is deleted; None
    keeps it."""

    key: Key
    value: Value = field(repr=False)
    ttl: Lifetime = None


class StoreWait(Message, code=32):
    """Waits until all `keys` exist at the same time. Result: None, then."""

    keys: Annotated[tuple[str, ...], schema.sequence(schema.text(MAX_KEY, 1), MAX_WAIT_KEYS)]


class StoreAdd(Message, code=33):
    """Adds `amount` to the number that the key holds in decimal (0 where it is absent). Result: the
    sum."""

    key: Key
    amount: Annotated[int, schema.integer(-(2**63), 2**63 - 1)]
    ttl: Lifetime = None


class StoreCompareSet(Message, code=34):
    """Sets the key to `desired` if it holds `expected` (None: is absent). Result: whether it
    was."""

    key: Key
    expected: OptionalValue = field(repr=False)
    desired: Value = field(repr=False)
    ttl: Lifetime = None


class StoreDelete(Message, code=35):
    """Deletes `key`. Result: whether it existed."""

    key: Key


class StoreWatch(Message, code=36):
    """Asks to be told of every change of `key`. Result: None, then a StoreChanged for every change,
    until StoreCancel.

    `again`: the watch goes on after a restart of the coordinator. Then the first StoreChanged,
    which comes at once, says what the key holds now.
    """

    key: Key
    again: Annotated[bool, schema.flag] = False


StoreWrite = StoreSet | StoreAdd | StoreCompareSet | StoreDelete
StoreRequest = StoreWrite | StoreGet | StoreWait | StoreWatch


class StoreCancel(Message, code=37):
    """Ends the wait or watch with this request number. No reply."""

    request: Request


class StoreChanged(Message, code=38):
    """Tells whoever watches a key that it was set to `value`, or deleted (None)."""

    key: Key
    value: OptionalValue = field(repr=False)


class Result(Message, code=39):
    """The answer to a request to the store: what it gives."""

    value: Annotated[
        bytes | int | bool | None,
        schema.optional(
            schema.either(schema.flag, schema.integer(-(2**63), 2**63 - 1), schema.blob(MAX_VALUE))
        ),
    ] = field(repr=False)
