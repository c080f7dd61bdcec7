"""torch's operations as calls of aiodist.

Every function runs on the engine, starts its operation, and returns the Works. `group` is the
aiodist group, and `seconds` the deadline. Results go into the given tensors. Shapes matter as in
torch: only in forms with lists of tensors. In others the number of elements matters.

Each call of a collective of torch is one collective of aiodist, even if it has several tensors.
Ranks match collectives by counting, and a rank that refuses its arguments counts one. If the number
depended on arguments, that rank could not know how many the other ranks count.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aiodist import ANY_SOURCE, AiodistError, Group, MismatchError, ReduceOp
from aiodist.buffers import arrays
from aiodist.codecs import Codec
from aiodist.engine.failures import mismatch_text
from aiodist.types import AnySource
from aiodist_torch.operators import divide, meaning

Works = Sequence["asyncio.Future[Any]"]
Step = Callable[[], object]

WIDER_FOR_AVERAGES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Dtypes in which a sum might overflow before it is divided, and those to add up in."""


def all_reduce(group: Group, x: Tensor, op: Any, seconds: float) -> Works:
    """Reduce `x` in place."""
    meant, divides = meaning(op, x.dtype)
    flat = flattened(x, writes=True)
    work = group.all_reduce(flat, meant, timeout=seconds)
    return filling(x, flat, work, divided(group, flat)) if divides else filling(x, flat, work)


def average_coded(group: Group, x: Tensor, codec: Codec, tag: str, seconds: float) -> Works:
    """Average `x` in place, by a codec between hosts."""
    return (group.all_reduce(x, ReduceOp.AVG, codec=codec, tag=tag, timeout=seconds),)


def all_reduce_sparse(group: Group, x: Tensor, op: Any, seconds: float) -> Works:
    """Sum sparse tensors in place: gather the elements of all ranks, and add them up here."""
    if x.layout is not torch.sparse_coo:
        raise TypeError(
            f"all_reduce takes dense tensors, and sparse ones in COO format; got {x.layout}: "
            "convert it by to_dense() or to_sparse_coo()"
        )
    if (found := meaning(op, torch.float32).op) is not ReduceOp.SUM:
        raise ValueError(f"sparse tensors can be summed, nothing else; got {found}")
    own = x.detach().coalesce()
    work = group.all_gather([own.indices(), own.values(), list(own.shape)], timeout=seconds)
    return then(work, lambda: _sum_sparse(group, work.result(), own, x))


def _sum_sparse(group: Group, parts: list[Any], own: Tensor, x: Tensor) -> None:
    calls = {
        rank: f"all_reduce(SUM, {values.dtype}{shape}, sparse_dim={len(indices)})"
        for rank, (indices, values, shape) in enumerate(parts)
    }
    if len({*calls.values()}) > 1:
        raise MismatchError(
            mismatch_text(calls), calls=calls, group=group.name, epoch=group.epoch, op="all_reduce"
        )
    total = torch.sparse_coo_tensor(
        torch.cat([indices for indices, _, _ in parts], dim=1),
        torch.cat([values for _, values, _ in parts]),
        own.shape,
        check_invariants=True,  # because indices of other ranks may be wrong
    )
    x.copy_(total.coalesce())


def all_reduce_coalesced(group: Group, xs: list[Tensor], op: Any, seconds: float) -> Works:
    """Reduce several tensors in place."""
    meanings = {meaning(op, x.dtype) for x in xs} or {meaning(op, torch.float32)}
    if len(meanings) == 1:
        ((meant, divides),) = meanings
        work = group.all_reduce(xs, meant, timeout=seconds)
        return then(work, divided(group, *xs)) if divides else (work,)
    # AVG of integers and others, or SUM or PRODUCT of booleans and others. Wider dtypes make one
    # operator right for all of them.
    meant = meaning(op, torch.float32).op
    averages = meant is ReduceOp.AVG
    wider = WIDER_FOR_AVERAGES if averages else {torch.bool: torch.int32}
    wide = [x.detach().to(wider.get(x.dtype, x.dtype)) for x in xs]
    work = group.all_reduce(wide, ReduceOp.SUM if averages else meant, timeout=seconds)
    pairs = zip(xs, wide, strict=True)
    steps = [partial(x.copy_, y) for x, y in pairs if x.dtype is not y.dtype]
    return then(work, divided(group, *wide), *steps) if averages else then(work, *steps)


def reduce(group: Group, x: Tensor, dst: int, op: Any, seconds: float) -> Works:
    """Reduce `x` in place, at rank `dst` only."""
    meant, divides = meaning(op, x.dtype)
    flat = flattened(x, writes=group.rank == dst)
    work = group.reduce(flat, dst, meant, timeout=seconds)
    if group.rank != dst:
        return (work,)
    return filling(x, flat, work, *([divided(group, flat)] if divides else []))


