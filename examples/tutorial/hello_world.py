"""Four processes that know who they are.

Run it as it is: ``python examples/tutorial/hello_world.py``. `aiodist.run` starts the processes,
has them meet, and calls `hello_world` in each with its group.
"""

from __future__ import annotations

import aiodist


async def hello_world(group: aiodist.Group) -> None:
    print(f"[{group.rank}] say hi!")


def main() -> None:
    aiodist.run(hello_world, nprocs=4)
    print("finished")


if __name__ == "__main__":
    main()
