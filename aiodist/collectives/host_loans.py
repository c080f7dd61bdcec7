"""`Group.share` for arrays on the host: all ranks map one copy of them.

The owner copies its arrays into a segment and tells the others where to fetch it. They say whether
they have it, so either all ranks succeed or all fail. The memory lives as long as any process has a
view of it, even if the owner ends. No rank counts the views.
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
from aiodist.engine.operation import NoResult
from aiodist.errors import ProtocolError
from aiodist.phases.base import Part, Place, share
from aiodist.transports.handover import SegmentOffer, take
from aiodist.transports.surroundings import is_virtual

ALIGNMENT: Final = 64
"""Arrays begin at multiples of this number of bytes."""
AT_ONCE: Final = 1 << 20
"""Up to so many bytes are copied in the loop, and more in a thread."""
LONGEST_REASON: Final = 500
"""The most characters of a reason that the others are told."""


class Lent:
    """The owner's copy: memory with the metadata of a value and then its arrays."""

    def __init__(self, place: Place, value: Encoded) -> None:
        self._place = place
        self._meta = len(value.meta)
        self._parts: Sequence[memoryview] = [memoryview(value.meta), *value.buffers]
        self._starts = _starts([part.nbytes for part in self._parts])
        self._offer: SegmentOffer | None = None

    async def copy(self) -> bytes:
        """Make the copy. Return the words by which others fetch it. Raises OSError."""
        loop = self._place.loop
        if sys.platform != "linux" or is_virtual(loop):
            raise OSError("processes cannot share memory on this system or in this event loop")
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
        """Return the owner's own view of the copy."""
        assert self._offer is not None
        return _value(self._offer.segment.memory, self._meta, self._place.max_message_bytes)

    def close(self) -> None:
        """Let no further rank fetch the copy. Ranks that have it keep it."""
        if self._offer is not None:
            self._offer.close()


def lend(place: Place, lent: Lent, on_lane: bool) -> Part[Any]:
    """Run the owner's part after the first words.

    Returns the value, or a Failure with an OSError if not all ranks have it.
    """
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
        # All have said by now whether they have it. Or it failed, and no rank may have it.
        lent.close()


def borrow(place: Place, src: int, on_lane: bool) -> Part[Any]:
    """Run the part of all other ranks: map the value of rank `src`, or return a Failure."""
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
    """Return a reason, which is never empty because an empty one says that all is well."""
    return str(error) or type(error).__name__


def _settle(place: Place, problem: str, on_lane: bool) -> Part[NoResult | None]:
    """Share whether all ranks have it. If one has not, all fail alike."""
    said = yield from share(place, problem[:LONGEST_REASON].encode(), on_lane)
    for rank, reason in enumerate(said):
        if reason:
            # If the owner gives up, its copy cannot be fetched. Then the owner is not in this round
            # either, which fails because of that. If it is, its copy was there for all to fetch.
            yield from share(place, b"", on_lane)
            text = reason.decode(errors="replace")
            why = f"not all ranks can map this: rank {rank}: {text}; use broadcast, which copies"
            return NoResult(OSError(why))
    return None


async def _fetch(words: bytes, most: int) -> Any:
    try:
        offered, nbytes, meta = msgpack.unpackb(words)
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"malformed words about shared arrays: {error!r}") from None
    return _value(await take(offered, nbytes, writes=True), meta, most)


def _value(shared: memoryview, meta: int, most: int) -> Any:
    """Return the value over shared memory that begins with `meta` bytes of its metadata."""
    memory = np.frombuffer(shared, np.uint8)
    incoming = parse(bytes(memory[:meta]), max_bytes=most)
    incoming.allocate(foreign=_Over(memory, meta, incoming.specs))
    return incoming.finish()


class _Over:
    """A `Taker` that leaves the arrays of a value in place."""

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
    """Return the starts of parts of these sizes, one behind the other, and the end of the last."""
    return list(accumulate((size + -size % ALIGNMENT for size in sizes), initial=0))
