"""Kernels made of functions of users, on numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiodist.buffers import custom
from aiodist.buffers.custom import CustomKernel
from aiodist.types import ReduceOp


def kernel(f: Any, *shapes: tuple[int, ...], name: str = "float64", **options: Any) -> CustomKernel:
    return CustomKernel(ReduceOp.custom(f, **options), name, [("numpy", s) for s in shapes])


def overwrite(a: Any, b: Any) -> Any:
    """Writes into both arguments, which it is not supposed to do to the second."""
    a -= b
    b[...] = -1
    return a


@pytest.mark.parametrize("elementwise", [False, True])
def test_inputs_are_never_altered(elementwise: bool) -> None:
    k = kernel(overwrite, (4,), elementwise=elementwise)
    xs = [np.arange(4.0) * r for r in (5, 2, 1)]
    kept = [x.copy() for x in xs]
    out = np.empty(4)
    k.reduce(xs, out, 3)
    assert out.tolist() == [0, 2, 4, 6]
    into = np.empty(4)
    k.combine(into, xs[0], xs[1])
    assert into.tolist() == [0, 3, 6, 9]
    assert all(np.array_equal(x, y) for x, y in zip(xs, kept, strict=True))


@pytest.mark.parametrize("elementwise", [False, True])
def test_results_may_be_one_array_or_read_only(elementwise: bool) -> None:
    result = np.empty(4)

    def into_one_array(a: Any, b: Any) -> Any:
        result[...] = 0
        result[...] += a - b
        return result

    def read_only(a: Any, b: Any) -> Any:
        a -= b
        return np.frombuffer(a.tobytes())

    xs = [np.arange(4.0) * r for r in (5, 2, 1)]
    for f in (into_one_array, read_only):
        out = np.empty(4)
        kernel(f, (4,), elementwise=elementwise).reduce(xs, out, 3)
        assert out.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("alias", [0, 1, 2])
def test_out_may_be_an_operand(alias: int) -> None:
    xs = [np.arange(4.0) * r for r in (5, 2, 1)]
    kernel(np.subtract, (4,)).reduce(xs, xs[alias], 3)
    assert xs[alias].tolist() == [0, 2, 4, 6]
    a, b = np.arange(3.0), np.ones(3)
    kernel(np.subtract, (3,)).combine(b, a, b)
    assert b.tolist() == [-1, 0, 1]


def test_load_and_store_copy() -> None:
    k = kernel(np.add, (3,))
    x, into, out = np.arange(3.0), np.empty(3), np.empty(3)
    assert k.load(x).tolist() == [0, 1, 2]
    assert not np.shares_memory(k.load(x), x)
    assert k.load(x, into) is into
    k.store(into, out, 9)
    assert out.tolist() == [0, 1, 2]


def test_elementwise_functions_get_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "PIECE_BYTES", 32)
    sizes = []

    def f(a: Any, b: Any) -> Any:
        sizes.append(a.shape)
        return a + b

    k = kernel(f, (5, 2), elementwise=True)
    assert k.sliceable
    out = np.empty(10)
    k.reduce([np.ones(10), np.ones(10)], out, 2)
    assert sizes == [(4,), (4,), (2,)]
    assert out.tolist() == [2] * 10


def test_whole_functions_get_each_array() -> None:
    shapes = []

    def f(a: Any, b: Any) -> Any:
        shapes.append(a.shape)
        return a @ b if a.ndim == 2 else a + b

    k = kernel(f, (2, 2), (0,), (), (3,))
    assert not k.sliceable
    a, out = np.arange(8.0), np.empty(8)
    k.reduce([a, a], out, 2)
    assert shapes == [(2, 2), (), (3,)]
    assert out.tolist() == [2, 3, 6, 11, 8, 10, 12, 14]


@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (
            lambda a, b: None,
            TypeError,
            "the result of the operator <lambda> must be .* it is NoneType",
        ),
        (lambda a, b: [1.0, 2.0], TypeError, "it is list"),
        (lambda a, b: a.astype("f4"), TypeError, r"is float32\[2\], each argument is float64\[2\]"),
        (lambda a, b: a[:1], ValueError, r"is float64\[1\], each argument is float64\[2\]"),
        (lambda a, b: (a + b).astype(object), TypeError, "dtype object"),
        (lambda a, b: 1 / 0, ZeroDivisionError, "division by zero"),
    ],
)
def test_results_are_checked(f: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        kernel(f, (2,), name="float64").reduce([np.ones(2)] * 2, np.empty(2), 2)


def test_labels_name_the_operator() -> None:
    op = ReduceOp.custom(lambda a, b: None, name="mine")
    with pytest.raises(TypeError, match="the operator mine must be"):
        CustomKernel(op, "int8", [("numpy", (1,))]).combine(*[np.ones(1, "i1")] * 3)


def test_strided_and_big_endian_results_are_taken() -> None:
    out = np.empty(6)
    kernel(lambda a, b: (a + b).T.copy().T, (2, 3)).reduce([np.arange(6.0)] * 2, out, 2)
    assert out.tolist() == [0, 2, 4, 6, 8, 10]
    kernel(lambda a, b: (a + b).astype(">f8"), (6,)).reduce([np.arange(6.0)] * 2, out, 2)
    assert out.tolist() == [0, 2, 4, 6, 8, 10]
