"""torch's operations as calls of aiodist.

Every function runs on the engine, starts its operations, and returns the Works. `group` is the
aiodist group, and `seconds` the deadline. Results go into the given tensors. Shapes matter as in
torch: in forms with one tensor for all ranks, only the number of elements matters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aiodist import ANY_SOURCE, Group, ReduceOp
from aiodist.codecs import Codec
from aiodist.types import AnySource
from aiodist_torch.operators import Meaning, divide, meaning

Works = Sequence["asyncio.Future[Any]"]
Step = Callable[[], object]


def all_reduce(group: Group, x: Tensor, op: Any, seconds: float) -> Works:
    """Reduce `x` in place."""
    meant, divides = meaning(op, x.dtype)
    work = group.all_reduce(x, meant, timeout=seconds)
    return then(work, divided(group, x)) if divides else (work,)


def average_coded(group: Group, x: Tensor, codec: Codec, tag: str, seconds: float) -> Works:
    """Average `x` in place, by a codec between hosts."""
    return (group.all_reduce(x, ReduceOp.AVG, codec=codec, tag=tag, timeout=seconds),)


def all_reduce_sparse(group: Group, x: Tensor, op: Any, seconds: float) -> Works:
    """Sum sparse tensors in place: gather the elements of all ranks, and add them up here."""
    if meaning(op, torch.float32).op is not ReduceOp.SUM:
        raise ValueError(f"sparse tensors can be summed, nothing else; got {op}")
    own = x.detach().coalesce()
    work = group.all_gather([own.indices(), own.values(), list(own.shape)], timeout=seconds)
    return then(work, lambda: _sum_sparse(work.result(), own, x))


def _sum_sparse(parts: list[Any], own: Tensor, x: Tensor) -> None:
    for _, _, shape in parts:
        if shape != list(own.shape):
            raise ValueError(f"the ranks' sparse tensors have shapes {[part[2] for part in parts]}")
    total = torch.sparse_coo_tensor(
        torch.cat([indices for indices, _, _ in parts], dim=1),
        torch.cat([values for _, values, _ in parts]),
        own.shape,
        check_invariants=True,  # because indices of other ranks may be wrong
    )
    x.copy_(total.coalesce())


def all_reduce_coalesced(group: Group, xs: list[Tensor], op: Any, seconds: float) -> Works:
    """Reduce several tensors in place: one operation for all dtypes for which `op` means the
    same."""
    alike: dict[Meaning, list[Tensor]] = {}
    for x in xs:
        alike.setdefault(meaning(op, x.dtype), []).append(x)
    works: list[asyncio.Future[Any]] = []
    for (meant, divides), some in alike.items():
        work = group.all_reduce(some, meant, timeout=seconds)
        works += then(work, divided(group, *some)) if divides else (work,)
    return works


def reduce(group: Group, x: Tensor, dst: int, op: Any, seconds: float) -> Works:
    """Reduce `x` in place, at rank `dst` only."""
    meant, divides = meaning(op, x.dtype)
    work = group.reduce(x, dst, meant, timeout=seconds)
    return then(work, divided(group, x)) if divides and group.rank == dst else (work,)


def broadcast(group: Group, x: Tensor, src: int, seconds: float) -> Works:
    """Copy `x` of rank `src` into `x` of every rank."""
    return (group.broadcast(x, src, timeout=seconds),)


def all_gather(group: Group, x: Tensor, outs: list[Tensor], seconds: float) -> Works:
    """Copy `x` of each rank into ``outs[rank]``. Shapes may differ from rank to rank."""
    return (group.all_gather(x, out=outs, timeout=seconds),)


def all_gather_single(group: Group, x: Tensor, out: Tensor, seconds: float) -> Works:
    """Copy `x` of all ranks into `out`, one after the other."""
    flat = flattened(out)
    return filling(out, flat, group.all_gather(x.reshape(-1), out=flat, timeout=seconds))


def all_gather_single_coalesced(
    group: Group, xs: list[Tensor], outs: list[Tensor], seconds: float
) -> Works:
    """Gather several tensors, each with an `all_gather_single` of its own."""
    return each(
        group,
        [partial(all_gather_single, group, *pair, seconds) for pair in zip(xs, outs, strict=True)],
    )


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
    flat = flattened(out)
    work = group.reduce_scatter(x.reshape(-1), meant, out=flat, timeout=seconds)
    return filling(out, flat, work, *([divided(group, flat)] if divides else []))


def reduce_scatter_single_coalesced(
    group: Group, xs: list[Tensor], outs: list[Tensor], op: Any, seconds: float
) -> Works:
    """Reduce and scatter several tensors, each with a `reduce_scatter_single` of its own."""
    return each(
        group,
        [
            partial(reduce_scatter_single, group, *pair, op, seconds)
            for pair in zip(xs, outs, strict=True)
        ],
    )


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
    xs = split(x, x_splits, group.size, "input")
    outs = split(out, out_splits, group.size, "output")
    return (group.all_to_all(xs, out=outs, timeout=seconds),)


def split(x: Tensor, splits: Sequence[int], size: int, name: str) -> list[Tensor]:
    """Cut `x` along its first dimension. Raises ValueError."""
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
    flat = flattened(x)
    return filling(x, flat, group.recv(src=source, tag=tag, out=flat, timeout=seconds))


def barrier(group: Group, seconds: float) -> Works:
    """Wait for all ranks."""
    return (group.barrier(timeout=seconds),)


def each(group: Group, starts: Sequence[Callable[[], Works]]) -> Works:
    """Start several collectives. If one is refused, all use up their turns, and none goes on."""
    # All ranks have to count alike, whichever call is refused on whichever rank. Stopping at the
    # first refusal would leave the others' later collectives without this rank. Going on with the
    # rest would leave the caller with half of them done. So each takes its turn, and then all are
    # given up.
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
    """Make the step that turns sums of integers into averages."""

    def step() -> None:
        for x in xs:
            divide(x, group.size)

    return step


def flattened(out: Tensor) -> Tensor:
    """Return memory for the elements of `out`, in one dimension: its own if it is contiguous."""
    return out.view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype)


def filling(out: Tensor, flat: Tensor, work: asyncio.Future[Any], *steps: Step) -> Works:
    """Return `work`, and what copies its result from `flat` into `out` after `steps`."""
    if not out.is_contiguous():
        steps = (*steps, lambda: out.copy_(flat.view(out.shape)))
    return then(work, *steps) if steps else (work,)


def or_forgo(start: Callable[..., Works], group: Group, *args: Any) -> Works:
    """Start a collective. If its arguments make that impossible, use up its turn.

    The other ranks hear of that instead of waiting for this one.
    """
    try:
        return start(group, *args)
    except (TypeError, ValueError, RuntimeError) as error:
        group._forgo(error)
        raise
