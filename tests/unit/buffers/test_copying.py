"""Copies of many bytes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from aiodist.buffers.copying import LARGE, copy


@pytest.mark.parametrize("nbytes", [0, 1, 100, LARGE - 1, LARGE, LARGE + 13, 1_000_003])
@pytest.mark.parametrize("shift", [0, 1, 8, 29])
def test_all_bytes_are_copied_and_no_others(nbytes: int, shift: int) -> None:
    data = memoryview(random.Random(nbytes).randbytes(nbytes + 64))[shift : shift + nbytes]
    target = bytearray(nbytes + 64)
    copy(memoryview(target)[7 : 7 + nbytes], data)
    assert target[7 : 7 + nbytes] == data
    assert not any(target[:7]) and not any(target[7 + nbytes :])


@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_other_sizes_and_memory_that_is_read_only_are_refused(nbytes: int) -> None:
    with pytest.raises(ValueError):
        copy(memoryview(bytearray(nbytes)), memoryview(bytes(nbytes + 1)))
    with pytest.raises((TypeError, ValueError)):
        copy(memoryview(bytes(nbytes)), memoryview(bytes(nbytes)))


def test_all_values_of_a_byte() -> None:
    data: Any = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    target: Any = np.zeros_like(data)
    copy(memoryview(target), memoryview(data))
    assert (target == data).all() and len(set(data.tolist())) == 256
