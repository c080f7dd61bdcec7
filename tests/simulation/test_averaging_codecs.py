"""Averagers of which a codec fails, on a simulated network."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from averaging_stage import Stage

from aiodist.codecs.base import Codec


class FailingOnce(Codec):
    """Keeps all bits. `encode` number `number` raises."""

    name, error_feedback = "plain", False

    def __init__(self, number: int) -> None:
        self.left = number

    def nbytes(self, count: int) -> int:
        return 4 * count

    def encode(self, values: Any, out: Any) -> int:
        self.left -= 1
        if not self.left:
            raise OSError("the codec broke")
        out[: values.nbytes] = values.view(np.uint8)
        return int(values.nbytes)

    def decode(self, data: Any, out: Any) -> None:
        out[:] = data.view(np.float32)


@pytest.mark.parametrize("number", [1, 4])
def test_who_has_a_failing_codec_misses_no_round(number: int) -> None:
    """The parameters of a member that adds up results would differ ever after."""
    stage = Stage(3, seed=3)
    sums = [stage.nothing for _ in range(3)]

    async def main(member: int) -> None:
        codec = FailingOnce(number if member == 1 else 0)
        async with stage.averager(member, grace=1.0, codec=codec, max_stale=9) as avg:
            while avg.rounds.get("", 0) < 5:
                try:
                    found = await avg.average(stage.place(member, avg.rounds.get("", 0)))
                except OSError:
                    assert bool(avg.rounds) is (number > 1)
                else:
                    sums[member] += found.value
            await asyncio.sleep(30.0)

    stage.play(main)
    assert sums[0].any()
    for one in sums:
        np.testing.assert_array_equal(one, sums[0])
