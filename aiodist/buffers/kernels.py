"""Reduction of flat arrays by the built-in operators.

An element is *loaded* from the carrier into an accumulator, accumulators are *combined*, and the
last one is *stored* in a carrier. float16 and bfloat16 accumulate in float32 and are rounded once,
when stored (to nearest, ties to even). All others accumulate in their own dtype. Partial results
between ranks are accumulators.

Integers wrap around, NaN propagates in MIN and MAX, and LAND, LOR and LXOR give 0 or 1 in the
dtype. Of two NaNs a sum keeps one, with its sign and payload. It is the same one on all ranks,
because numpy's choice does not depend on the output, except for arrays of one element. For these
the output is never an operand.

**Why accumulators differ from carriers.** The sum of 8 ranks in float16 would be rounded seven
times, and the errors add up. In float32 the sum of some float16 numbers is nearly exact, and
rounded once. Partial results take twice the bytes on the wire for this, and results take none.

**Why in blocks.** Loading, combining and storing a whole array of 64 MiB would bring it from memory
into the processor three times. A block that fits into the cache of a core comes once, and all three
steps are done while it is there.

The compiled part (`aiodist.compiled`), if it is there, does all three in one pass: `reduce` of
float16 and bfloat16, and averages. Sums and products of floats go by it, too, because its tapes
reduce them: all ways of a rank have to keep the same one of two NaNs.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers.dtypes import BOOL, CARRIERS, COMPLEX, FLOATS, INTEGERS, SIGNED, carrier
from aiodist.compiled import core
from aiodist.types import ReduceOp

Flat = NDArray[Any]

BLOCK_BYTES: Final = 256 * 1024
"""Bytes of accumulators that are processed at once, so that they stay in the cache of a core."""

_ALL: Final = BOOL | INTEGERS | FLOATS | COMPLEX
_NUMBERS: Final = INTEGERS | FLOATS | COMPLEX
_OPERATORS: Final[dict[str, tuple[np.ufunc, frozenset[str]]]] = {
    "SUM": (np.add, _NUMBERS),
    "AVG": (np.add, FLOATS | COMPLEX),
    "PREMUL_SUM": (np.add, _NUMBERS),
    "PRODUCT": (np.multiply, _NUMBERS),
    "MIN": (np.minimum, BOOL | INTEGERS | FLOATS),
    "MAX": (np.maximum, BOOL | INTEGERS | FLOATS),
    "BAND": (np.bitwise_and, BOOL | INTEGERS),
    "BOR": (np.bitwise_or, BOOL | INTEGERS),
    "BXOR": (np.bitwise_xor, BOOL | INTEGERS),
    "LAND": (np.logical_and, _ALL),
    "LOR": (np.logical_or, _ALL),
    "LXOR": (np.logical_xor, _ALL),
}
_HINTS: Final = {
    "AVG bool": "an average is no bool: convert to a float dtype",
    "bool": "sums and products of bools are numbers: use LOR, LAND, or convert to int",
    "AVG": "the average of integers is no integer: convert to a float dtype, or use SUM",
    "float8": "float8 travels but does not add up: convert to bfloat16 or float32",
    "": "convert to a dtype that has the operator",
}


class Kernel:
    """One operator on one dtype. Make it with `Kernel.of`.

    `dtype` is the numpy dtype of carriers, and `wire_dtype` that of accumulators. `loads` and
    `stores` say whether loading and storing change elements. If both are False, carriers are
    accumulators. `sliceable`: arrays may be cut into pieces that are reduced apart (here: always).
    """

    __slots__ = (
        "_averages",
        "_block",
        "_factor",
        "_logical",
        "_lone",
        "_narrow",
        "_new",
        "_scale",
        "_ufunc",
        "compiled",
        "dtype",
        "loads",
        "name",
        "op",
        "stores",
        "wire_dtype",
    )
    sliceable = True

    def __init__(self, op: ReduceOp, name: str) -> None:
        self._ufunc: Callable[..., Any]
        self._ufunc, dtypes = _OPERATORS[op.name]
        if name not in dtypes:
            raise TypeError(f"{op} has no meaning for {name}: {_hint(op, name)}")
        if isinstance(op.factor, float) and name in INTEGERS:
            raise TypeError(
                f"{op} has a float factor and {name} elements: give an int, or convert to a float"
            )
        # For arrays of one element: the function for a new array, and the one that writes to `out`.
        # numpy's inner loop for one element depends on whether `out` is the first operand, and so
        # does the choice between two NaNs. A result in new memory is always computed in the same
        # way.
        self._new: Callable[..., Any] | None = self._ufunc if name in FLOATS | COMPLEX else None
        self._lone: Callable[..., Any] = self._ufunc if self._new is None else _elsewhere(self._new)
        if op.name == "PRODUCT" and name in COMPLEX:
            # numpy rounds otherwise (with or without fused multiply-add) if `out` is an operand.
            # Ranks reduce into different operands, and have to get the same bits.
            self._ufunc = self._lone
        self.op = op
        self.name = name
        self.dtype: np.dtype[Any] = carrier(name)
        # A dtype that is too narrow to add up in.
        self._narrow = name if name in ("float16", "bfloat16") else None
        self.wire_dtype: np.dtype[Any] = np.dtype("<f4") if self._narrow else self.dtype
        # The parts of complex numbers are scaled separately, because inf * (2+0j) contains a NaN.
        self._scale: np.dtype[Any] = (
            np.dtype(f"<f{self.dtype.itemsize // 2}") if name in COMPLEX else self.wire_dtype
        )
        # PREMUL_SUM multiplies what is loaded, and AVG divides what is stored. An average of
        # partial averages would be wrong if they come from unequal numbers of ranks.
        self._factor = None if op.factor is None else self._as_factor(op)
        # Whether the stored result is divided by the number of ranks.
        self._averages = op.name == "AVG"
        # A number that is not 0 counts as 1, in accumulators, so that 2 and 1 are equally true.
        self._logical = op.name in ("LAND", "LOR", "LXOR")
        self.loads = self._narrow is not None or self._factor is not None or self._logical
        self.stores = self._narrow is not None or self._averages
        self._block = BLOCK_BYTES // self.wire_dtype.itemsize  # elements that are processed at once
        # The number of the kernel of the compiled part; None: it has none.
        self.compiled: int | None = core.find(op.name, name) if core else None
        if self.compiled is not None and not (self.loads or self.stores) and name in FLOATS:
            # Tapes use this kernel, too. Of two NaNs all ways have to keep the same one.
            self._ufunc = self._lone = self._new = partial(_by_compiled, self.compiled)

    def plain(self, length: int, *, disjoint: bool = False) -> Callable[..., Any] | None:
        """Return a function that reduces two operands: ``plain(a, b, out=c)``.

        The operands have `length` elements, and numpy's present warnings apply. Returns None if
        more than one function is needed. `disjoint`: `c` is not one of the operands.
        """
        if self.loads or self.stores:
            return None
        if disjoint and self._new is not None:
            return self._new
        return self._lone if length == 1 else self._ufunc

    @staticmethod
    def of(op: ReduceOp, name: str) -> Kernel:
        """Return the kernel of a built-in operator for dtype `name`.

        Raises TypeError for combinations without a meaning: AVG of integers, bitwise operators on
        floats, MIN of complex numbers, anything on float8 or times.
        """
        return _kernel(op.name, op.factor, repr(op.factor), name)

    def load(self, x: Flat, into: Flat | None = None) -> Flat:
        """Load elements of `x` as accumulators, into `into` (which is returned) or a new array."""
        if into is None:
            if not self.loads:
                return x.copy()
            into = np.empty(len(x), self.wire_dtype)
        elif not self.loads:
            into[:] = x
            return into
        with np.errstate(all="ignore"):
            self._load(x, into)
        return into

    def combine(self, into: Flat, a: Flat, b: Flat) -> None:
        """Compute ``into = a op b`` of accumulators, with `a` from lower ranks. `into` may be `a`
        or `b`."""
        with np.errstate(all="ignore"):
            self.combine_loudly(into, a, b)

    def combine_loudly(self, into: Flat, a: Flat, b: Flat) -> None:
        """Do what `combine` does, with numpy's present warnings. Call this by `quietly`."""
        (self._lone if len(into) == 1 else self._ufunc)(a, b, out=into)

    def store(self, acc: Flat, out: Flat, size: int) -> None:
        """Store the result of `size` ranks from accumulators into a carrier. `acc` is not changed.

        If the dtypes are equal, `out` may be `acc`.
        """
        with np.errstate(all="ignore"):
            for start in range(0, len(acc), self._block):
                stop = start + self._block
                self._store(acc[start:stop], out[start:stop], size)

    def reduce(self, operands: Sequence[Flat], out: Flat, size: int) -> None:
        """Compute ``out = store(load(operands[0]) op load(operands[1]) op …)`` of carriers.

        The bits equal those of `load`, `combine` and `store` one after the other. `out` may be one
        of the operands.
        """
        with np.errstate(all="ignore"):
            self.reduce_loudly(operands, out, size)

    def fold_loudly(self, operands: Sequence[Flat], out: Flat) -> None:
        """Reduce a few elements that neither loading nor storing changes, with numpy's present
        warnings.

        `out` may be one of the first two operands only.
        """
        if len(out) == 1 and (new := self._new) is not None:
            total = new(operands[0], operands[1])
            for x in operands[2:]:
                total = new(total, x)
            out[:] = total
            return
        ufunc = self._ufunc
        ufunc(operands[0], operands[1], out=out)
        for x in operands[2:]:
            ufunc(out, x, out=out)

    def reduction_of(
        self, operands: Sequence[Flat]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return ``f, args, more``, so that ``f(*args, out=out, **more)`` reduces `operands`.

        There is one operand of each rank. It computes what `reduce` does, with numpy's present
        warnings. `out` must not share memory with an operand.
        """
        plain = self.plain(len(operands[0]), disjoint=True)
        if plain is None:
            return self.reduce_loudly, (operands,), {"size": len(operands)}
        if len(operands) == 2:
            return plain, (*operands,), {}
        return self.fold_loudly, (operands,), {}

    def reduce_loudly(self, operands: Sequence[Flat], out: Flat, size: int) -> None:
        """Do what `reduce` does, with numpy's present warnings. Call this by `quietly`."""
        if len(operands) == 2 and not self.loads and not self.stores:
            (self._lone if len(out) == 1 else self._ufunc)(operands[0], operands[1], out=out)
            return
        if self.compiled is not None:
            assert core is not None
            core.reduce(self.compiled, operands, out, size)
            return
        n = min(len(out), self._block)
        acc = np.empty(n, self.wire_dtype)
        tmp = np.empty(n, self.wire_dtype) if self.loads else acc
        for start in range(0, len(out), self._block):
            blocks = [x[start : start + self._block] for x in operands]
            self._reduce(blocks, out[start : start + self._block], acc, tmp, size)

    def _reduce(self, blocks: list[Flat], out: Flat, acc: Flat, tmp: Flat, size: int) -> None:
        n = len(out)
        ufunc = self._lone if n == 1 else self._ufunc
        acc, tmp = acc[:n], tmp[:n]
        last = len(blocks) - 1
        first, rest = blocks[0], blocks[1:]
        if self.loads or not rest:
            self._load(first, acc)
            first = acc
        for i, block in enumerate(rest, 1):
            if self.loads:
                self._load(block, tmp)
                block = tmp
            into = out if i == last and not self.stores else acc
            ufunc(first, block, out=into)
            first = acc
        if self.stores or not rest:
            self._store(acc, out, size)

    def _as_factor(self, op: ReduceOp) -> Any:
        try:
            if self.name in INTEGERS:
                # Not by numpy, because some versions wrap.
                cast(int, op.factor).to_bytes(self.dtype.itemsize, signed=self.name in SIGNED)
            with np.errstate(all="ignore"):
                return self._scale.type(op.factor)
        except OverflowError:
            raise TypeError(f"the factor of {op} does not fit in {self.name}") from None

    def _load(self, x: Flat, into: Flat) -> None:
        if self._narrow == "bfloat16":  # bfloat16 is the upper half of a float32
            bits = into.view("<u4")
            bits[:] = x
            bits <<= 16
        else:
            into[:] = x
        if self._factor is not None:
            into.view(self._scale)[:] *= self._factor
        elif self._logical:
            np.not_equal(into, 0, out=into, casting="unsafe")

    def _store(self, acc: Flat, out: Flat, size: int) -> None:
        if self._averages:
            mean = acc.view(self._scale) / self._scale.type(size)
            acc = mean.view(self.wire_dtype)
        if self._narrow == "bfloat16":
            round_to_bfloat16(acc, out)
        else:
            np.copyto(out, acc, casting="same_kind")


def _by_compiled(kernel: int, a: Flat, b: Flat, *, out: Flat | None = None) -> Flat:
    """Reduce two operands by the compiled part, to `out` or a new array."""
    if out is None:
        out = np.empty_like(a)
    assert core is not None
    core.reduce(kernel, (a, b), out, 2)
    return out


def quietly() -> Callable[..., Any]:
    """Return ``run(f, *args)``, which calls f without numpy's warnings, faster than
    `numpy.errstate`.

    For one thread, and not within itself. From numpy 2 on, the settings of warnings are in a
    context variable. So one context is made in which nothing is warned of, and functions run in it.
    Entering and leaving `errstate` each time would take one or two microseconds, and a whole
    all-reduce of 8 bytes takes ten.
    """
    if _is_old(np.__version__):
        return _with_errstate
    context = contextvars.copy_context()
    context.run(np.seterr, all="ignore")
    return context.run


@lru_cache
def _is_old(version: str) -> bool:
    """Tell whether numpy's settings of warnings are not in a context variable yet."""
    return np.lib.NumpyVersion(version) < "2.0.0"


def _with_errstate(f: Callable[..., Any], *args: Any) -> Any:
    with np.errstate(all="ignore"):
        return f(*args)


def _elsewhere(function: Callable[..., Any]) -> Callable[..., None]:
    """Make a variant of `function` for which `out` is never one of the operands."""

    def run(a: Flat, b: Flat, *, out: Flat) -> None:
        out[:] = function(a, b)

    return run


def round_to_bfloat16(acc: Flat, out: Flat) -> None:
    """Round float32 to its upper 16 bits, to nearest, ties to even. NaN stays NaN."""
    bits = acc.view("<u4")
    # The bits::
    #
    #     float32    s eeeeeeee mmmmmmm mmmmmmmmmmmmmmmm
    #     bfloat16   s eeeeeeee mmmmmmm|<- these 16 go ->
    #
    # The addend makes the lower half carry into the upper one if it is over a half (0x8000): that
    # rounds up. For exactly a half, 0x7FFF is one too little to carry, and the last kept bit adds
    # one if it is set, so the result is even. A carry out of the fraction goes into the exponent,
    # which is right: the next larger number, or infinity beyond the largest.
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    nan = np.isnan(acc)
    if nan.any():  # rounding could carry it over into infinity
        rounded[nan] = (bits[nan] >> 16) | 0x40
    out[:] = rounded


@lru_cache(maxsize=1024)
def _kernel(op_name: str, factor: float | int | None, _exact: str, name: str) -> Kernel:
    # The text of the factor distinguishes 1 from 1.0 and 0.0 from -0.0, which are equal and would
    # be one key. A float factor is refused for integers, and -0.0 gives other signs.
    return Kernel(ReduceOp(op_name, factor=factor), name)


def _hint(op: ReduceOp, name: str) -> str:
    if name.startswith("float8"):
        return _HINTS["float8"]
    if name in CARRIERS:
        return _HINTS[""]
    return _HINTS.get(f"{op} {name}") or _HINTS.get(name) or _HINTS.get(op.name) or _HINTS[""]
