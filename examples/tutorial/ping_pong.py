"""A tensor goes to rank 1, is counted up there, and comes back."""

from __future__ import annotations

import torch

import aiodist


async def ping_pong(group: aiodist.Group) -> None:
    tensor = torch.zeros(1)
    if group.rank == 0:
        tensor += 1
        await group.send(tensor, dst=1)
        await group.recv(src=1, out=tensor)
    else:
        await group.recv(src=0, out=tensor)
        tensor += 1
        await group.send(tensor, dst=0)
    print(f"Rank {group.rank} has data {tensor}")


def main() -> None:
    aiodist.run(ping_pong, nprocs=2)


if __name__ == "__main__":
    main()
