"""Built-in reductions against references in plain Python, without torch."""

from __future__ import annotations

import operator
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist import compiled
from aiodist.buffers import kernels
from aiodist.buffers.dtypes import LONG_COMPLEX, LONG_DOUBLE
from aiodist.buffers.kernels import Kernel
from aiodist.types import ReduceOp

INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64", LONG_DOUBLE]
COMPLEX = ["complex64", "complex128", LONG_COMPLEX]
NUMBERS = [*INTS, *FLOATS, *COMPLEX]
HALF = ReduceOp.premul_sum(0.5)
TRIPLE = ReduceOp.premul_sum(3)

MEANINGFUL = {
    ReduceOp.SUM: NUMBERS,
    ReduceOp.PRODUCT: NUMBERS,
    ReduceOp.MIN: ["bool", *INTS, *FLOATS],
    ReduceOp.MAX: ["bool", *INTS, *FLOATS],
    ReduceOp.AVG: [*FLOATS, *COMPLEX],
    ReduceOp.BAND: ["bool", *INTS],
    ReduceOp.BOR: ["bool", *INTS],
    ReduceOp.BXOR: ["bool", *INTS],
    ReduceOp.LAND: ["bool", *NUMBERS],
    ReduceOp.LOR: ["bool", *NUMBERS],
    ReduceOp.LXOR: ["bool", *NUMBERS],
    HALF: [*FLOATS, *COMPLEX],
    TRIPLE: NUMBERS,
}
CASES = [(op, name) for op, names in MEANINGFUL.items() for name in names]
EVERY = ["bool", *NUMBERS, "datetime64[s]", "S3", "float8_e5m2", "complex32", "uint4"]


def random_array(name: str, n: int, seed: int) -> Any:
    """Random elements; of floats every fourth is special."""
    rng = np.random.default_rng(seed)
    dtype = Kernel.of(ReduceOp.LAND, name).dtype
    if name == "bool":
        return rng.random(n) < 0.5
    if name in INTS:
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, n, dtype, endpoint=True)
    parts = 2 * n if name in COMPLEX else n
    tiny = [1e-40, -1e-310, 6e-8]
    special = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, *tiny], parts)
    values = np.where(rng.random(parts) < 0.25, special, rng.standard_normal(parts))
    with np.errstate(all="ignore"):
        if name == "bfloat16":
            return (values.astype("<f4").view("<u4") >> 16).astype("<u2")
        part = f"<f{dtype.itemsize // 2}" if name in COMPLEX else dtype
        return values.astype(part).view(dtype)


def bits(array: Any, name: str) -> bytes:
    """The bytes, with one NaN for all NaNs: their signs depend on where SIMD loops begin."""
    if name == "bfloat16":
        array = np.where((array & 0x7FFF) > 0x7F80, 0x7FC0, array)
    elif array.dtype.kind in "fc":
        if array.dtype.kind == "c":
            array = array.view(f"<f{array.dtype.itemsize // 2}")
        if array.dtype == np.longdouble:  # has padding
            return repr(array.tolist()).encode()
        array = np.where(np.isnan(array), np.nan, array).astype(array.dtype)
    return bytes(array.tobytes())


def chained(kernel: Kernel, operands: list[Any], size: int) -> Any:
    accs = [kernel.load(x) for x in operands]
    acc = accs[0]
    for other in accs[1:]:
        into = np.empty_like(acc)
        kernel.combine(into, acc, other)
        acc = into
    out = np.empty_like(operands[0])
    kernel.store(acc, out, size)
    return out