def broadcast(group: Group, x: Tensor, src: int, seconds: float) -> Works:
    """Copy `x` of rank `src` into `x` of every rank."""
    if group.rank == src:
        return (group.broadcast(flattened(x), src, timeout=seconds),)
    flat = place(x)
    return filling(x, flat, group.broadcast(flat, src, timeout=seconds))


def all_gather(group: Group, x: Tensor, outs: list[Tensor], seconds: float) -> Works:
    """Copy `x` of each rank into ``outs[rank]``. Shapes may differ from rank to rank."""
    return (group.all_gather(x, out=outs, timeout=seconds),)


def all_gather_single(group: Group, x: Tensor, out: Tensor, seconds: float) -> Works:
    """Copy `x` of all ranks into `out`, one after the other."""
    flat = place(out)
    return filling(out, flat, group.all_gather(flattened(x), out=flat, timeout=seconds))


def all_gather_single_coalesced(
    group: Group, xs: list[Tensor], outs: list[Tensor], seconds: float
) -> Works:
    """Do `all_gather_single` of several tensors."""
    check_pairs(xs, outs)
    flats = [place(out) for out in outs]
    parts = [shares(flat, group.size, "output") for flat in flats]
    rows = [[part[rank] for part in parts] for rank in range(group.size)]
    work = group.all_gather([flattened(x) for x in xs], out=rows, timeout=seconds)
    steps = [step for pair in zip(outs, flats, strict=True) for step in copied_back(*pair)]
    return then(work, *steps) if steps else (work,)


def all_gather_coalesced(
    group: Group, xs: list[Tensor], outs: list[list[Tensor]], seconds: float
) -> Works:
    """Copy tensor i of each rank into ``outs[rank][i]``."""
    return (group.all_gather(xs, out=outs, timeout=seconds),)


def gather(group: Group, x: Tensor, outs: list[Tensor], dst: int, seconds: float) -> Works:
    """Copy `x` of each rank into ``outs[rank]`` at rank `dst`."""
    out = outs if group.rank == dst else None
    return (group.gather(x, dst, out=out, timeout=seconds),)


def scatter(group: Group, xs: list[Tensor], out: Tensor, src: int, seconds: float) -> Works:
    """Copy ``xs[rank]`` of rank `src` into `out`."""
    given = xs if group.rank == src else None
    return (group.scatter(given, src, out=out, timeout=seconds),)


def reduce_scatter(group: Group, xs: list[Tensor], out: Tensor, op: Any, seconds: float) -> Works:
    """Reduce ``xs[rank]`` over all ranks into `out`."""
    meant, divides = meaning(op, out.dtype)
    work = group.reduce_scatter(xs, meant, out=out, timeout=seconds)
    return then(work, divided(group, out)) if divides else (work,)


def reduce_scatter_single(group: Group, x: Tensor, out: Tensor, op: Any, seconds: float) -> Works:
    """Reduce part `rank` of `x` into `out`."""
    meant, divides = meaning(op, out.dtype)
    flat = place(out)
    work = group.reduce_scatter(flattened(x), meant, out=flat, timeout=seconds)
    return filling(out, flat, work, *([divided(group, flat)] if divides else []))


def reduce_scatter_single_coalesced(
    group: Group, xs: list[Tensor], outs: list[Tensor], op: Any, seconds: float
) -> Works:
    """Do `reduce_scatter_single` of several tensors."""
    check_pairs(xs, outs)
    rows = [shares(x.detach().reshape(-1), group.size, "input") for x in xs]
    for row, out in zip(rows, outs, strict=True):
        if (row.dtype, row.shape[1]) != (out.dtype, out.numel()):
            raise ValueError(
                f"an output has {out.numel()} elements of {out.dtype}, and the part of the input "
                f"for it {row.shape[1]} of {row.dtype}: both must be equal"
            )
    if len({x.dtype for x in xs}) == 1:
        packed = torch.cat(rows, dim=1)
        result = packed.new_empty(packed.shape[1])
        works = reduce_scatter_single(group, packed, result, op, seconds)
        parts = torch.split(result, [out.numel() for out in outs])
    else:  # one collective has one dtype, unless it is an all_reduce, which moves more bytes
        sums = [row.clone(memory_format=torch.contiguous_format) for row in rows]
        works = all_reduce_coalesced(group, sums, op, seconds)
        parts = tuple(total[group.rank] for total in sums)
    *works, last = works
    pairs = zip(outs, parts, strict=True)
    return [*works, *then(last, *[partial(out.copy_, part.view(out.shape)) for out, part in pairs])]


def check_pairs(xs: list[Tensor], outs: list[Tensor]) -> None:
    """Raise ValueError if there is not one output for each input."""
    if len(xs) != len(outs):
        raise ValueError(f"{len(xs)} inputs, {len(outs)} outputs: give one output for each input")


