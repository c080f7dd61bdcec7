"""One rank sends a tensor to another one.

Rank 1 gives the memory that it wants filled as ``out``; without it, `recv` makes a new tensor of
the shape and dtype that come. While a rank awaits, its event loop serves everything else.
"""

from __future__ import annotations

import torch

import aiodist


async def send_and_receive(group: aiodist.Group) -> None:
    tensor = torch.zeros(1)
    if group.rank == 0:
        tensor += 1
        await group.send(tensor, dst=1)
    else:
        print(f"Rank {group.rank} starts with {tensor}")
        await group.recv(src=0, out=tensor)
    print(f"Rank {group.rank} has data {tensor[0]}")


def main() -> None:
    aiodist.run(send_and_receive, nprocs=2)


if __name__ == "__main__":
    main()
