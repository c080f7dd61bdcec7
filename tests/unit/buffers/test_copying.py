"""Copies of many bytes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from aiodist.buffers.copying import LARGE, STREAMED, copy, copy_in, share
from aiodist.compiled import core


@pytest.mark.parametrize("nbytes", [0, 1, 100, LARGE - 1, LARGE, LARGE + 13, 1_000_003])
@pytest.mark.parametrize("shift", [0, 1, 8, 29])
def test_all_bytes_are_copied_and_no_others(nbytes: int, shift: int) -> None:
    data = memoryview(random.Random(nbytes).randbytes(nbytes + 64))[shift : shift + nbytes]
    target = bytearray(nbytes + 64)
    copy(memoryview(target)[7 : 7 + nbytes], data)
    assert target[7 : 7 + nbytes] == data
    assert not any(target[:7]) and not any(target[7 + nbytes :])


WAYS = [share, lambda into, data: copy_in(np.frombuffer(into, "u1"), np.frombuffer(data, "u1"))]
if core is not None:
    WAYS += [core.copy_to_shared, lambda into, data: core.copy_to_shared(into, data, True)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nbytes", [0, 1, STREAMED - 1, STREAMED, STREAMED + 77, LARGE + 13])
def test_the_same_for_copies_into_shared_memory(way: Any, nbytes: int) -> None:
    rng = random.Random(nbytes)
    for _ in range(8):
        start, shift = rng.randrange(70), rng.randrange(70)
        data = memoryview(rng.randbytes(nbytes + 70))[shift : shift + nbytes]
        target = bytearray(nbytes + 140)
        way(memoryview(target)[start : start + nbytes], data)
        assert target[start : start + nbytes] == data
        assert not any(target[:start]) and not any(target[start + nbytes :])


@pytest.mark.skipif(core is None, reason="needs the compiled part")
def test_the_compiled_part_refuses_other_sizes_and_memory_that_is_read_only() -> None:
    with pytest.raises(ValueError, match="5 bytes do not fill 4"):
        core.copy_to_shared(bytearray(4), bytes(5))
    with pytest.raises(TypeError, match="read-write"):
        core.copy_to_shared(bytes(4), bytes(4))


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
