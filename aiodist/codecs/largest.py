"""The few values that matter most, with their places."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from aiodist.codecs.base import Bytes, Codec, Floats, checked_count, checked_feedback

_AT_ONCE: Final = 1 << 15
"""Values that are looked at at once: what is computed on the way stays in the cache."""
_SAMPLE: Final = 1 << 14
_MOST: Final = 1 << 32


class topk(Codec):
    """The values of the largest magnitude with their places; all others become zero.

    Of n values, max(1, int(n * share)) are kept, without change, at 8 bytes each; zeros are left
    out. `share=0.01` takes 2 % of the bytes. A sum of m such arrays keeps the union of their
    places, so it takes up to m times as many bytes, and at most those of float32. Use it with
    error feedback: without, values that are never among the largest are never sent. Values that
    are not finite count as the largest, so at least one of them is kept.

    Args:
        share: the share of values that is kept, above 0 and at most 1.
    """

    def __init__(self, share: float = 0.01, *, error_feedback: bool = False) -> None:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"share={share!r}: expected a number above 0, at most 1")
        self.name = f"topk(share={float(share)!r})"
        self.error_feedback = checked_feedback(error_feedback)
        self.share = float(share)
        self._members = 1

    def of_sum(self, members: int) -> Codec:
        codec = topk(self.share, error_feedback=self.error_feedback)
        codec._members = self._members * members
        codec.name = f"topk(share={self.share!r}, members={codec._members})"
        return codec

    def _kept(self, count: int) -> int:
        return min(count, self._members * max(1, int(count * self.share)))

    def nbytes(self, count: int) -> int:
        if checked_count(count) > _MOST:
            raise ValueError(f"topk codes at most {_MOST} values, not {count}: code them in parts")
        return min(8 * self._kept(count), 4 * count)

    def encode(self, values: Floats, out: Bytes) -> int:
        size = self.nbytes(values.size)
        places = largest(values, self._kept(values.size))
        if 8 * places.size >= 4 * values.size:  # all values, without places
            out[:size].view("<f4")[:] = values
            return size
        half = 4 * places.size
        out[:half].view("<u4")[:] = places
        out[half : 2 * half].view("<f4")[:] = values[places]
        return 2 * half

    def decode(self, data: Bytes, out: Floats) -> None:
        if data.size > self.nbytes(out.size):
            raise self.refuse(data, out.size)
        if data.size == 4 * out.size:
            out[:] = data.view("<f4")
            return
        kept, rest = divmod(data.size, 8)
        places = data[: 4 * kept].view("<u4").astype(np.int64)
        rising = bool((places[1:] > places[:-1]).all())
        if rest or not rising or (kept and places[-1] >= out.size):
            raise self.refuse(data, out.size)
        out.fill(0)
        out[places] = data[4 * kept :].view("<f4")


def largest(values: Floats, kept: int) -> NDArray[np.int64]:
    """Return the places, in order, of the `kept` values of the largest magnitude, zeros left out.

    A threshold is found in a sample, so that only the values above it have to be compared with
    each other (Floyd and Rivest, "Expected time bounds for selection", 1975). Of equal ones, the
    first are kept.
    """
    sample = _magnitudes(values[:: max(1, values.size // _SAMPLE)])
    share = kept * sample.size / max(1, values.size)
    wanted = int(share + 4 * share**0.5) + 8  # more than enough, as a rule
    least = 1
    if wanted < sample.size:
        least = max(1, int(np.partition(sample, sample.size - wanted)[-wanted]))
    places = _above(values, least)
    if places.size < kept and least > 1:  # the sample was not like the rest
        places = _above(values, 1)
    if places.size > kept:
        # Values are selected faster than places, and places that are filtered stay in order.
        found = _magnitudes(values[places])
        last = np.partition(found, found.size - kept)[found.size - kept]
        chosen = found > last
        equal = np.flatnonzero(found == last)
        chosen[equal[: kept - np.count_nonzero(chosen)]] = True
        places = places[chosen]
    return places


def _above(values: Floats, least: int) -> NDArray[np.int64]:
    found = [
        np.flatnonzero(_magnitudes(values[start : start + _AT_ONCE]) >= least) + start
        for start in range(0, values.size, _AT_ONCE)
    ]
    return np.concatenate([np.empty(0, np.int64), *found])


def _magnitudes(values: Floats) -> NDArray[np.int32]:
    """The bits without the sign: as integers they are in the order of magnitudes, NaN above all."""
    return values.view(np.int32) & np.int32(0x7FFFFFFF)