@pytest.mark.parametrize(("op", "name"), CASES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("core", [compiled.core, None])
@pytest.mark.sample(130)
def test_fused_is_chained_bit_for_bit(
    op: ReduceOp, name: str, ranks: int, core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the compiled part, if it was built, and by Python."""
    monkeypatch.setattr(kernels, "BLOCK_BYTES", 256)
    monkeypatch.setattr(kernels, "core", core)
    kernel = Kernel(op, name)
    for n in (0, 1, 7, 64, 300, 2500):
        operands = [random_array(name, n, seed) for seed in range(ranks)]
        before = [x.copy() for x in operands]
        expected = bits(chained(kernel, operands, ranks), name)
        out = np.empty_like(operands[0])
        kernel.reduce(operands, out, ranks)
        assert bits(out, name) == expected
        assert all(x.tobytes() == y.tobytes() for x, y in zip(operands, before, strict=True))
        for alias in range(ranks):
            copies = [x.copy() for x in operands]
            kernel.reduce(copies, copies[alias], ranks)
            assert bits(copies[alias], name) == expected


@pytest.mark.parametrize(("op", "name"), CASES, ids=str)
def test_combine_in_place(op: ReduceOp, name: str) -> None:
    kernel = Kernel.of(op, name)
    a, b = (kernel.load(random_array(name, 100, seed)) for seed in (1, 2))
    into = np.empty_like(a)
    kernel.combine(into, a, b)
    left, right = a.copy(), b.copy()
    kernel.combine(left, left, b)
    kernel.combine(right, a, right)
    wire = "float32" if kernel.wire_dtype == np.float32 else name
    assert bits(left, wire) == bits(into, wire) == bits(right, wire)
    assert into.dtype == kernel.wire_dtype


@pytest.mark.parametrize(("op", "name"), CASES, ids=str)
def test_load_and_store_say_what_they_change(op: ReduceOp, name: str) -> None:
    kernel = Kernel.of(op, name)
    x = random_array(name, 50, 3)
    into = np.empty(50, kernel.wire_dtype)
    assert kernel.load(x, into) is into
    if not kernel.loads:
        assert into.tobytes() == x.tobytes()
    if not kernel.stores:
        out = np.empty_like(x)
        kernel.store(into, out, 4)
        assert out.tobytes() == into.tobytes()


# --- against references ---------------------------------------------------------------------------

PYTHON_OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: operator.add,
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
    ReduceOp.LAND: lambda a, b: int(bool(a) and bool(b)),
    ReduceOp.LOR: lambda a, b: int(bool(a) or bool(b)),
    ReduceOp.LXOR: lambda a, b: int(bool(a) != bool(b)),
}


def reduced(op: ReduceOp, name: str, rows: list[Any]) -> Any:
    kernel = Kernel.of(op, name)
    out = np.empty(len(rows[0]), kernel.dtype)
    kernel.reduce([np.asarray(row, kernel.dtype) for row in rows], out, len(rows))
    return out


@pytest.mark.parametrize("op", PYTHON_OPS, ids=str)
@pytest.mark.parametrize("name", INTS)
def test_integers_wrap_around(op: ReduceOp, name: str) -> None:
    rows = [random_array(name, 40, seed) for seed in range(3)]
    size = 8 * rows[0].itemsize
    expected = []
    for column in zip(*(row.tolist() for row in rows), strict=True):
        value = reduce(PYTHON_OPS[op], column) % 2**size
        expected.append(value - 2**size if name[0] == "i" and value >> (size - 1) else value)
    assert reduced(op, name, rows).tolist() == expected


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVG, HALF], ids=str)
@pytest.mark.parametrize("name", ["float16", "float32", "float64", "complex64", "complex128"])
def test_floats_match_scalar_arithmetic(op: ReduceOp, name: str) -> None:
    rows = [random_array(name, 60, seed) for seed in range(4)]
    wide = np.dtype("f4") if name == "float16" else np.dtype(name)
    real = np.zeros(1, wide).real.dtype.type
    expected = []
    with np.errstate(all="ignore"):
        for column in zip(*rows, strict=True):
            values = [wide.type(x) for x in column]
            if op is HALF:
                values = [
                    wide.type(v * real(0.5)) if wide.kind == "f" else halves(v) for v in values
                ]
            total = reduce(np.multiply if op is ReduceOp.PRODUCT else np.add, values)
            if op is ReduceOp.AVG:
                total = total / real(4) if wide.kind == "f" else quarter(total)
            expected.append(np.array([total]).astype(name)[0])
    got = reduced(op, name, rows)
    if name == "complex128" and op is ReduceOp.PRODUCT:
        np.testing.assert_allclose(got, expected, rtol=1e-12)  # fused multiply-add or not
    else:
        np.testing.assert_array_equal(got, np.array(expected, name))


def halves(value: Any) -> Any:
    return type(value)(complex(value.real * 0.5, value.imag * 0.5))


def quarter(value: Any) -> Any:
    return type(value)(complex(value.real / 4, value.imag / 4))


def test_complex_infinity_stays_what_it_is() -> None:
    z = np.array([complex(np.inf, 1.0)])
    assert reduced(ReduceOp.AVG, "complex128", [z, z])[0] == complex(np.inf, 1.0)
    assert reduced(TRIPLE, "complex128", [z])[0] == complex(np.inf, 3.0)


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=str)
def test_nan_wins_in_min_and_max(op: ReduceOp, name: str) -> None:
    nan = float("nan")
    got = reduced(op, name, [[nan, 1, 2, -np.inf], [1, nan, 3, np.inf], [5, 1, 4, 0]])
    assert np.isnan(got[:2]).all()
    assert got[2:].tolist() == ([2, -np.inf] if op is ReduceOp.MIN else [4, np.inf])


@pytest.mark.parametrize("name", ["bool", *NUMBERS])
def test_logical_operators_give_zero_and_one(name: str) -> None:
    one = 0x3F80 if name == "bfloat16" else 1
    some, none, other = (0x4000, 0x8000, 0x7FC0) if name == "bfloat16" else (2, 0, 1)
    rows = [[some, none, none], [other, other, none]]
    assert reduced(ReduceOp.LAND, name, rows).tolist() == [one, 0, 0]
    assert reduced(ReduceOp.LOR, name, rows).tolist() == [one, one, 0]
    assert reduced(ReduceOp.LXOR, name, rows).tolist() == [0, one, 0]
    assert reduced(ReduceOp.LXOR, name, [*rows, rows[0]]).tolist() == [one, one, 0]
    assert reduced(ReduceOp.LOR, name, rows[:1]).tolist() == [one, 0, 0]


def test_premultiplied_sum_rounds_once() -> None:
    got = reduced(ReduceOp.premul_sum(1 / 3), "float16", [[3.0, 1.0], [6.0, 1.0]])
    third = np.float32(1 / 3)
    assert got.tolist() == [3.0, float(np.float16(third + third))]
    assert reduced(TRIPLE, "uint8", [[100], [1]]).tolist() == [303 % 256]


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *[
            (op, name)
            for op in (ReduceOp.SUM, ReduceOp.PRODUCT)
            for name in ("complex64", "complex128")
        ],
        *[
            (op, name)
            for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
            for name in ("float32", "float64")
        ],
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [1, 2, 5, 17])
def test_which_nan_it_is_does_not_depend_on_where_the_result_goes(
    op: ReduceOp, name: str, length: int
) -> None:
    kernel = Kernel.of(op, name)
    part = np.dtype(name).type(0).real.dtype

    def nans(payload: int) -> Any:
        pattern = np.full(length * kernel.dtype.itemsize // part.itemsize, np.nan, part)
        pattern = pattern.view(f"u{part.itemsize}")
        pattern |= np.array(payload, pattern.dtype)
        pattern[payload % 2 :: 2] |= np.array(1, pattern.dtype) << (8 * part.itemsize - 1)
        return pattern.view(name)

    def outcome(run: Any, into: int) -> bytes:
        operands = [nans(1), nans(2), np.empty(length, name)]
        run(*operands[:2], out=operands[into])
        return operands[into].tobytes()

    with np.errstate(all="ignore"):
        found = {
            outcome(run, into)
            for run in (
                kernel.plain(length),
                lambda a, b, out: kernel.combine(out, a, b),
                lambda a, b, out: kernel.reduce([a, b], out, 2),
                lambda a, b, out: kernel.fold_loudly([a, b], out),
            )
            for into in range(3)
        }
        found.add(outcome(kernel.plain(length, disjoint=True), 2))
        assert len(found) == 1
        three = [nans(1), nans(2), nans(3)]
        results = np.empty((4, length), name)
        kernel.fold_loudly(three, results[0])
        kernel.reduce(three, results[1], 3)
        kernel.reduce(three, three[2], 3)
        results[2] = three[2]
        kernel.combine(results[3], np.frombuffer(found.pop(), name), nans(3))
        assert len({row.tobytes() for row in results}) == 1


@pytest.mark.parametrize("name", ["float32", "float64"])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=str)
@pytest.mark.skipif(compiled.core is None, reason=f"no compiled part: {compiled.reason}")
def test_the_compiled_part_chooses_as_numpy_does(op: ReduceOp, name: str) -> None:
    """Of two zeros, and of two NaNs."""
    ufunc = np.minimum if op is ReduceOp.MIN else np.maximum
    kernel = Kernel.of(op, name)
    assert kernel.compiled is not None
    rng = np.random.default_rng(7)
    special = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -np.nan], name)
    word = f"u{kernel.dtype.itemsize}"
    for length in range(1, 70):
        a, b = (rng.choice(special, length) for _ in range(2))
        b.view(word)[np.isnan(b)] |= np.array(1, word)  # so that NaNs differ
        out = np.empty(length, name)
        kernel.reduce([a, b], out, 2)
        assert out.tobytes() == ufunc(a, b).tobytes()


def test_average_of_float16_does_not_overflow() -> None:
    assert reduced(ReduceOp.AVG, "float16", [[60000.0]] * 8).tolist() == [60000.0]
    assert reduced(ReduceOp.SUM, "float16", [[60000.0]] * 8).tolist() == [np.inf]


def nearest_bfloat16(value: float) -> int:
    """The bits of the bfloat16 nearest to a finite value, ties to even, by exact arithmetic."""
    exact = abs(Fraction(value))
    # The order of the bit patterns is that of the numbers; 0x7F80 stands for 2**128.
    low, high = 0, 0x7F80
    while high - low > 1:
        middle = (low + high) // 2
        if bfloat16_value(middle) <= exact:
            low = middle
        else:
            high = middle
    below, above = exact - bfloat16_value(low), bfloat16_value(high) - exact
    chosen = low if (below, low % 2) < (above, high % 2) else high
    return chosen | (0x8000 if np.signbit(value) else 0)


def bfloat16_value(pattern: int) -> Fraction:
    exponent, mantissa = pattern >> 7, pattern & 0x7F
    if exponent == 0:
        return Fraction(mantissa) * Fraction(2) ** -133
    return Fraction(mantissa + 128) * Fraction(2) ** (exponent - 134)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_bfloat16_rounds_to_nearest_even(values: list[float]) -> None:
    kernel = Kernel.of(ReduceOp.SUM, "bfloat16")
    out = np.empty(len(values), "<u2")
    kernel.store(np.array(values, "<f4"), out, 1)
    assert out.tolist() == [nearest_bfloat16(value) for value in values]


@given(st.integers(0, 0xFFFF))
def test_bfloat16_survives_loading_and_storing(pattern: int) -> None:
    kernel = Kernel.of(ReduceOp.SUM, "bfloat16")
    acc = kernel.load(np.array([pattern], "<u2"))
    out = np.empty(1, "<u2")
    kernel.store(acc, out, 1)
    if np.isnan(acc[0]):
        assert (int(out[0]) & 0x7FFF) > 0x7F80
    else:
        assert out[0] == pattern


@pytest.mark.parametrize("pattern", [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000])
def test_bfloat16_nan_is_no_infinity(pattern: int) -> None:
    out = np.empty(2, "<u2")
    acc = np.array([pattern, 0x3F800000], "<u4").view("<f4")
    Kernel.of(ReduceOp.SUM, "bfloat16").store(acc, out, 1)
    assert (int(out[0]) & 0x7FFF) > 0x7F80
    assert out[0] >> 15 == pattern >> 31
    assert out[1] == 0x3F80


# --- what has no meaning --------------------------------------------------------------------------


@pytest.mark.parametrize("op", MEANINGFUL, ids=str)
def test_operators_refuse_the_other_dtypes(op: ReduceOp) -> None:
    for name in EVERY:
        if name in MEANINGFUL[op]:
            assert Kernel.of(op, name) is Kernel.of(op, name)
        else:
            with pytest.raises(TypeError, match=r"has no meaning for|has a float factor"):
                Kernel.of(op, name)


@pytest.mark.parametrize(
    ("op", "name", "words"),
    [
        (ReduceOp.AVG, "int32", "AVG has no meaning for int32: the average of integers"),
        (ReduceOp.SUM, "float8_e4m3fn", "float8 travels but does not add up"),
        (ReduceOp.SUM, "bool", "use LOR, LAND"),
        (ReduceOp.AVG, "bool", "AVG has no meaning for bool: .*: convert to a float dtype$"),
        (ReduceOp.BAND, "float32", "BAND has no meaning for float32: convert"),
        (ReduceOp.SUM, "complex32", "convert to a dtype that has the operator"),
        (HALF, "int8", r"PREMUL_SUM\(0.5\) has a float factor and int8"),
        (ReduceOp.premul_sum(-1), "uint8", "does not fit in uint8"),
        (ReduceOp.premul_sum(128), "int8", "does not fit in int8"),
    ],
)
def test_refusals_say_why(op: ReduceOp, name: str, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Kernel.of(op, name)


def test_factors_that_compare_equal_are_told_apart() -> None:
    one, minus = ReduceOp.premul_sum(0.0), ReduceOp.premul_sum(-0.0)
    assert np.signbit(reduced(one, "float32", [[-1.0]])[0])
    assert not np.signbit(reduced(minus, "float32", [[-1.0]])[0])
    assert Kernel.of(ReduceOp.premul_sum(2), "int8").op.factor == 2
    with pytest.raises(TypeError):
        Kernel.of(ReduceOp.premul_sum(2.0), "int8")


def test_factors_may_overflow_the_dtype() -> None:
    assert reduced(ReduceOp.premul_sum(1e300), "float32", [[1.0, -1.0]]).tolist() == [
        np.inf,
        -np.inf,
    ]
    with pytest.raises(TypeError, match="does not fit in float64"):
        Kernel.of(ReduceOp.premul_sum(10**400), "float64")


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("name", ["int32", "float64", "complex128"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT])
def test_one_function_for_two_operands(
    op: ReduceOp, name: str, length: int, disjoint: bool
) -> None:
    kernel = Kernel(op, name)
    a, b = np.arange(1, length + 1).astype(name), np.full(length, 3, name)
    expected = (a + b if op is ReduceOp.SUM else a * b).tolist()
    plain = kernel.plain(length, disjoint=disjoint)
    assert plain is not None
    out = np.empty(length, name) if disjoint else a
    plain(a, b, out=out)
    assert out.tolist() == expected


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (ReduceOp.SUM, "float16"),
        (ReduceOp.AVG, "float64"),
        (ReduceOp.LOR, "int32"),
        (HALF, "float64"),
    ],
)
def test_what_takes_more_than_one_function(op: ReduceOp, name: str) -> None:
    kernel = Kernel(op, name)
    assert kernel.plain(3) is None
    assert kernel.plain(3, disjoint=True) is None


@pytest.mark.parametrize("version", ["1.26.4", np.__version__])
def test_quietly(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before numpy 2 contexts do not carry what `numpy.seterr` sets."""
    monkeypatch.setattr(np, "__version__", version)
    run = kernels.quietly()
    large, small = np.full(1, 1e38, "f4"), np.zeros(1, "f4")
    with np.errstate(all="raise"):
        run(np.multiply, large, large, small)
        assert small.tolist() == [np.inf]
        with pytest.raises(FloatingPointError):
            np.multiply(large, large)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("length", [1, 5])
def test_a_reduction_that_is_bound_gives_what_reduce_gives(
    op: ReduceOp, ranks: int, length: int
) -> None:
    kernel = Kernel.of(op, "float64")
    operands = [np.linspace(rank, rank + 1, length) for rank in range(ranks)]
    due, out = np.empty(length), np.empty(length)
    kernel.reduce(operands, due, ranks)
    function, args, more = kernel.reduction_of(operands)
    result = function(*args, out=out, **more)
    np.testing.assert_array_equal(out if result is None else result, due)
