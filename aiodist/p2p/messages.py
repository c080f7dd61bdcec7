"""What the receiving half of point to point keeps of messages and receives. No I/O in here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from aiodist.buffers import arrays
from aiodist.buffers.tokens import Spec
from aiodist.buffers.values import Incoming, parse
from aiodist.devices.work import DeviceWork
from aiodist.errors import ProtocolError
from aiodist.p2p import frames as wire
from aiodist.p2p.credit import Key, MessageTag, Source
from aiodist.p2p.pieces import Pieces
from aiodist.p2p.shared import Reading
from aiodist.work import Work

MOST_OF_ONE_ARRAY: Final = 1024
"""Bytes of metadata that no array needs more than, however many dimensions it has."""

REMEMBERED: Final = 128
"""Most bytes of metadata of which it is remembered that such a message came."""

EMPTY: Final = memoryview(b"")


class _Outside(NamedTuple):
    source: int
    tag: MessageTag
    nbytes: int


class Envelope(_Outside):
    """What a probe tells of a message: who sent it, its tag, the bytes of its arrays; and of a
    message that is one array its dtype and shape. A tuple of the first three."""

    # Not fields of the tuple: programs take it apart into three.
    shape: tuple[int, ...] | None = None
    """That of the array; None for any other value."""
    _spec: Spec | None = None

    @classmethod
    def of(cls, message: Message) -> Envelope:
        """What is known of `message` before a receive takes it."""
        made = cls(message.source, message.tag, message.nbytes)
        made._spec = spec = _array_in(message)
        made.shape = None if spec is None else spec.shape
        return made

    @property
    def dtype(self) -> Any:
        """The dtype of numpy or torch that a receive without `out` would have; None where the
        message is no array. Raises TypeError for one that this rank's torch does not have."""
        if self._spec is None:
            return None
        return arrays.empty(self._spec.kind, self._spec.name, (0,), "dtype").value.dtype


def _array_in(message: Message) -> Spec | None:
    """The array that a message is, if it is one and its metadata is here."""
    # The metadata of an array is short. That of a tree, which may be long, is not read for this.
    if message.meta is None or message.meta_nbytes > MOST_OF_ONE_ARRAY:
        return None
    try:
        return parse(message.meta).array
    except ProtocolError:  # whoever receives it will hear of that
        return None


@dataclass(eq=False, slots=True)
class Receiving:
    """A receive whose Work is pending. Wildcards are None."""

    number: int  # in the order in which messages and receives came to be
    work: Work[Any]
    source: Source
    tag: Key
    out: Any  # where the value goes; None: to memory of its own
    partial: bool = False  # the value may be shorter than `out`
    device_work: DeviceWork | None = None  # where `out` is on a device
    message: Message | None = None  # what it was matched with
    target: Incoming | None = None
    """Where the value comes together, once metadata is here."""
    ready: tuple[memoryview, Incoming] | None = None
    """The target for a message of such metadata, made beforehand."""

    def let_go(self) -> None:
        """The receive fails: nothing is written to `out` that is not queued there by now."""
        if self.target is not None and self.target.foreign is not None:
            self.target.foreign.let_go()


class Probing(Receiving):
    """A probe whose Work is pending."""

    __slots__ = ()


@dataclass(eq=False, slots=True)
class Message:
    """A message that came, whole or announced, and was not delivered yet: the landing of its first
    frame."""

    came: Callable[[Message], None]  # told when that frame is here
    source: int
    tag: MessageTag
    price: int  # what it costs of the credit of its sender
    wanted: bool  # it answers a want, as its sender says
    meta_nbytes: int  # bytes of metadata
    nbytes: int  # bytes of data
    sid: int | None  # None: eager
    words: bytes = b""  # how to read those of its arrays that are on a device
    reading: Reading | None = None  # its data, where it lies
    pushed: bool = False  # its data follows without being pulled
    front: int = 0  # bytes of it that do, and that count as unconsumed: no receive has taken it
    number: int = 0  # in the order of their coming; 0: its first frame is on the way
    receiving: Receiving | None = None  # what it was matched with
    memory: memoryview = EMPTY  # what the first frame brought, or the metadata pulled
    meta: memoryview | None = None  # None: not here yet
    pieces: Pieces | None = None  # of the part that was pulled last
    body: Incoming | None = None  # what the data is pulled into
    part: int = wire.BODY  # of a message of arrays on the host: what to say when it is pulled
    fetched: bool = False
    """Its sender has been asked for the data, or pushed it: all that lay on its device is here, or
    in shared memory."""
    complete: bool = False  # all of it is here
    gone: bool = False  # delivered, withdrawn or refused

    def landed(self) -> None:
        self.came(self)


@dataclass(eq=False, slots=True)
class Origin:
    """One sender."""

    gone: bool = False  # nothing of it counts any more
    announced: dict[int, Message] = field(default_factory=dict)  # by id: those not complete
    last_sid: int = -1  # the id of the last one that it announced: ids ascend
    may_push: bool = False  # it has leave to
    stray: Message | None = None  # that it pushed last, where no receive was waiting for it
    # Ids of those that were pushed and refused: their data is still to come, up to FIN or WITHDRAW.
    skipped: set[int] = field(default_factory=set)
    last: tuple[MessageTag, bytes] = (0, b"")
    """Tag and metadata of its last message; b"" where that was long."""
