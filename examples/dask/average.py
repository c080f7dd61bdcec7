"""The workers of a Dask cluster as the ranks of a group: the average of what they have.

Run it with Dask's `distributed` installed::

    python examples/dask/average.py
"""

from __future__ import annotations

import sys

import numpy as np
from distributed import Client

import aiodist
import aiodist_dask


async def average(group: aiodist.Group, scale: float) -> list[float]:
    """Runs on each worker, on its event loop, as one rank of the group."""
    x = scale * np.arange(3.0) * group.rank
    await group.all_reduce(x, aiodist.ReduceOp.AVG)
    result: list[float] = x.tolist()
    return result


def main(address: str | None = None) -> None:
    started = Client(address) if address else Client(n_workers=3, threads_per_worker=1)
    with started as client, aiodist_dask.groups(client) as ranks:
        print(list(ranks.run(average, 10).values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
