"""Sets of ranks as they are told, and texts that are too long to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.wire.activity import bits_of, packed, ranks_in, shortened, unpacked
from aiodist.wire.limits import MAX_NAME


@given(st.sets(st.integers(0, 300)))
def test_a_set_of_ranks_arrives(ranks: set[int]) -> None:
    assert ranks_in(unpacked(packed(ranks))) == tuple(sorted(ranks))
    assert unpacked(packed(ranks)) == bits_of(ranks)


@pytest.mark.parametrize(
    ("ranks", "data"), [([], b""), ([0], b"\x01"), ([7, 1], b"\x82"), ([8], b"\x00\x01")]
)
def test_rank_r_is_bit_r_modulo_8_of_byte_r_divided_by_8(ranks: list[int], data: bytes) -> None:
    assert packed(ranks) == data


def test_a_rank_that_is_named_twice_is_one() -> None:
    assert bits_of([2, 2]) == 4


@pytest.mark.parametrize("over", [-1, 0, 1, 100])
def test_a_text_is_cut_where_it_has_to_be(over: int) -> None:
    text = "ä" * (MAX_NAME + over)
    if over <= 0:
        assert shortened(text) == text
    else:
        assert shortened(text) == "ä" * (MAX_NAME - 3) + "..."
        assert len(shortened(text)) == MAX_NAME
