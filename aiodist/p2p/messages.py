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
from aiodist.p2p.credit import CorePushes, Key, MessageTag, Source
from aiodist.p2p.pieces import Pieces
from aiodist.p2p.shared import SharedReading
from aiodist.work import Work

MOST_OF_ONE_ARRAY: Final = 1024
"""The most bytes of metadata of a single array, with any number of dimensions."""

REMEMBERED: Final = 2048
"""The most bytes of metadata of a message that is remembered."""

EMPTY: Final = memoryview(b"")


class _Outside(NamedTuple):
    source: int
    tag: MessageTag
    nbytes: int


class Envelope(_Outside):
    """What a probe says about a message.

    It is the tuple ``(source, tag, nbytes)``: the rank that sent it, its tag, and the bytes of its
    arrays. `dtype` and `shape` are those of a message that is one array.
    """

    # These are not fields of the tuple, because programs unpack it into three.
    shape: tuple[int, ...] | None = None
    """The shape of the array. None: the message is not an array."""
    _spec: Spec | None = None

    @classmethod
    def of(cls, message: ComingMessage) -> Envelope:
        """Return what is known of `message` before a receive takes it."""
        made = cls(message.source, message.tag, message.nbytes)
        made._spec = spec = _array_in(message)
        made.shape = None if spec is None else spec.shape
        return made

    @property
    def dtype(self) -> Any:
        """The numpy or torch dtype that a receive without `out` would give. None: the message is
        not an array.

        Raises TypeError if torch on this rank does not have that dtype.
        """
        if self._spec is None:
            return None
        return arrays.empty(self._spec.kind, self._spec.name, (0,), "dtype").value.dtype


def _array_in(message: ComingMessage) -> Spec | None:
    """Return the array that a message consists of, if it is one and its metadata is here."""
    # The metadata of an array is short. That of a tree may be long, and is not read for this.
    if message.meta is None or message.meta_nbytes > MOST_OF_ONE_ARRAY:
        return None
    try:
        return parse(message.meta).array
    except ProtocolError:  # the receive that takes it will fail by it
        return None


@dataclass(eq=False, slots=True)
class PendingReceive:
    """A receive whose Work is pending. None is a wildcard."""

    number: int  # in the order of messages and receives
    work: Work[Any]
    source: Source
    tag: Key
    out: Any  # memory for the value; None: memory of its own
    partial: bool = False  # the value may be shorter than `out`
    device_work: DeviceWork | None = None  # if `out` is on a device
    message: ComingMessage | None = None
    target: Incoming | None = None
    """The memory of the value, once metadata is here."""
    ready: tuple[memoryview, Incoming] | None = None
    """A target that was made before, for a message of such metadata."""

    def let_go(self) -> None:
        """Stop writing to `out`, because the receive fails. Copies that are queued on a device
        still go there."""
        if self.target is not None and self.target.foreign is not None:
            self.target.foreign.let_go()


class Probing(PendingReceive):
    """A probe whose Work is pending."""

    __slots__ = ()


@dataclass(eq=False, slots=True)
class ComingMessage:
    """A message that came, whole or announced, and was not delivered yet. It is the landing of its
    first frame."""

    came: Callable[[ComingMessage], None]  # called when that frame is here
    source: int
    tag: MessageTag
    price: int  # what it costs of its sender's credit; 0: the sender has that back
    wanted: bool  # it answers a want, its sender says
    meta_nbytes: int
    nbytes: int  # of data
    sid: int | None  # None: eager
    words: bytes = b""  # how to read its arrays on a device
    reading: SharedReading | None = None  # its data in the sender's memory
    pushed: bool = False  # its data follows without a pull
    # data bytes that follow without a pull, and are unconsumed: no receive has taken it
    front: int = 0
    number: int = 0  # in the order of arrival; 0: its first frame is still coming
    receiving: PendingReceive | None = None
    memory: memoryview = EMPTY  # the first frame, or metadata that was pulled
    meta: memoryview | None = None  # None: not here yet
    pieces: Pieces | None = None  # of the part that was pulled last
    body: Incoming | None = None  # the memory that data is pulled to
    part: int = wire.BODY  # for arrays on the host: what to say with the pull
    fetched: bool = False
    """The sender was asked for the data, or pushed it. All that is on its device, or in shared
    memory, is here."""
    complete: bool = False
    gone: bool = False  # delivered, withdrawn or refused
    lost: Exception | None = None  # why its data are lost: the next receive fails

    def landed(self) -> None:
        self.came(self)


@dataclass(eq=False)
class Origin(CorePushes):
    """One sender."""

    gone: bool = False  # ignore everything that comes from it
    announced: dict[int, ComingMessage] = field(default_factory=dict)  # by id: incomplete messages
    stray: ComingMessage | None = None  # a pushed message that no receive waited for
    # Ids of pushed messages that were refused. Their data still comes, up to FIN or WITHDRAW.
    skipped: set[int] = field(default_factory=set)
    last: tuple[MessageTag, bytes] = (0, b"")
    """The tag and metadata of its last message with metadata of at most `REMEMBERED` bytes. b"":
    there was none."""

    def __post_init__(self) -> None:
        self.sid, self.may_push = -1, False
