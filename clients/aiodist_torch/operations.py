"""torch's operations as calls of aiodist: what is given, in which form, and where results go.

Every function runs on the engine, starts what it stands for, and returns the Works. `group` is the
aiodist group, `seconds` the deadline. Results are in the tensors given; shapes
matter as in torch: in forms of one tensor for all ranks, only the number of elements does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aiodist import ANY_SOURCE, Group, ReduceOp
from aiodist.types import AnySource

Works = Sequence["asyncio.Future[Any]"]

_OPERATORS = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.AVG: ReduceOp.AVG,
    dist.ReduceOp.BAND: ReduceOp.BAND,
    dist.ReduceOp.BOR: ReduceOp.BOR,
    dist.ReduceOp.BXOR: ReduceOp.BXOR,
}


def operator(op: Any) -> ReduceOp:
    """aiodist's operator for one of torch. Raises ValueError."""
    kind = getattr(op, "op", op)  # with a factor it is an object, else perhaps a bare enum
    found = _OPERATORS.get(kind)
    if found is not None:
        return found
    if kind == dist.ReduceOp.PREMUL_SUM:
        factor = op.factor
        return ReduceOp.premul_sum(factor.item() if isinstance(factor, Tensor) else factor)
    raise ValueError(f"{kind} is no reduce operator that the aiodist backend knows")


def all_reduce(group: Group, x: Tensor, op: Any, seconds: float) -> Works:
    """Reduce `x` in place."""
    return (group.all_reduce(x, operator(op), timeout=seconds),)


def all_reduce_sparse(group: Group, x: Tensor, op: Any, seconds: float) -> Works:
    """Sum sparse tensors in place: everyone's elements are gathered, and added up here."""
    if operator(op) is not ReduceOp.SUM:
        raise ValueError(f"sparse tensors can be summed, nothing else; got {op}")
    loop = asyncio.get_running_loop()
    return (loop.create_task(_sum_sparse(group, x, seconds)),)


async def _sum_sparse(group: Group, x: Tensor, seconds: float) -> None:
    own = x.detach().coalesce()
    parts = await group.all_gather([own.indices(), own.values(), list(own.shape)], timeout=seconds)
    for _, _, shape in parts:
        if shape != list(own.shape):
            raise ValueError(f"the ranks' sparse tensors have shapes {[part[2] for part in parts]}")
    total = torch.sparse_coo_tensor(
        torch.cat([indices for indices, _, _ in parts], dim=1),
        torch.cat([values for _, values, _ in parts]),
        own.shape,
        check_invariants=True,  # indices of others are not to be trusted blindly
    )
    with torch.no_grad():
        x.copy_(total.coalesce())


def all_reduce_coalesced(group: Group, xs: list[Tensor], op: Any, seconds: float) -> Works:
    """Reduce several tensors in place, as one operation."""
    return (group.all_reduce(xs, operator(op), timeout=seconds),)


def reduce(group: Group, x: Tensor, dst: int, op: Any, seconds: float) -> Works:
    """Reduce `x` in place, at rank `dst` alone."""
    return (group.reduce(x, dst, operator(op), timeout=seconds),)


def broadcast(group: Group, x: Tensor, src: int, seconds: float) -> Works:
    """`x` of rank `src` goes into `x` of all."""
    return (group.broadcast(x, src, timeout=seconds),)


def all_gather(group: Group, x: Tensor, outs: list[Tensor], seconds: float) -> Works:
    """`x` of each rank goes into ``outs[rank]``; shapes may differ from rank to rank."""
    return (group.all_gather(x, out=outs, timeout=seconds),)


def all_gather_single(group: Group, x: Tensor, out: Tensor, seconds: float) -> Works:
    """`x` of all ranks goes into `out`, one after the other."""
    return (group.all_gather(x.reshape(-1), out=out.view(-1), timeout=seconds),)


def all_gather_single_coalesced(
    group: Group, xs: list[Tensor], outs: list[Tensor], seconds: float
) -> Works:
    """The same with several tensors, each with an operation of its own."""
    return each(
        group,
        [partial(all_gather_single, group, *pair, seconds) for pair in zip(xs, outs, strict=True)],
    )


def all_gather_coalesced(
    group: Group, xs: list[Tensor], outs: list[list[Tensor]], seconds: float
) -> Works:
    """Tensor i of each rank goes into ``outs[rank][i]``."""
    return (group.all_gather(xs, out=outs, timeout=seconds),)


