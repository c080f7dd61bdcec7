"""``python -m benchmarks.codecs``: what each codec of `aiodist.codecs` saves, takes and loses.

One thread codes normally distributed float32 values. Times are processor time of that thread, the
best of several, because other programs on the machine can only make them longer. GB/s are of
float32 bytes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from aiodist.codecs import Codec, bf16, int4, int8, topk

CODECS: Sequence[Codec] = [bf16(), int8(), int4(), topk(0.01), topk(0.1)]


def best(call: Callable[[], object], turns: int) -> float:
    """The least processor seconds of one of `turns` calls."""
    times = []
    for _ in range(turns):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)


def row(codec: Codec, mib: int, turns: int) -> list[str]:
    """Measure `codec` with an array of `mib` MiB of float32."""
    values = np.random.default_rng(1).standard_normal(mib << 18).astype(np.float32)
    out, there = np.empty(codec.nbytes(values.size), np.uint8), np.empty_like(values)
    data = out[: codec.encode(values, out)]
    encoding = best(lambda: codec.encode(values, out), turns)
    decoding = best(lambda: codec.decode(data, there), turns)
    lost = np.linalg.norm(values - there) / np.linalg.norm(values)
    return [
        codec.name,
        f"{data.nbytes / values.nbytes:.1%}",
        f"{values.nbytes / encoding / 1e9:.2f}",
        f"{values.nbytes / decoding / 1e9:.2f}",
        f"{lost:.2%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="size of the array (default: 64)")
    parser.add_argument("--turns", type=int, default=10, help="of each measurement (default: 10)")
    given = parser.parse_args()
    table = Table("codec", "bytes", "encode GB/s", "decode GB/s", "relative error")
    for codec in CODECS:
        table.add_row(*row(codec, given.mib, given.turns))
    Console().print(table)


if __name__ == "__main__":
    main()
