"""`Group.share` of arrays of the host: one copy of them, in memory that all ranks map.

The owner copies its arrays into a segment of their own, tells the others where to fetch it, and
they say whether they have it: all succeed, or all fail. The memory is there for as long as any
process has a view of it, whoever ends; nobody keeps books.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import msgpack
import numpy as np

from aiodist.buffers import arrays
from aiodist.buffers.encoding import Encoded
from aiodist.buffers.foreign import Target
from aiodist.buffers.mapped import Mapped
from aiodist.buffers.paths import Where
from aiodist.buffers.tokens import Spec
from aiodist.buffers.values import parse
from aiodist.engine.awaited import Awaited
from aiodist.engine.operation import Failure
from aiodist.errors import ProtocolError
from aiodist.phases.base import Part, Place, share
from aiodist.transports.handover import SegmentOffer, take
from aiodist.transports.surroundings import is_virtual

ALIGNMENT: Final = 64
"""Bytes: arrays begin at multiples of it."""
AT_ONCE: Final = 1 << 20
"""Bytes that are copied in the loop; more are copied in a thread."""
LONGEST_REASON: Final = 500
"""Characters of a reason that the others are told."""


class Lent:
    """What the owner gives: memory with the metadata of its value, and the arrays behind it."""

    def __init__(self, place: Place, value: Encoded) -> None:
        self._place = place
        self._meta = len(value.meta)
        self._parts: Sequence[memoryview] = [memoryview(value.meta), *value.buffers]
        self._starts = _starts([part.nbytes for part in self._parts])
        self._offer: SegmentOffer | None = None

    async def copy(self) -> bytes:
        """Make the copy: the words with which others fetch it. Raises OSError."""
        loop = self._place.loop
        if sys.platform != "linux" or is_virtual(loop):
            raise OSError("there is no memory here that processes could pass on")
        nbytes = self._starts[-1]
        self._offer = offer = SegmentOffer(loop, nbytes, "aiodist-share", all_write=True)
        if nbytes <= AT_ONCE:
            self._fill(offer.segment.memory)
        else:
            await loop.run_in_executor(None, self._fill, offer.segment.memory)
        packed: bytes = msgpack.packb((offer.words, nbytes, self._meta))
        return packed

    def _fill(self, memory: memoryview) -> None:
        for start, part in zip(self._starts, self._parts, strict=False):
            memory[start : start + part.nbytes] = part

    def value(self) -> Any:
        """The owner's own view of the copy."""
        assert self._offer is not None
        return _value(self._offer.segment.memory, self._meta, self._place.max_message_bytes)

    def close(self) -> None:
        """Nobody fetches it any more. Who has it, keeps it."""
        if self._offer is not None:
            self._offer.close()


def lend(place: Place, lent: Lent, on_lane: bool) -> Part[Any]:
    """The owner's part, after the first words: its value, or a Failure (OSError) where not
    all have it."""
    try:
        copying = Awaited(place.loop, lent.copy())
        yield copying
        try:
            words, problem = copying.result(), ""
        except OSError as error:
            words, problem = b"", _reason(error)
        yield from share(place, words, on_lane)
        failure = yield from _settle(place, problem, on_lane)
        return failure or lent.value()
    finally:
        # By now all have said whether they have it; or it failed, and nobody is to have it.
        lent.close()


def borrow(place: Place, src: int, on_lane: bool) -> Part[Any]:
    """The part of everybody else: the value of rank `src`, mapped, or a Failure."""
    words = (yield from share(place, b"", on_lane))[src]
    value: Any = None
    problem = ""
    if words:
        fetching = Awaited(place.loop, _fetch(words, place.max_message_bytes))
        yield fetching
        try:
            value = fetching.result()
        except OSError as error:
            problem = _reason(error)
    failure = yield from _settle(place, problem, on_lane)
    return failure or value


def _reason(error: OSError) -> str:
    """Never empty: that would say that all is well."""
    return str(error) or type(error).__name__


def _settle(place: Place, problem: str, on_lane: bool) -> Part[Failure | None]:
    """All say whether they have it. If not, all fail alike."""
    said = yield from share(place, problem[:LONGEST_REASON].encode(), on_lane)
    for rank, reason in enumerate(said):
        if reason:
            text = reason.decode(errors="replace")
            why = f"not all ranks can map this: rank {rank}: {text}; use broadcast, which copies"
            return Failure(OSError(why))
    return None


async def _fetch(words: bytes, most: int) -> Any:
    try:
        offered, nbytes, meta = msgpack.unpackb(words)
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"malformed words about shared arrays: {error!r}") from None
    return _value(await take(offered, nbytes, writes=True), meta, most)


def _value(shared: memoryview, meta: int, most: int) -> Any:
    """The value whose metadata are the first bytes of shared memory, over that memory."""
    memory = np.frombuffer(shared, np.uint8)
    incoming = parse(bytes(memory[:meta]), max_bytes=most)
    incoming.allocate(foreign=_Over(memory, meta, incoming.specs))
    return incoming.finish()


class _Over:
    """Has the arrays of a value where they lie: a `Taker`."""

    def __init__(self, memory: arrays.Flat, meta: int, specs: Sequence[Spec]) -> None:
        self._memory = memory
        sizes = [meta, *(spec.nbytes for spec in specs if spec.nbytes)]
        if _starts(sizes)[-1] != len(memory):
            raise ProtocolError(f"{len(memory)} bytes are shared for arrays of {sum(sizes)}")
        self._starts = iter(_starts(sizes)[1:])

    def is_foreign(self, value: Any) -> bool:
        return False

    def take(self, spec: Spec, out: Any, where: Where) -> Target | None:
        start = next(self._starts) if spec.nbytes else 0
        memory = self._memory[start : start + spec.nbytes]
        return Mapped(arrays.over(memory, spec.kind, spec.name, spec.shape))


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where parts of these sizes begin, one behind the other, and where the last one ends."""
    return list(accumulate((size + -size % ALIGNMENT for size in sizes), initial=0))
