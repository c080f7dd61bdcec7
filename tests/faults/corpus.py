"""Frames to attack with, made from what the wire says of itself.

Control messages come from the types and checks of their fields; frames between ranks, and words
within them, from the tables in the docstrings of the modules that define them, where each field has
a name. A new message, or a new row, is in the corpus without a line here; a row with a field of a
new name raises (`test_corpus.py`). What sound frames say makes no sense; values are drawn
from small pools, to which an attack adds what it hears (`learn`), so that they meet what is there.
"""

from __future__ import annotations

import enum
import importlib
import pkgutil
import random
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar

import msgpack

import aiodist.wire
from aiodist.devices import memory as device_memory
from aiodist.devices import shares as device_shares
from aiodist.engine import tags
from aiodist.engine.tags import SETUP_TAG
from aiodist.p2p import frames as p2p_frames
from aiodist.transports import retransmission
from aiodist.wire import kinds, limits
from aiodist.wire.codec import encode_message
from aiodist.wire.frames import encode, pack_fields, prefix, unpack_fields
from aiodist.wire.messages import Message, message_types
from aiodist.wire.schema import build, field_names

T = TypeVar("T")

for _module in pkgutil.iter_modules(aiodist.wire.__path__):
    importlib.import_module(f"aiodist.wire.{_module.name}")  # messages register when imported

CONTROL = message_types()
"""All control messages."""

LIMITS = sorted({value for value in vars(limits).values() if type(value) is int})

TRIES = 200
"""So often a value is drawn, until one passes the check of its field."""


@dataclass(frozen=True)
class Row:
    """A row of a docstring's table: the fields of one kind of frame. A number is itself."""

    name: str
    fields: tuple[str, ...]
    payload: bool


def table(module: types.ModuleType) -> dict[str, Row]:
    """The rows of ``NAME  [field, field]: what it means`` in the docstring of a module."""
    rows = {}
    doc = module.__doc__ or ""
    for name, inner, rest in re.findall(
        r"^([A-Z][A-Z0-9_]+)\s+\[([^\]]*)\](.*)$", doc, re.MULTILINE
    ):
        fields = tuple(part.strip() for part in inner.split(","))
        rows[name] = Row(name, fields, "payload" in rest)
    return rows


PEER = table(kinds)
"""Frames between ranks. "…" among their fields: see `WITHIN`."""

WITHIN: dict[str, tuple[tuple[str, ...], ...]] = {
    "P2P": tuple([row.fields for row in table(p2p_frames).values()]),
    "TAGS": (
        (str(tags.PREPARE), "number", "named", "counts"),
        (str(tags.READY), "number", "flags"),
        (str(tags.COMMIT), "number", "flags"),
    ),
}
"""Kinds of frames that have kinds of their own."""

WORDS = (
    device_memory.FLUSH,
    device_memory.FLUSHED,
    device_memory.DROP,
    device_shares.RELEASED,
    device_shares.KEPT,
    device_shares.HELD,
)
"""What is said in DEVICE frames."""

OWN = (retransmission.ASK, retransmission.ACK)
"""What links say to each other, below the frames of ranks."""

AHEAD = (kinds.MESSAGE, kinds.GRANT)
"""Frames that may come before their collective is called: what is in them shows later."""

P2P_WITH_METADATA = (p2p_frames.EAGER, p2p_frames.RTS, p2p_frames.PUSH, p2p_frames.AHEAD)
"""Those of messages that may have metadata for a payload."""


