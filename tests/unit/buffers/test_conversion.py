"""Floats of one dtype as floats of another, as torch converts them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aiodist.buffers import arrays, conversion
from aiodist.buffers.conversion import FLOATS, convert

VALUES = [0.0, -0.0, 1.5, -3.25, 1e-3, 65504.0, 70000.0, 3e38, 1e300, np.inf, -np.inf, np.nan]
VALUES += [1 + 2**-8, 1 + 3 * 2**-9, 2**-24, 2**-149, 1 / 3, -1e-40]
# Above the middle of two bfloat16, and at it as float32.
VALUES += [1 + 2**-8 + 2**-40, 1 + 3 * 2**-8 + 2**-40]


@pytest.mark.parametrize("name", sorted(FLOATS))
@pytest.mark.parametrize("into", sorted(FLOATS))
def test_floats_are_rounded_as_torch_does(name, into, monkeypatch):
    monkeypatch.setattr(conversion, "_AT_ONCE", 5)
    tensor = torch.tensor(VALUES, dtype=torch.float64).to(getattr(torch, name)).reshape(2, 10)
    source = arrays.view(tensor, "x")
    expected = tensor.to(getattr(torch, into))
    for shape, place in (((2, 10), lambda x: x), ((10, 2), lambda x: x.T)):
        target = torch.zeros(shape, dtype=getattr(torch, into))
        convert(source.base, name, arrays.writable(place(target), "out"))
        torch.testing.assert_close(place(target), expected, rtol=0, atol=0, equal_nan=True)


def test_scalars_and_empty_arrays():
    out = np.zeros((), np.float32)
    convert(np.array(1.5), "float64", arrays.writable(out, "out"))
    assert out == 1.5
    convert(np.empty((0, 3)), "float64", arrays.writable(np.empty((0, 3), np.float16), "out"))
