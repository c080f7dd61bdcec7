"""Error feedback: what one coding loses, the next one adds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from aiodist.codecs.base import Bytes, Codec, Floats


class ErrorFeedback:
    """What the codings of one array have lost so far: add it to the next values, and code these.

    Without error feedback, small values are lost each time. With it they are only late. After any
    number of codings, the sum of the decoded values differs from the sum of the values by at most
    `residual`, up to rounding. If a value is not finite, its `residual` becomes 0, so that one NaN
    does not stay for ever.

    Sources: Seide et al., "1-bit stochastic gradient descent", 2014; Karimireddy et al., "Error
    feedback fixes SignSGD", 2019.

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
        many bytes were written. If the codec raises, begin anew with another `ErrorFeedback`,
        because `residual` has these values already.
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


class Residuals:
    """What the codings of one array have lost so far in several places, kept from call to call.

    `kind`: what was called. A call of another kind begins anew.
    """

    def __init__(self) -> None:
        self._kind: object = None
        self._kept: dict[object, ErrorFeedback] = {}
        self._busy = False

    @contextmanager
    def trial(self, kind: object) -> Iterator[dict[object, ErrorFeedback]]:
        """The residuals for one call. They are kept only if that succeeds, because a call that
        fails has given its values to no rank.

        Raises RuntimeError if another call has them.
        """
        if self._busy:
            raise RuntimeError(
                "another call with error feedback and the same tag is under way: await it first, "
                "because the next call codes what it loses"
            )
        tried: dict[object, ErrorFeedback] = {}
        if self._kind == kind:
            for key, feedback in self._kept.items():
                tried[key] = ErrorFeedback(0)
                tried[key].residual = feedback.residual.copy()
        self._busy = True
        try:
            yield tried
            self._kind, self._kept = kind, tried
        finally:
            self._busy = False
