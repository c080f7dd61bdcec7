"""Reductions by the compiled part beside those by Python: ``python -m benchmarks.kernels``

Microseconds to reduce arrays of 2^18 elements, shortest of many, and how many times as fast.
"""

from __future__ import annotations

import time

import numpy as np

from aiodist import compiled
from aiodist.buffers.kernels import Kernel
from aiodist.types import ReduceOp

LENGTH = 1 << 18
TIMES = 50
CASES: tuple[tuple[ReduceOp, str], ...] = (
    (ReduceOp.SUM, "float16"),
    (ReduceOp.SUM, "bfloat16"),
    (ReduceOp.AVG, "bfloat16"),
    (ReduceOp.AVG, "float32"),
)


def shortest(kernel: Kernel, ranks: int) -> float:
    """Microseconds of the shortest of `TIMES` reductions."""
    operands = [np.empty(LENGTH, kernel.dtype) for _ in range(ranks)]
    for rank, operand in enumerate(operands):
        kernel.store(np.full(LENGTH, rank + 1.0, kernel.wire_dtype), operand, 1)
    out = np.empty_like(operands[0])
    found = float("inf")
    for _ in range(TIMES):
        begun = time.perf_counter()
        kernel.reduce(operands, out, ranks)
        found = min(found, time.perf_counter() - begun)
    return 1e6 * found


def main() -> None:
    """Print a table."""
    if compiled.core is None:
        raise SystemExit(f"there is no compiled part: {compiled.reason}")
    print("| operator, dtype | ranks | Python, µs | compiled, µs | times as fast |")
    print("| --- | --- | --- | --- | --- |")
    for op, dtype in CASES:
        by_core, by_python = Kernel(op, dtype), Kernel(op, dtype)
        by_python.compiled = None
        for ranks in (2, 4):
            before, now = shortest(by_python, ranks), shortest(by_core, ranks)
            print(f"| {op} {dtype} | {ranks} | {before:.0f} | {now:.0f} | {before / now:.1f} |")


if __name__ == "__main__":
    main()