def shares(x: Tensor, size: int, name: str) -> Tensor:
    """Cut `x`, which has one dimension, into one row for each rank. Raises ValueError."""
    if len(x) % size:
        raise ValueError(
            f"an {name} has {len(x)} elements, which {size} ranks cannot share equally"
        )
    return x.view(size, len(x) // size)


def all_to_all(group: Group, xs: list[Tensor], outs: list[Tensor], seconds: float) -> Works:
    """Copy ``xs[rank]`` of rank r into ``outs[r]`` of `rank`. Shapes may differ."""
    return (group.all_to_all(xs, out=outs, timeout=seconds),)


def all_to_all_single(
    group: Group,
    x: Tensor,
    out: Tensor,
    x_splits: Sequence[int],
    out_splits: Sequence[int],
    seconds: float,
) -> Works:
    """Copy part `rank` of `x` of rank r into part r of `out` of `rank`.

    Parts are along the first dimension. Without splits they are equal.
    """
    flat = place(out)
    xs = split(x, flattened(x), x_splits, group.size, "input")
    outs = split(out, flat, out_splits, group.size, "output")
    return filling(out, flat, group.all_to_all(xs, out=outs, timeout=seconds))


def split(x: Tensor, flat: Tensor, splits: Sequence[int], size: int, name: str) -> list[Tensor]:
    """Cut `flat`, the elements of `x`, along the first dimension of `x`. Raises ValueError."""
    if not x.dim():
        raise ValueError(f"the {name} has no dimension to split: pass {name}.reshape(1)")
    rows = x.shape[0]
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
    width = math.prod(x.shape[1:])
    return list(torch.split(flat, [each * width for each in splits]))


def send(group: Group, x: Tensor, dst: int, tag: int, seconds: float) -> Works:
    """Send the elements of `x`."""
    return (group.send(flattened(x), dst, tag=tag, timeout=seconds),)


def receive(group: Group, x: Tensor, src: int | None, tag: int, seconds: float) -> Works:
    """Receive into `x` what rank `src` sends, or any rank (None)."""
    source: int | AnySource = ANY_SOURCE if src is None else src
    flat = place(x)
    return filling(x, flat, group.recv(src=source, tag=tag, out=flat, timeout=seconds))


def barrier(group: Group, seconds: float) -> Works:
    """Wait for all ranks."""
    return (group.barrier(timeout=seconds),)


# -- what is left to do when an operation has ended ----------------------------------------------


def then(work: asyncio.Future[Any], *steps: Step) -> Works:
    """Return `work`, and a task that takes these steps after it has ended well."""
    return (work, asyncio.get_running_loop().create_task(_after(work, steps)))


async def _after(work: asyncio.Future[Any], steps: tuple[Step, ...]) -> None:
    await work
    # autograd must not see this, and inference tensors are written, too
    with torch.inference_mode():
        for step in steps:
            step()


def divided(group: Group, *xs: Tensor) -> Step:
    """Make the step that turns sums into averages."""

    def step() -> None:
        for x in xs:
            divide(x, group.size)

    return step


def flattened(x: Tensor, *, writes: bool = False) -> Tensor:
    """Return the elements of `x` in one dimension: in its own memory if they lie there so.

    `writes`: results go into `x`, see `filling`. Raises ValueError if elements share memory then.
    """
    if x.dim() == 1:
        return x
    if writes and not x.is_contiguous():
        check_writable(x)
    return x.reshape(-1)


def place(out: Tensor) -> Tensor:
    """Return memory for the elements of `out`, in one dimension: its own if it is contiguous.

    Raises ValueError if elements of `out` share memory.
    """
    if out.is_contiguous():
        return flattened(out)
    check_writable(out)
    return torch.empty(out.numel(), dtype=out.dtype)


def check_writable(out: Tensor) -> None:
    """Raise ValueError if elements of `out` share memory. The other ranks hear of it then."""
    if out.is_cpu:
        arrays.writable(out, "the tensor")


def filling(out: Tensor, flat: Tensor, work: asyncio.Future[Any], *steps: Step) -> Works:
    """Return `work`, and what copies its result from `flat` into `out` after `steps`."""
    if flat is not out:
        steps = (*steps, *copied_back(out, flat))
    return then(work, *steps) if steps else (work,)


def copied_back(out: Tensor, flat: Tensor) -> list[Step]:
    """Return the step that copies `flat` into `out`, if that may not be its memory."""
    return [] if flat is out or out.is_contiguous() else [partial(out.copy_, flat.view(out.shape))]


def or_forgo(start: Callable[..., Works], group: Group, *args: Any) -> Works:
    """Start a collective. If its arguments make that impossible, use up its turn.

    The other ranks hear of that instead of waiting for this one.
    """
    try:
        return start(group, *args)
    except AiodistError:
        raise  # there is no group any more whose ranks count
    except Exception as error:
        group._forgo(error)
        raise
