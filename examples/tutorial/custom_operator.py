"""Operators of your own: any associative function of two tensors.

`elementwise` ones may be cut into pieces and so run at full speed; others, as the product of
matrices here, get whole tensors. They need not commute: the tensor of the lower rank stands left.
"""

from __future__ import annotations

import torch

import aiodist
from aiodist import ReduceOp


def larger_magnitude(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(a.abs() >= b.abs(), a, b)


async def reduce_my_way(group: aiodist.Group) -> None:
    tensor = torch.tensor([1.0, -2.0, 3.0, -4.0]).roll(group.rank)
    op = ReduceOp.custom(larger_magnitude, elementwise=True)
    await group.all_reduce(tensor, op=op)
    print(f"[{group.rank}] largest = {tensor}")

    matrix = torch.tensor([[group.rank + 1, 1], [0, 1]])
    await group.all_reduce(matrix, op=torch.matmul)
    print(f"[{group.rank}] product = {matrix.tolist()}")


def main() -> None:
    aiodist.run(reduce_my_way, nprocs=4)


if __name__ == "__main__":
    main()
