"""Names of dtypes, and what holds their elements."""

from __future__ import annotations

import numpy as np
import pytest

from aiodist.buffers.dtypes import CARRIERS, carrier, name_of


@pytest.mark.parametrize(
    "dtype",
    [
        *("<i8", ">i8", "=i8", "?", "<f2", ">c16", "M8[ns]", "S3", "<U2"),
        *("M8[2147483647s]", ">m8[1000000000ms]", "S2147483647", "U536870911"),  # the longest
    ],
)
def test_a_name_leads_to_a_carrier_of_the_same_elements(dtype: str) -> None:
    name = name_of(np.dtype(dtype))
    assert name is not None
    held = carrier(name)
    assert held == np.dtype(dtype).newbyteorder("<")
    assert name_of(held) == name


@pytest.mark.parametrize("dtype", ["O", "V4", [("a", "i4")], "S0"])
def test_what_does_not_travel_has_no_name(dtype: object) -> None:
    assert name_of(np.dtype(dtype)) is None


@pytest.mark.parametrize(
    "name",
    [
        *("S", "S0", "S007", "U1000000000000", "datetime64[parsec]", "i8", ""),
        *("datetime64[1s]", "datetime64[4294967297s]", "U4294967297"),
    ],
)
def test_each_dtype_has_one_name(name: str) -> None:
    with pytest.raises(LookupError, match="no dtype"):
        carrier(name)


def test_what_numpy_does_not_know_is_held_by_unsigned_integers() -> None:
    assert {carrier(name).kind for name in CARRIERS} == {"u"}
    assert carrier("bfloat16").itemsize == 2


def test_native_carriers_have_formats_that_everybody_reads() -> None:
    assert memoryview(np.empty(1, carrier("int32"))).format == "i"
