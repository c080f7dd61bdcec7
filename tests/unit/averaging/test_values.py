"""Trees as vectors: copies, forms that agree, dtypes that are rounded once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aiodist.averaging.values import (
    TreeForm,
    added,
    all_finite,
    checked_weight,
    narrowed,
    widened,
)

TREE: dict[str, Any] = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "deep": [np.float64(0.5) * np.ones(2), (np.ones((), np.float16), np.zeros(0, np.float32))],
}


@pytest.mark.parametrize("coded", [False, True])
def test_a_tree_comes_back_as_it_was_in_new_arrays(coded: bool) -> None:
    form = TreeForm(TREE, coded=coded)
    found = form.tree(form.copy())
    assert found.keys() == TREE.keys()
    assert isinstance(found["deep"][1], tuple)
    for one, other in (
        (found["w"], TREE["w"]),
        *zip(found["deep"][1], TREE["deep"][1], strict=True),
    ):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert np.array_equal(one, other)
        assert not np.shares_memory(one, other)


def test_codecs_have_one_vector_and_float64_another() -> None:
    assert TreeForm(TREE, coded=True).names == ["float64", "float32"]
    assert TreeForm(TREE, coded=False).names == ["float64", "float16", "float32"]


def test_the_order_of_keys_is_no_difference() -> None:
    one = TreeForm({"a": np.ones(2), "b": np.ones(3)}, coded=False)
    other = TreeForm({"b": np.ones(3), "a": np.ones(2)}, coded=False)
    assert one.digest == other.digest
    # But each member gets its own order back.
    for form, keys in (one, ["a", "b"]), (other, ["b", "a"]):
        found = form.tree(form.copy())
        assert list(found) == keys
        assert (found["a"].size, found["b"].size) == (2, 3)


@pytest.mark.parametrize(
    "other",
    [np.ones(4, np.float32), np.ones((3, 1), np.float32), np.ones(3), [np.ones(3, np.float32)]],
)
def test_other_shapes_dtypes_and_structures_have_other_digests(other: Any) -> None:
    assert (
        TreeForm(other, coded=False).digest != TreeForm(np.ones(3, np.float32), coded=False).digest
    )


def test_a_text_shows_what_the_digest_is_of() -> None:
    assert TreeForm(TREE, coded=False).text == (
        "{'deep': [float64[2], (float16[], float32[0])], 'w': float32[2,3]}"
    )
    long = [np.ones(1, np.float32)] * 10_000
    one, other = (TreeForm([*long, last], coded=False).text for last in (np.ones(2), long[:1]))
    assert one != other
    assert max(len(one), len(other)) < 1000


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (np.ones(3, np.int32), "int32"),
        ({"a": [1.0]}, r"value\['a'\]\[0\]"),
        (np.ones(3, np.complex64), "complex64"),
        ({"a": "text"}, "not str"),
    ],
)
def test_what_is_no_float_array_is_refused_by_where_it_is(tree: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        TreeForm(tree, coded=False)


def test_a_tree_without_arrays_is_refused() -> None:
    with pytest.raises(ValueError, match="without arrays"):
        TreeForm({"a": []}, coded=False)


@given(hnp.arrays(np.float32, 50, elements=st.floats(width=32)))
def test_bfloat16_is_the_nearest_or_the_even_of_two(values: Any) -> None:
    found = narrowed(values, "bfloat16")
    wide = widened(found, "bfloat16")
    assert np.array_equal(np.isnan(wide), np.isnan(values))
    below = values.view(np.uint32) & np.uint32(0xFFFF0000)  # towards zero
    for value, got, low in zip(values, found, below, strict=True):
        if not np.isfinite(value):
            continue
        one, other = int(low) >> 16, (int(low) >> 16) + 1
        exact = [np.array([bits << 16], np.uint32).view(np.float32)[0] for bits in (one, other)]
        # Beyond the largest, the next one would be 2**128.
        most = math.copysign(2.0**128, value)
        ends = [float(end) if np.isfinite(end) else most for end in exact]
        near = [abs(float(value) - end) for end in ends]
        expected = one if near[0] < near[1] or (near[0] == near[1] and one % 2 == 0) else other
        assert got == expected


def test_sums_and_finiteness() -> None:
    x = [np.array([1.5, 2.0], np.float16), np.array([1.0, np.inf])]
    assert [one.tolist() for one in added(x, x, ["float16", "float64"])] == [[3, 4], [2, np.inf]]
    assert not all_finite(x, ["float16", "float64"])
    assert all_finite(x[:1], ["float16"])


@pytest.mark.parametrize("weight", [True, np.True_, "1", b"1", None, [1]])
def test_a_weight_is_a_number(weight: Any) -> None:
    with pytest.raises(TypeError, match="weight is a number"):
        checked_weight(weight)


def test_a_weight_fits_into_a_float() -> None:
    with pytest.raises(ValueError, match="too large for a float"):
        checked_weight(10**400)


@pytest.mark.parametrize("weight", [2, 2.0, np.float32(2), np.int64(2), np.array(2)])
def test_numbers_of_all_kinds_are_weights(weight: Any) -> None:
    assert checked_weight(weight) == 2.0
