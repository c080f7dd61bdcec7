"""A trainer's ranks hold rows of a matrix; the ranks of a server want columns, and a bias whole.

Four ranks train, three serve: seven ranks in one group. Nothing is gathered anywhere: each server
rank gets the elements that it wants from the ranks that hold them, and no others::

    python examples/resharding/rows_to_columns.py
"""

from __future__ import annotations

import numpy as np

import aiodist

TRAINERS, SERVERS = 4, 3
SHAPE = (8, 6)


def whole() -> np.ndarray:
    """What the trainers hold together. In a real program nobody has it in one place."""
    return np.arange(SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE)


async def main(group: aiodist.Group) -> str:
    """One rank: what it has in the end."""
    if group.rank < TRAINERS:
        rows = (slice(2 * group.rank, 2 * group.rank + 2), slice(None))
        held = {
            "weight": aiodist.Shard(whole()[rows], rows, SHAPE),
            "bias": np.ones(SHAPE[1], np.float32),  # every trainer has all of it
        }
        await group.reshard(held, None)
        return f"rank {group.rank} held rows {2 * group.rank} and {2 * group.rank + 1}"

    first = 2 * (group.rank - TRAINERS)
    columns = (slice(None), slice(first, first + 2))
    wanted = {
        "weight": aiodist.Shard(np.empty((SHAPE[0], 2), np.float32), columns, SHAPE),
        "bias": np.empty(SHAPE[1], np.float32),
    }
    await group.reshard(None, wanted)
    assert np.array_equal(wanted["weight"].array, whole()[columns])
    assert wanted["bias"].all()
    return f"rank {group.rank} has columns {first} and {first + 1}, and the bias"


if __name__ == "__main__":
    for line in aiodist.run(main, nprocs=TRAINERS + SERVERS):
        print(line)
