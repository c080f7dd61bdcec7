"""An all-reduce written by hand, out of sends and receives: the ring algorithm.

Each rank sends to its right and receives from its left. In the first round of steps the parts of
the tensor are summed up on their way around the ring, in the second one the finished parts go
around once more. A rank sends 2 (size - 1) / size of its tensor, however many ranks there are:
"Bringing HPC Techniques to Deep Learning" (A. Gibiansky, 2017). `group.all_reduce` does this, and
better, by itself.
"""

from __future__ import annotations

import torch

import aiodist


async def ring_all_reduce(group: aiodist.Group, tensor: torch.Tensor) -> None:
    right = (group.rank + 1) % group.size
    left = (group.rank - 1) % group.size
    parts = list(tensor.tensor_split(group.size))
    for step in range(group.size - 1):
        send, into = (group.rank - step) % group.size, (group.rank - step - 1) % group.size
        parts[into] += await group.sendrecv(parts[send], right, src=left, tag="reduce")
    for step in range(group.size - 1):
        send, into = (group.rank + 1 - step) % group.size, (group.rank - step) % group.size
        parts[into].copy_(await group.sendrecv(parts[send], right, src=left, tag="gather"))


async def compare(group: aiodist.Group) -> None:
    tensor = torch.arange(10.0) * (group.rank + 1)
    expected = await group.all_reduce(tensor.clone())
    await ring_all_reduce(group, tensor)
    print(f"[{group.rank}] data = {tensor.tolist()}")
    print(f"[{group.rank}] equal = {torch.equal(tensor, expected)}")


def main() -> None:
    aiodist.run(compare, nprocs=3)


if __name__ == "__main__":
    main()
