"""Which part of exposed memory is meant: what who asks checks, and what the owner carries out."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from aiodist.buffers.dtypes import CARRIERS
from aiodist.types import ReduceOp
from aiodist.windows.places import Exposed, Request, accumulate, index_of, memory_of

MATRIX = np.arange(12.0).reshape(3, 4)
EXPOSED = Exposed("float64", (3, 4))


@pytest.mark.parametrize(
    "where",
    [
        ...,
        1,
        -1,
        slice(1, None),
        slice(None, None, -2),
        (2, 3),
        (..., 0),
        (slice(0, 2), slice(3, 0, -1)),
        (np.int8(1), np.int64(-4)),
        slice(5, 9),
    ],
    ids=repr,
)
def test_an_index_means_the_same_at_the_owner(where: Any) -> None:
    plain, shape = EXPOSED.part(where)
    found = MATRIX[index_of(plain)]
    assert found.shape == shape
    np.testing.assert_array_equal(found, MATRIX[where])


@pytest.mark.parametrize(
    ("where", "error"),
    [
        (3, IndexError),
        ((0, 0, 0), IndexError),
        ((..., ...), IndexError),
        ("...", TypeError),
        (1.0, TypeError),
        (None, TypeError),
        ([0, 1], TypeError),
        (slice("a"), TypeError),
        (slice(0, 1, 0), ValueError),
    ],
    ids=repr,
)
def test_an_index_that_is_none(where: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        EXPOSED.part(where)


@pytest.mark.parametrize("where", [True, np.True_, "...", 1.0, None, [0, 1], slice(1.5)], ids=repr)
def test_what_indices_are(where: Any) -> None:
    with pytest.raises(TypeError, match=r"^a window is indexed by ints, slices of ints and"):
        EXPOSED.part(where)


@pytest.mark.parametrize("where", [10**30, -(10**30), 1 << 63])
def test_an_index_that_is_longer_than_any_axis(where: int) -> None:
    with pytest.raises(IndexError, match=f"^index {where} is out of bounds"):
        EXPOSED.part(where)


@pytest.mark.parametrize("plain", [[[0] * 9], [None], [1.5], [(1, 2, 3, 4)], 7, None], ids=repr)
def test_an_index_of_a_rank_that_is_not_what_it_should_be(plain: Any) -> None:
    """Lists would be as many rows as they are long: memory that the owner need not have."""
    with pytest.raises(TypeError):
        index_of(plain)


def test_numbers_take_the_dtype_of_the_memory_where_they_fit() -> None:
    small = Exposed("uint8", (4,))
    assert small.value(200, (4,)).dtype == np.uint8
    with pytest.raises(TypeError, match="int64 cannot be converted to bool"):
        Exposed("bool", (4,)).value(np.arange(4), (4,))


@pytest.mark.parametrize(
    ("name", "value"), [("uint8", 300), ("uint8", -1), ("int64", 2**70), ("float64", 10**400)]
)
def test_a_number_that_does_not_fit(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"the number is outside of the range of {name}"):
        Exposed(name, (4,)).value(value, (4,))


@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        ("datetime64[s]", 1, "int64"),
        ("datetime64[s]", 2.5, "float64"),
        ("timedelta64[s]", 2.5, "float64"),
        ("U1", 12, "int64"),
        ("S1", np.arange(4), "int64"),
    ],
)
def test_a_number_that_is_no_time_and_no_text(name: str, value: Any, dtype: str) -> None:
    words = f"value: {dtype} cannot be converted to {name} safely"
    with pytest.raises(TypeError, match=re.escape(words)):
        Exposed(name, (4,)).value(value, (4,))
    assert Exposed("timedelta64[s]", ()).value(7, ()) == np.timedelta64(7, "s")


def test_a_list_that_is_no_array() -> None:
    with pytest.raises(ValueError, match=r"^value: numpy cannot make an array of it"):
        EXPOSED.value([[1], [2, 3]], (3, 4))


@pytest.mark.parametrize("value", [2**40, 1e300, np.full(4, 1e300)], ids=repr)
def test_what_is_too_large_for_a_float_becomes_infinity(value: Any) -> None:
    assert np.isinf(Exposed("float16", (4,)).value(value, (4,))).all()


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", sorted(CARRIERS))
@pytest.mark.parametrize("name", ["float32", "uint8", "uint16", "complex128"])
def test_the_bits_of_a_dtype_that_numpy_lacks_are_no_numbers(dtype: str, name: str) -> None:
    if not hasattr(torch, dtype):
        pytest.skip("a newer torch has this dtype")
    value = torch.empty(4, dtype=getattr(torch, dtype))
    with pytest.raises(TypeError, match=f"{dtype} cannot be converted to {name}"):
        Exposed(name, (4,)).value(value, (4,))


def test_values_are_broadcast_as_numpy_does() -> None:
    assert EXPOSED.value([1, 2, 3, 4], (3, 4)).dtype == np.float64
    text = r"value has shape \(3,\), and the part of that rank's memory has shape \(3, 4\)"
    with pytest.raises(ValueError, match=text):
        EXPOSED.value(np.ones(3), (3, 4))


def test_what_an_out_has_to_be() -> None:
    EXPOSED.check_out(np.zeros(4), (4,))
    with pytest.raises(ValueError, match=r"float64\[4\]"):
        EXPOSED.check_out(np.zeros(5), (4,))
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        EXPOSED.check_out(frozen, (4,))


def test_which_operators_travel() -> None:
    assert EXPOSED.operator(ReduceOp.MAX) == "MAX"
    for op in (ReduceOp.AVG, ReduceOp.premul_sum(2.0), lambda a, b: a):
        with pytest.raises(TypeError, match="accumulate takes SUM"):
            EXPOSED.operator(op)
    with pytest.raises(TypeError, match="no meaning for float64"):
        EXPOSED.operator(ReduceOp.BXOR)


@pytest.mark.parametrize(
    ("op", "due"), [("SUM", [4, 6, 8]), ("MAX", [3, 4, 5]), ("MIN", [1, 2, 3])]
)
def test_what_accumulates(op: str, due: list[int]) -> None:
    into = np.array([1, 2, 3])
    np.testing.assert_array_equal(accumulate(into, into + 2, op, "int64"), due)
    # A number for all, as numpy broadcasts it; of a column, whatever its strides.
    column = MATRIX.T[1]
    np.testing.assert_array_equal(
        accumulate(column, np.array(1.0), "SUM", "float64"), MATRIX[:, 1] + 1
    )


def test_memory_of_half_precision_is_reduced_as_collectives_do() -> None:
    into = np.array([2048, 1], np.float16)
    result = accumulate(into, np.array([1, 1], np.float16), "SUM", "float16")
    np.testing.assert_array_equal(result, [2048, 2])


def test_what_is_exposed_is_the_memory_itself() -> None:
    exposed = memory_of(MATRIX)
    assert (exposed.name, exposed.shape) == EXPOSED
    assert np.shares_memory(exposed.base, MATRIX)
    with pytest.raises(TypeError, match="x: "):
        memory_of(3.0)


def test_a_request_that_came() -> None:
    assert Request.read(("get", 7, [0], None, "")) == Request("get", 7, [0], None, "")
    # What else is wrong shows when it is carried out, for that can be answered.
    assert Request.read([None, 1, None, None, None]).number == 1


@pytest.mark.parametrize(
    "message",
    [None, "get", {}, ("get", 7, [0], None), ("get", "7", [], None, ""), ("get", 1 << 63, 0, 0, 0)],
    ids=repr,
)
def test_a_request_that_cannot_be_answered(message: Any) -> None:
    with pytest.raises(ValueError, match="expected five values, of which the second is a number"):
        Request.read(message)


def test_what_is_said_of_a_huge_message_is_short() -> None:
    with pytest.raises(ValueError, match="expected five") as caught:
        Request.read([["x" * 100_000] * 1000] * 6)
    assert len(str(caught.value)) < 300
