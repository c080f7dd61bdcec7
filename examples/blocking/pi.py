"""π by throwing darts, in ordinary code: no loop, no await. Start it with
``aiodist run -n 4 examples/blocking/pi.py``."""

from __future__ import annotations

import numpy as np

import aiodist
from aiodist import BlockingGroup

DARTS = 200_000


def hits(rank: int) -> int:
    """How many darts of this rank hit the quarter of a circle."""
    x, y = np.random.default_rng(rank).random((2, DARTS))
    return int(np.count_nonzero(x * x + y * y < 1))


def report(group: BlockingGroup, mine: int) -> None:
    """Rank 0 hears from whoever is done first, and who that was."""
    if group.rank:
        group.send(mine, 0)
        return
    reports: dict[int | None, int] = {0: mine}
    while len(reports) < group.size:
        work = group.irecv()
        value = work.wait()
        reports[work.source] = value
    print(f"hits by rank: {[reports[rank] for rank in range(group.size)]}")


def main() -> None:
    with aiodist.connect_blocking() as group:
        mine = hits(group.rank)
        report(group, mine)
        total = group.all_reduce(mine)
        if group.rank == 0:
            print(f"π is about {4 * total / (DARTS * group.size):.2f}")


if __name__ == "__main__":
    main()
