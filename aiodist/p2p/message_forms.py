"""The forms of messages: what is the same in all messages of one kind.

`aiodist.p2p.express` keeps them, and the compiled part reads them. A form is a dict that makes what
is around the data of a message the first time it is asked for a tag.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from aiodist.buffers import arrays, tokens
from aiodist.buffers.tokens import Spec
from aiodist.p2p import frames as wire
from aiodist.p2p.credit import EAGER, MessageTag, cost
from aiodist.p2p.point_to_point import as_tag
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields, prefix

MOST_TAGS: Final = 64
"""The most tags for which a form keeps what is around the data."""

_OTHER_SID: Final = 0xFEFDFCFB
"""An id, none of whose 4 bytes is that of `frames.FIRST_SID`."""


class Wrapping(NamedTuple):
    """What is the same in all messages of one dtype, shape and tag. The compiled part reads it."""

    head: bytes
    """Its bytes up to the data, with `frames.FIRST_SID` as the id of a pushed one."""
    cost: int
    """What such a message costs."""
    nbytes: int
    """The bytes of metadata and data."""
    size: int
    """The bytes of data."""
    text: bytes
    """How records show it."""
    end: bytes = b""
    """Its bytes after the data."""
    ids: tuple[int, ...] = ()
    """Where the 4 bytes of the id are in `head` and `end`, if it is pushed: at three places."""


class MessageForm(dict[MessageTag, Wrapping]):
    """What is the same in all messages of one dtype and shape, by tag."""

    __slots__ = ("described", "is_pushed", "meta", "nbytes", "plain", "spec", "start", "text")

    def __init__(self, context: bytes, spec: Spec) -> None:
        self.start = (kinds.P2P, context)
        self.spec = spec
        self.plain = spec[1:]  # for any kind of array
        self.text = arrays.shown(spec.name, spec.shape).encode()
        self.meta = tokens.pack([tokens.array(spec.kind, spec.name, spec.shape)])
        self.described = len(self.meta)  # bytes of metadata
        self.nbytes = self.described + spec.nbytes
        self.is_pushed = self.nbytes > EAGER

    @property
    def shown(self) -> int:
        """The bytes of arrays, as the `nbytes` of Works say them."""
        return self.nbytes - self.described

    def __missing__(self, tag: MessageTag) -> Wrapping:
        tag = as_tag(tag)
        if self.is_pushed:
            price = cost(tag, len(self.meta))
            head, end = self.around(tag, wire.FIRST_SID)
            other = b"".join(self.around(tag, _OTHER_SID))
            ids = [at for at, (a, b) in enumerate(zip(head + end, other, strict=True)) if a != b]
        else:
            price, end, ids = cost(tag, self.nbytes), b"", []
            header = pack_fields(*self.start, wire.EAGER, tag, False, self.described)
            head = prefix(header, self.nbytes) + self.meta
        if len(self) >= MOST_TAGS:
            self.clear()
        found = self[tag] = Wrapping(
            head, price, self.nbytes, self.spec.nbytes, self.text, end, tuple(ids[::4])
        )
        return found

    def around(self, tag: MessageTag, sid: int) -> tuple[bytes, bytes]:
        """Return what comes before and after the data of a pushed message with the id `sid`."""
        start, size = self.start, self.spec.nbytes
        about = pack_fields(*start, wire.PUSH, tag, False, sid, len(self.meta), size)
        data = prefix(pack_fields(*start, wire.DATA, sid), size)
        end = prefix(pack_fields(*start, wire.FIN, sid), 0)
        return prefix(about, len(self.meta)) + self.meta + data, end


class ValueForm(MessageForm):
    """What is the same in all messages of values, such as dicts, with so many bytes of metadata and
    of arrays.

    Metadata and arrays together are read as the data of the message.
    """

    def __init__(self, context: bytes, described: int, nbytes: int) -> None:
        whole = described + nbytes
        super().__init__(context, Spec("numpy", "uint8", (whole,), whole))
        self.meta = self.text = b""
        self.nbytes, self.described = whole, described
        self.is_pushed = False
        self.plain = "", (), 0  # it is like no array


class Credits(dict[MessageTag, bytes]):
    """By tag, how a frame begins that returns credit for this tag alone, up to an amount of 4
    bytes."""

    def __init__(self, group: bytes) -> None:
        super().__init__()
        self._start = kinds.P2P, group, wire.CREDIT

    def __missing__(self, tag: MessageTag) -> bytes:
        if len(self) >= MOST_TAGS:
            self.clear()
        whole = prefix(pack_fields(*self._start, tag, wire.FOUR_BYTES), 0)
        head = self[tag] = whole[:-9]  # without the amount, and the 5 bytes for no payload
        return head
