"""Half of the bits of each value."""

from __future__ import annotations

from typing import Final

import numpy as np

from aiodist.buffers.kernels import round_to_bfloat16
from aiodist.codecs.base import Bytes, Codec, Floats, checked_count, checked_feedback

_AT_ONCE: Final = 1 << 14
"""Values that are coded at once: what is computed on the way stays in the cache."""


class bf16(Codec):
    """The upper 16 bits of each value, rounded to the nearest, ties to even: half the bytes.

    The relative error is at most 2**-8 (of normal numbers). NaN stays NaN and infinity stays
    infinity. Values above 3.39e38, which is nearly the largest float32, become infinity.
    """

    def __init__(self, *, error_feedback: bool = False) -> None:
        self.name = "bf16()"
        self.error_feedback = checked_feedback(error_feedback)

    def nbytes(self, count: int) -> int:
        return 2 * checked_count(count)

    def encode(self, values: Floats, out: Bytes) -> int:
        coded = out[: 2 * values.size].view("<u2")
        for start in range(0, values.size, _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            round_to_bfloat16(values[part], coded[part])
        return coded.nbytes

    def decode(self, data: Bytes, out: Floats) -> None:
        if data.size != 2 * out.size:
            raise self.refuse(data, out.size)
        coded, bits = data.view("<u2"), out.view("<u4")
        for start in range(0, out.size, _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            np.copyto(bits[part], coded[part])
            bits[part] <<= 16