class Corpus:
    """Makes frames from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ints = [0, 1, 2, 3, 7]
        self.texts = ["", "a", "b", "x", "y", "z", "world"]
        self.blobs = [b"", b"\0" * 8]
        self.contexts = [b"\0" * 8]
        self.heard: dict[int, list[list[Any]]] = {}
        self._by_type: dict[Any, Callable[[], Any]] = {
            int: self._int,
            float: lambda: self.pick([0, 0.001, 0.05, 1.0, 15.0, 1e9, self.rng.random()]),
            str: self._text,
            bytes: self._blob,
            bool: lambda: self.rng.random() < 0.5,
            type(None): lambda: None,
        }
        self._by_name: dict[str, Callable[[], Any]] = {
            "context": lambda: self.pick(self.contexts),
            "tag": self._tag,
            "seq": lambda: self._mostly(0, 1, 2, 3),
            "slot": self._int,
            "call": self._blob,
            "upto": self._int,
            "reason": lambda: self.pick(["cancelled", "error", "timeout", "mismatch", "lost", ""]),
            "text": self._text,
            "rank": lambda: self._mostly(0, 1, 2),
            "details": lambda: {self._small(): self._text() for _ in range(self._small())},
            "untold": lambda: [self._small() for _ in range(self._small())],
            "entered": self._by_type[bool],
            "number": self._int,
            "address": lambda: self.pick(["/nowhere", "", self._text()]),
            "key": self._blob,
            "nbytes": self._int,
            "word": lambda: self._mostly(*WORDS),
            "nonce": lambda: self.rng.randbytes(32),
            "magic": lambda: kinds.MAGIC,
            "version": lambda: kinds.VERSION,
            "my mark": lambda: self.rng.randbytes(8),
            "proof": lambda: self.rng.randbytes(32),
            "links": self._small,
            "came": self._small,
            "named": lambda: [self._tag() for _ in range(self._small())],
            "counts": lambda: [self._small() for _ in range(self._small())],
            "flags": lambda: [self.rng.random() < 0.5 for _ in range(self._small())],
            "wanted": lambda: self.rng.random() < 0.1,
            "id": self._small,
            "m": self._small,
            "n": self._int,
            "p": self._small,
            "part": lambda: self.pick([0, 1, 2, self._int()]),
            "why": self._small,
            "amount": self._int,
        }

    def pick(self, options: typing.Sequence[T]) -> T:
        return options[self.rng.randrange(len(options))]

    def learn(self, *values: object) -> None:
        """Something that was heard: it is said again now and then."""
        for value in values:
            pool: list[Any]
            if type(value) is int:
                pool = self.ints
            elif type(value) is str:
                pool = self.texts
            elif type(value) is bytes:
                pool = self.blobs
            else:
                continue
            pool.append(value)
            if len(pool) > 60:
                del pool[10]

    def learn_frame(self, header: bytes) -> None:
        """A header that a rank has sent."""
        fields = unpack_fields(header)
        self.learn(*fields[2:])
        of_its_kind = self.heard.setdefault(fields[0], [])  # some are heard far more often
        of_its_kind.append(fields)
        del of_its_kind[:-20]

    # -- values -----------------------------------------------------------------------------------

    def value(self, depth: int = 0) -> Any:
        """Something that msgpack knows."""
        kind = self.rng.randrange(12 if depth < 3 else 10)
        if kind < 3:
            return self._int()
        if kind < 5:
            return self._blob()
        if kind < 7:
            return self._text()
        if kind < 10:
            return self.pick([None, True, False, float("nan"), float("inf"), -1.5])
        if kind < 11:
            return [self.value(depth + 1) for _ in range(self.rng.randrange(6))]
        return {str(n): self.value(depth + 1) for n in range(self.rng.randrange(4))}

    def _small(self) -> int:
        return self.rng.randrange(5)

    def _mostly(self, *usual: int) -> int:
        """What does not end a link at once, as a rule."""
        return self.pick(usual) if self.rng.random() < 0.98 else self._int()

    def _int(self) -> int:
        rng = self.rng
        way = rng.randrange(10)
        if way < 6:
            return self.pick(self.ints)
        if way < 8:
            return self.pick(LIMITS) + rng.randrange(-1, 2)
        return self.pick([-1, -(2**63), 2 ** rng.randrange(1, 64) - 1, 2**62])

    def _text(self) -> str:
        if self.rng.random() < 0.9:
            return self.pick(self.texts)
        return self.pick(["\0", "\U0010ffff", "x" * 300, "x" * (self.pick(LIMITS) % 5000)])

    def _blob(self) -> bytes:
        rng = self.rng
        return self.pick(self.blobs) if rng.random() < 0.7 else rng.randbytes(self.pick([1, 8, 64]))

    def _tag(self) -> Any:
        return self.pick([None, None, "a", 7, "b", SETUP_TAG, self._text(), self._int()])

    # -- control messages -------------------------------------------------------------------------

    def of_type(self, hint: Any) -> Any:
        """A value of a type, as msgpack has it."""
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            return self.of_type(inner[0])
        if origin in (typing.Union, types.UnionType):
            return self.of_type(self.pick(inner))
        if origin is tuple:
            return [self.of_type(inner[0]) for _ in range(self.pick([0, 1, 1, 2, 3]))]
        if origin in (Mapping, dict):
            return {self._text(): self.value(1) for _ in range(self.rng.randrange(3))}
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return self.pick([one.value for one in hint])
        if is_dataclass(hint):
            return self.fields_of(typing.cast(type[Any], hint))
        return self._by_type[hint]()

    def fields_of(self, cls: type[Any], **given: Any) -> list[Any]:
        """The fields of a checked dataclass, each of which passes its check. `given`: as they
        are."""
        hints = typing.get_type_hints(cls, include_extras=True)
        values = []
        for name in field_names(cls):
            if name in given:
                values.append(given[name])
                continue
            check = hints[name].__metadata__[0]
            for _ in range(TRIES):
                value = self.of_type(hints[name])
                try:
                    check(value)
                except ValueError:
                    continue
                values.append(value)
                break
            else:
                raise AssertionError(f"no value was found for {cls.__name__}.{name}")
        return values

    def control(self, cls: type[Message], **given: Any) -> bytes:
        """A sound frame of a control message: what it says is arbitrary."""
        message = build(cls, self.fields_of(cls, **given))
        request = self.pick([0, 1, 2, 3, self.rng.randrange(limits.MAX_REQUEST)])
        return encode_message(message, request, max_body=limits.MAX_REPLY)

    def bad_control(self) -> bytes:
        """A frame that looks like one: of any code, with fields of any type."""
        code = self.pick([cls.code for cls in CONTROL] + [self.rng.randrange(300)])
        body = msgpack.packb([self.value() for _ in range(self.rng.randrange(10))])
        return encode(pack_fields(code, self.pick([0, 1, 7, limits.MAX_REQUEST])), body)

    # -- frames between ranks ---------------------------------------------------------------------

    def peer(self, kind: str) -> bytes:
        """A frame of that kind, its fields of the right types; of P2P and TAGS, of any kind of
        theirs."""
        row = PEER[kind]
        head = [getattr(kinds, kind), *map(self._field, row.fields[1:])]
        if kind in WITHIN:
            within = self.pick(WITHIN[kind])
            head[2:] = [self._field(name) for name in within]
        payload = b""
        if row.payload or (kind == "P2P" and head[2] in P2P_WITH_METADATA):
            payload = self.rng.randbytes(self.pick([0, 1, 2, 3, 8, 16, 100, 5000]))
        if kind == "P2P" and head[2] == p2p_frames.DATA:
            payload = self.rng.randbytes(self.pick([1, 8, 100]))
        return encode(_packed(head), payload)

    def again(self) -> bytes:
        """A header that was heard, maybe with another field in it; of collectives also with the
        number of one that nobody has called yet."""
        if not self.heard:
            return self.peer("INQUIRE")
        fields = list(self.pick(self.heard[self.pick([*self.heard])]))
        if len(fields) > 1:
            fields[1] = self.pick(self.contexts)  # mostly that of the group that is attacked now
        way = self.rng.random()
        if way < 0.4 and len(fields) > 2:
            fields[self.rng.randrange(2, len(fields))] = self.value()
        elif way < 0.8 and fields[0] in AHEAD and len(fields) > 3 and type(fields[3]) is int:
            fields[3] += self.pick([1, 2, 3, 5, 8, 20, 50, 100, 200])
        may = fields[0] in (kinds.MESSAGE, kinds.P2P)
        return encode(_packed(fields), self.rng.randbytes(self.pick([0, 1, 8, 16, 64]) * may))

    def bad_peer(self) -> bytes:
        fields = [self.value() for _ in range(self.rng.randrange(8))]
        code = self.rng.randrange(24)
        return encode(_packed([code, self.pick(self.contexts), *fields]), self.rng.randbytes(2))

    def own(self, came: int | None = None) -> bytes:
        """What a link says to another; `came`: a number that may be right."""
        number = came if came is not None and self.rng.random() < 0.8 else self._int() % 2**64
        return retransmission.own_frame(self.pick([*OWN, self.rng.randrange(256)]), number)

    def _field(self, name: str) -> Any:
        if name.isdigit():
            return int(name)
        if name == "…":
            return self._int()
        if name not in self._by_name:
            raise AssertionError(f"say in corpus.py what a field {name!r} of a frame may hold")
        return self._by_name[name]()

    # -- damage -----------------------------------------------------------------------------------

    def damaged(self, data: bytes) -> bytes:
        rng = self.rng
        way = rng.randrange(6)
        if way == 0 or not data:
            return data
        if way == 1:
            return data[: rng.randrange(len(data) + 1)]
        if way == 2:
            return prefix(rng.randbytes(self.pick([0, 4, 300])), 2 ** rng.randrange(33) - 1)
        if way == 3:
            return rng.randbytes(rng.randrange(1, 400))
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 6)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)


def _packed(fields: list[Any]) -> bytes:
    """A header; one that is too long for a frame is cut."""
    return pack_fields(*fields)[: 2**16 - 1]
