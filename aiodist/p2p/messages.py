"""What the receiving half of point to point keeps of messages and receives. No I/O in here."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

from aiodist.buffers.values import Incoming
from aiodist.devices.work import DeviceWork
from aiodist.p2p.credit import Key, MessageTag
from aiodist.p2p.pieces import Pieces
from aiodist.work import Work

REMEMBERED: Final = 128
"""Most bytes of metadata of which it is remembered that such a message came."""


class Envelope(NamedTuple):
    """What a probe tells of a message: who sent it, its tag, the bytes of its arrays."""

    source: int
    tag: MessageTag
    nbytes: int


class Receiving:
    """A receive whose Work is pending. Wildcards are None."""

    __slots__ = (
        "device_work", "message", "number", "out", "ready", "source", "tag", "target", "work",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        work: Work[Any],
        source: int | None,
        tag: Key,
        out: object,
        device_work: DeviceWork | None = None,
    ) -> None:
        self.number = number
        self.work = work
        self.source = source
        self.tag = tag
        self.out = out
        self.device_work = device_work  # where `out` is on a device
        self.message: Message | None = None  # what it was matched with
        self.target: Incoming | None = None
        """Where the value comes together, once metadata is here."""
        self.ready: tuple[memoryview, Incoming] | None = None
        """The target for a message of such metadata, made beforehand."""

    def let_go(self) -> None:
        """It fails: nothing is written to `out` that is not queued there by now."""
        if self.target is not None and self.target.foreign is not None:
            self.target.foreign.let_go()


class Probing(Receiving):
    """A probe whose Work is pending."""

    __slots__ = ()


class Arrived(Protocol):
    """Who is told of messages whose first frame is here."""

    def came(self, message: Message) -> None: ...


class Message:
    """A message that came, whole or announced, and was not delivered yet: the landing of its first
    frame."""

    __slots__ = (
        "_arrived", "body", "complete", "fetched", "gone", "memory", "meta", "meta_nbytes",
        "nbytes", "number", "pieces", "price", "receiving", "sid", "source", "tag", "wanted",
        "words",
    )  # fmt: skip

    def __init__(
        self,
        arrived: Arrived,
        source: int,
        tag: MessageTag,
        price: int,
        wanted: bool,
        meta_nbytes: int,
        nbytes: int,
        sid: int | None,
        words: bytes = b"",
    ) -> None:
        self._arrived = arrived
        self.number = 0  # in the order of their coming; 0: its first frame is on the way
        self.source = source
        self.tag = tag
        self.price = price
        self.wanted = wanted
        self.words = words
        self.meta_nbytes = meta_nbytes
        self.nbytes = nbytes
        self.sid = sid  # None: eager
        self.receiving: Receiving | None = None
        self.memory = memoryview(b"")  # what the first frame brought, or the metadata pulled
        self.meta: memoryview | None = None
        self.pieces: Pieces | None = None  # of the part that was pulled last
        self.body: Incoming | None = None  # what the data is pulled into
        self.fetched = False
        """Its sender has been asked for the data: all that lay on its device is here."""
        self.complete = False
        self.gone = False  # delivered, withdrawn or refused

    def landed(self) -> None:
        self._arrived.came(self)


class Origin:
    """One sender."""

    __slots__ = ("announced", "gone", "last", "last_sid")

    def __init__(self, *, gone: bool = False) -> None:
        self.gone = gone  # nothing of it counts any more
        self.announced: dict[int, Message] = {}
        self.last_sid = -1
        self.last: tuple[MessageTag, bytes] = (0, b"")
        """Tag and metadata of its last message; b"" where that was long."""