def gather(group: Group, x: Tensor, outs: list[Tensor], dst: int, seconds: float) -> Works:
    """`x` of each rank goes into ``outs[rank]`` at rank `dst`."""
    out = outs if group.rank == dst else None
    return (group.gather(x, dst, out=out, timeout=seconds),)


def scatter(group: Group, xs: list[Tensor], out: Tensor, src: int, seconds: float) -> Works:
    """``xs[rank]`` of rank `src` goes into `out`."""
    given = xs if group.rank == src else None
    return (group.scatter(given, src, out=out, timeout=seconds),)


def reduce_scatter(group: Group, xs: list[Tensor], out: Tensor, op: Any, seconds: float) -> Works:
    """The reduction of ``xs[rank]`` over all ranks goes into `out`."""
    return (group.reduce_scatter(xs, operator(op), out=out, timeout=seconds),)


def reduce_scatter_single(group: Group, x: Tensor, out: Tensor, op: Any, seconds: float) -> Works:
    """The reduction of part `rank` of `x` goes into `out`."""
    return (group.reduce_scatter(x.reshape(-1), operator(op), out=out.view(-1), timeout=seconds),)


def reduce_scatter_single_coalesced(
    group: Group, xs: list[Tensor], outs: list[Tensor], op: Any, seconds: float
) -> Works:
    """The same with several tensors, each with an operation of its own."""
    return each(
        group,
        [
            partial(reduce_scatter_single, group, *pair, op, seconds)
            for pair in zip(xs, outs, strict=True)
        ],
    )


def all_to_all(group: Group, xs: list[Tensor], outs: list[Tensor], seconds: float) -> Works:
    """``xs[rank]`` of rank r goes into ``outs[r]`` of `rank`; shapes may differ."""
    return (group.all_to_all(xs, out=outs, timeout=seconds),)


def all_to_all_single(
    group: Group,
    x: Tensor,
    out: Tensor,
    x_splits: Sequence[int],
    out_splits: Sequence[int],
    seconds: float,
) -> Works:
    """The same with the parts of one tensor, along its first dimension; no splits: equal ones."""
    xs = split(x, x_splits, group.size, "input")
    outs = split(out, out_splits, group.size, "output")
    return (group.all_to_all(xs, out=outs, timeout=seconds),)


def split(x: Tensor, splits: Sequence[int], size: int, name: str) -> list[Tensor]:
    """`x` cut along its first dimension. Raises ValueError."""
    rows = x.shape[0] if x.dim() else 0
    if not splits:
        if rows % size:
            raise ValueError(
                f"the first dimension of the {name} is {rows}, which {size} ranks cannot share "
                f"equally: give {name}_split_sizes"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(
            f"{name}_split_sizes are {list(splits)}: {size} numbers with the sum {rows}, the first "
            f"dimension of the {name}, are needed"
        )
    return list(torch.split(x, list(splits)))


def send(group: Group, x: Tensor, dst: int, tag: int, seconds: float) -> Works:
    """Send the elements of `x`."""
    return (group.send(x.reshape(-1), dst, tag=tag, timeout=seconds),)


def receive(group: Group, x: Tensor, src: int | None, tag: int, seconds: float) -> Works:
    """Receive into `x` what rank `src` sends, or any rank (None)."""
    source: int | AnySource = ANY_SOURCE if src is None else src
    return (group.recv(src=source, tag=tag, out=x.view(-1), timeout=seconds),)


def barrier(group: Group, seconds: float) -> Works:
    """Wait for all ranks."""
    return (group.barrier(timeout=seconds),)


def each(group: Group, starts: Sequence[Callable[[], Works]]) -> Works:
    """Start several collectives, also where one of them is refused: that uses up its turn, and so
    do the others, as on the other ranks. Then none of them goes on."""
    works: list[asyncio.Future[Any]] = []
    refused: Exception | None = None
    for start in starts:
        try:
            works += start()
        except (TypeError, ValueError, RuntimeError) as error:
            group._forgo(error)
            refused = refused or error
    if refused is None:
        return works
    for work in works:
        if not work.cancel():
            work.exception()  # the caller hears of the refusal
    raise refused


def or_forgo(start: Callable[..., Works], group: Group, *args: Any) -> Works:
    """Start a collective. If its arguments make that impossible, its turn is used up, and the
    other ranks hear that instead of waiting for this one."""
    try:
        return start(group, *args)
    except (TypeError, ValueError, RuntimeError) as error:
        group._forgo(error)
        raise
