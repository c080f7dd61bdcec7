"""Error feedback: what one coding loses, the next one adds."""

from __future__ import annotations

import numpy as np

from aiodist.codecs.base import Bytes, Codec, Floats


class ErrorFeedback:
    """What the codings of one array have lost so far: add it to the next values, and code these.

    Without it, small values are lost each time. With it they are only late: after any number of
    codings, the sum of what was decoded differs from the sum of the values by no more than
    `residual` (Seide et al., "1-bit stochastic gradient descent", 2014; Karimireddy et al., "Error
    feedback fixes SignSGD", 2019). Where a value was not finite, `residual` is 0 afterwards, so
    that one NaN does not stay for ever.

    Args:
        count: how many values the array has.
    """

    residual: Floats
    """What is not sent yet, float32[count]."""

    def __init__(self, count: int) -> None:
        self.residual = np.zeros(count, np.float32)

    def encode(self, codec: Codec, values: Floats, out: Bytes, decoded: Floats) -> int:
        """Code `values` plus the residual to `out`, as `codec.encode` does, and keep what is lost.

        `decoded`, float32[count], gets what the receivers decode; it may be `values`. Return how
        many bytes were written.
        """
        residual = self.residual
        with np.errstate(all="ignore"):
            residual += values
            size = codec.encode(residual, out)
            codec.decode(out[:size], decoded)
            residual -= decoded
        finite = np.isfinite(residual)
        if not finite.all():
            residual[~finite] = 0
        return size
