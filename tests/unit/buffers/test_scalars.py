"""Reductions of Python numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from aiodist.buffers.scalars import check_scalar, reduce_scalars
from aiodist.types import ReduceOp

BIG = 2**62
HUGE = 10**5000  # Python does not print it


@pytest.mark.parametrize(
    ("values", "op", "expected"),
    [
        ([1, 2, 3], ReduceOp.SUM, 6),
        ([2, 3, 4], ReduceOp.PRODUCT, 24),
        ([5, -3, 4], ReduceOp.MIN, -3),
        ([5, -3, 4], ReduceOp.MAX, 5),
        ([1, 2], ReduceOp.AVG, 1.5),
        ([BIG, BIG, BIG], ReduceOp.AVG, float(BIG)),
        ([6, 3], ReduceOp.BAND, 2),
        ([6, 3], ReduceOp.BOR, 7),
        ([6, -1], ReduceOp.BXOR, -7),
        ([6, 3], ReduceOp.LAND, 1),
        ([0, 0], ReduceOp.LOR, 0),
        ([6, 0, 3, 1], ReduceOp.LXOR, 1),
        ([True, True], ReduceOp.LXOR, False),
        ([1, 2], ReduceOp.premul_sum(3), 9),
        ([BIG, BIG, -BIG, -1], ReduceOp.SUM, BIG - 1),
        ([1.5, 2.5], ReduceOp.SUM, 4.0),
        ([1e308, 1e308], ReduceOp.SUM, math.inf),
        ([1.0, 2.0], ReduceOp.AVG, 1.5),
        ([0.5, 2.0], ReduceOp.LAND, 1.0),
        ([1.0, 2.0], ReduceOp.premul_sum(0.5), 1.5),
        ([1j, 2 + 0j], ReduceOp.PRODUCT, 2j),
        ([True, False], ReduceOp.LAND, False),
        ([True, False], ReduceOp.BXOR, True),
        ([7], ReduceOp.custom(lambda a, b: a - b), 7),
        ([7, 2, 1], ReduceOp.custom(lambda a, b: a - b), 4),
        ([7.0, 2.0], ReduceOp.custom(np.subtract), 5.0),
    ],
)
def test_results_keep_the_type(values: list[Any], op: ReduceOp, expected: Any) -> None:
    got = reduce_scalars([check_scalar(value, op) for value in values], op)
    assert got == expected
    assert type(got) is type(expected)


def test_nan_propagates() -> None:
    got = reduce_scalars([1.0, math.nan], ReduceOp.MIN)
    assert isinstance(got, float)
    assert math.isnan(got)


@pytest.mark.parametrize(
    ("values", "op", "words"),
    [
        ([BIG, BIG], ReduceOp.SUM, "SUM over 2 ranks, 9223372036854775808, does not fit"),
        ([BIG, -BIG], ReduceOp.PRODUCT, "PRODUCT over 2 ranks"),
        ([BIG, BIG], ReduceOp.custom(lambda a, b: a + b, name="plus"), "custom:plus"),
        ([BIG] * 240, ReduceOp.PRODUCT, "over 240 ranks, an int of 14881 bits, does not fit"),
        ([1, 1], ReduceOp.custom(lambda a, b: HUGE), ", an int of 16610 bits, does not fit"),
    ],
)
def test_overflow_names_the_operator(values: list[int], op: ReduceOp, words: str) -> None:
    with pytest.raises(OverflowError, match=words):
        reduce_scalars(values, op)


@pytest.mark.parametrize(
    ("value", "op", "error", "words"),
    [
        (2**63, ReduceOp.SUM, OverflowError, "given to SUM does not fit in 64 bits"),
        (-(2**63) - 1, ReduceOp.MIN, OverflowError, "does not fit"),
        pytest.param(HUGE, ReduceOp.SUM, OverflowError, "16610 bits given to SUM does", id="huge"),
        (True, ReduceOp.SUM, TypeError, "SUM has no meaning for bool: LAND"),
        (1.5, ReduceOp.BAND, TypeError, "BAND has no meaning for float64"),
        (1j, ReduceOp.MAX, TypeError, "MAX has no meaning for complex128"),
        (1, ReduceOp.premul_sum(0.5), TypeError, "float factor"),
    ],
)
def test_what_has_no_meaning(value: Any, op: ReduceOp, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        check_scalar(value, op)


def test_numbers_of_subclasses_are_plain() -> None:
    checked = check_scalar(type("I", (int,), {})(5), ReduceOp.SUM)
    assert (checked, type(checked)) == (5, int)


def test_mixed_types_are_refused() -> None:
    with pytest.raises(TypeError, match="different types: float, int"):
        reduce_scalars([1, 2.0], ReduceOp.SUM)


def test_custom_operators_must_keep_the_type() -> None:
    with pytest.raises(TypeError, match=r"two numbers of type int and returned 0\.5"):
        reduce_scalars([1, 2], ReduceOp.custom(lambda a, b: a / b))
    with pytest.raises(TypeError, match="type float and returned an int of 16610 bits"):
        reduce_scalars([1.0, 2.0], ReduceOp.custom(lambda a, b: HUGE))
    with pytest.raises(TypeError, match="type float and returned a tuple:"):
        reduce_scalars([1.0, 2.0], ReduceOp.custom(lambda a, b: (HUGE,)))
