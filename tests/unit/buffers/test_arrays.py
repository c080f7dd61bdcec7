"""One look at all kinds of arrays, and the short ways to their memory."""

from __future__ import annotations

import numpy as np
import pytest

from aiodist.buffers import arrays


def test_what_is_flat_is_read_as_it_lies() -> None:
    x = np.arange(6.0).reshape(2, 3)
    array = arrays.view(x, "x")
    assert array is not None and array.is_flat
    assert np.shares_memory(array.read(), x)
    turned = arrays.view(x.T, "x")
    assert turned is not None and not turned.is_flat
    assert turned.read().tolist() == [0, 3, 1, 4, 2, 5]
    assert not np.shares_memory(turned.read(), x)


def test_the_other_byte_order_is_staged_and_committed() -> None:
    x = np.zeros(3, ">i4")
    array = arrays.writable(x, "x")
    target, staged = array.stage()
    assert staged is target
    target[:] = [1, 2, 3]
    assert x.tolist() == [0, 0, 0]
    array.commit(staged)
    assert x.tolist() == [1, 2, 3]


def test_what_cannot_be_written_says_why() -> None:
    frozen = np.ones(2)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"out: float64\[2\] is read-only"):
        arrays.writable(frozen, "out")
    with pytest.raises(ValueError, match="share one place"):
        arrays.writable(np.lib.stride_tricks.as_strided(np.ones(1), (3,), (0,)), "out")
    with pytest.raises(TypeError, match="numpy scalar"):
        arrays.writable(np.float64(1), "out")
    with pytest.raises(TypeError, match="got list"):
        arrays.writable([1.0], "out")


@pytest.mark.parametrize("value", [np.ones((2, 2)).T, np.ones(4)[::2], [1.0], 1.0])
def test_short_ways_leave_what_is_out_of_the_ordinary(value: object) -> None:
    assert arrays.plain(value) is None
    if isinstance(value, np.ndarray):
        assert arrays.flat(value, value.dtype, value.size) is None
        assert arrays.window(value, value.nbytes) is None


def test_short_ways_are_to_the_memory_itself() -> None:
    x = np.zeros((2, 2), "<i4")
    plain, flat = arrays.plain(x), arrays.flat(x, x.dtype, 4)
    window = arrays.window(x, 16)
    assert plain is not None and flat is not None and window is not None
    plain[0], flat[1], window[8] = 1, 2, 3
    assert x.tolist() == [[1, 2], [3, 0]]


def test_a_dtype_or_an_example_and_not_both() -> None:
    assert arrays.kind_and_name("f4", None) == ("numpy", "float32")
    assert arrays.kind_and_name(None, np.ones(1, "i2")) == ("numpy", "int16")
    for dtype, like in ((None, None), ("f4", np.ones(1))):
        with pytest.raises(TypeError, match="dtype, or like="):
            arrays.kind_and_name(dtype, like)
