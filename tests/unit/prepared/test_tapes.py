"""What the compiled part runs: every operator on every dtype, again and again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sharing import everyone, sharing

from aiodist import ReduceOp, compiled

pytestmark = [
    pytest.mark.usefixtures("no_turn_is_due"),
    pytest.mark.skipif(compiled.core is None, reason=compiled.reason),
]

OPS = {
    "SUM": (ReduceOp.SUM, np.add),
    "PRODUCT": (ReduceOp.PRODUCT, np.multiply),
    "MIN": (ReduceOp.MIN, np.minimum),
    "MAX": (ReduceOp.MAX, np.maximum),
    "BXOR": (ReduceOp.BXOR, np.bitwise_xor),
}
DTYPES = ["f4", "f8", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">f8", "c16"]


class Special(np.ndarray):  # type: ignore[type-arg]
    """A subclass of arrays."""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("tag", [None, "a"])
async def test_every_operator_on_every_dtype(size: int, tag: str | None) -> None:
    """If only numpy has the kernel, the compiled part does all but the reduction."""
    numbers = np.random.default_rng(0)
    async with sharing(size) as ranks:
        for (name, (op, reference)), dtype in itertools.product(OPS.items(), DTYPES):
            kind = np.dtype(dtype).kind
            if (name == "BXOR" and kind in "fc") or (name in ("MIN", "MAX") and kind == "c"):
                continue
            for turn in range(4):
                xs = [(numbers.normal(size=5) * 9).astype(dtype) for _ in ranks]
                wide = [x.astype("f4") if dtype == "f2" else x for x in xs]
                expected = wide[0]
                for x in wide[1:]:
                    expected = reference(expected, x)
                await everyone(ranks, lambda g, op=op, xs=xs: g.all_reduce(xs[g.rank], op, tag=tag))
                for x in xs:
                    assert x.tobytes() == expected.astype(dtype).tobytes(), (name, dtype, turn)


@pytest.mark.parametrize("tag", [None, "a"])
async def test_arrays_that_a_tape_was_not_made_for(tag: str | None) -> None:
    """Shape and dtype are the same, but arrays are read-only, strided, or of a subclass.

    Nothing but the array is written.
    """
    async with sharing(2) as ranks:
        for _ in range(3):
            xs = [np.full(4, g.rank + 1.0) for g in ranks]
            await everyone(ranks, lambda g, xs=xs: g.all_reduce(xs[g.rank], tag=tag))
            assert (xs[0] == 3).all()
        wide = [np.full((4, 2), g.rank + 1.0) for g in ranks]
        await everyone(ranks, lambda g: g.all_reduce(wide[g.rank][:, 0], tag=tag))
        assert (wide[0] == [3, 1]).all()
        assert (wide[1] == [3, 2]).all()
        fixed = np.full(4, 1.0)
        fixed.flags.writeable = False
        for group in ranks:
            with pytest.raises(ValueError, match="read-only"):
                await group.all_reduce(fixed, tag=tag)
        assert (fixed == 1).all()
        special = [np.full(4, g.rank + 1.0).view(Special) for g in ranks]
        await everyone(ranks, lambda g: g.all_reduce(special[g.rank], tag=tag))
        assert (special[0] == 3).all()


@pytest.mark.parametrize("tag", [None, "a"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
async def test_tensors(tag: str | None, dtype: torch.dtype) -> None:
    """Results are right, and autograd's version says that the tensor was written."""
    op = ReduceOp.MAX if dtype == torch.bool else ReduceOp.SUM
    numbers = torch.Generator().manual_seed(0)
    async with sharing(2) as ranks:
        for turn in range(6):
            whole = [torch.randint(0, 2, (3, 4), generator=numbers).to(dtype) for _ in ranks]
            xs = [x[1:] for x in whole] if turn % 2 else [x[1:].clone() for x in whole]
            versions = [x._version for x in xs]
            expected = torch.stack(xs).amax(0) if dtype == torch.bool else xs[0] + xs[1]
            rest = [x[0].clone() for x in whole]
            await everyone(ranks, lambda g, xs=xs: g.all_reduce(xs[g.rank], op, tag=tag))
            assert all(torch.equal(x, expected) for x in xs)
            assert [x._version for x in xs] == [version + 1 for version in versions]
            assert all(torch.equal(x[0], one) for x, one in zip(whole, rest, strict=True))


@pytest.mark.parametrize("tag", [None, "a"])
async def test_tensors_that_a_tape_was_not_made_for(tag: str | None) -> None:
    """Shape and dtype are the same, but memory is gone, or the tensor views it in another way."""
    async with sharing(2) as ranks:

        async def reduced(xs: list[torch.Tensor]) -> None:
            await everyone(ranks, lambda g: g.all_reduce(xs[g.rank], tag=tag))

        for _ in range(3):
            xs = [torch.full((2, 2), g.rank + 1.0) for g in ranks]
            await reduced(xs)
            assert all((x == 3).all() for x in xs)
        wide = [torch.full((2, 4), g.rank + 1.0) for g in ranks]
        await reduced([x[:, :2] for x in wide])
        assert [x.tolist() for x in wide] == [[[3, 3, 1, 1]] * 2, [[3, 3, 2, 2]] * 2]
        turned = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t() for _ in ranks]
        await reduced(turned)
        assert all(x.tolist() == [[2, 6], [4, 8]] for x in turned)
        negated = [torch._neg_view(torch.full((2, 2), g.rank + 1.0)) for g in ranks]
        for group, x in zip(ranks, negated, strict=True):
            with pytest.raises(ValueError, match="negated view"):
                await group.all_reduce(x, tag=tag)
        gone = [torch.full((2, 2), 1.0) for _ in ranks]
        for group, x in zip(ranks, gone, strict=True):
            x.untyped_storage().resize_(8)
            with pytest.raises((TypeError, ValueError), match="storage of this Tensor has 8 bytes"):
                await group.all_reduce(x, tag=tag)
        with torch.inference_mode():
            xs = [torch.full((2, 2), g.rank + 1.0) for g in ranks]
        await reduced(xs)
        assert all((x == 3).all() for x in xs)
        leaves = [torch.nn.Parameter(torch.full((2, 2), g.rank + 1.0)) for g in ranks]
        await reduced(leaves)
        assert all((x == 3).all() and x._version == 1 for x in leaves)


class Hooked(asyncio.SelectorEventLoop):
    """Calls `hook` once, the next time when a future is made."""

    hook: Callable[[], object] | None = None

    def get_debug(self) -> bool:
        if self.hook is not None:
            hook, self.hook = self.hook, None
            hook()
        return super().get_debug()


@pytest.mark.parametrize("outer", [None, "a"])
@pytest.mark.parametrize("inner", [None, "a", "b"])
def test_a_call_within_a_call(outer: str | None, inner: str | None) -> None:
    """A finalizer may run where the hook does."""

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        async with sharing(2) as (a, b):
            x = [np.zeros(4), np.zeros(4)]
            y = [np.zeros(4), np.zeros(4)]
            for number in range(10):
                for rank in range(2):
                    x[rank][:] = number
                    y[rank][:] = -number
                works = [b.all_reduce(y[1], tag=inner), b.all_reduce(x[1], tag=outer)]
                within = partial(lambda works: works.append(a.all_reduce(y[0], tag=inner)), works)
                if number < 6:  # the compiled part learns the calls
                    within()
                else:
                    loop.hook = within
                works.append(a.all_reduce(x[0], tag=outer))
                await asyncio.gather(*works)
                assert len(works) == 4
                for rank in range(2):
                    assert (x[rank] == 2 * number).all()
                    assert (y[rank] == -2 * number).all()

    with asyncio.Runner(loop_factory=Hooked) as runner:
        runner.run(main())


async def test_a_tape_refuses_steps_beyond_its_memory() -> None:
    """A tape reads and writes addresses, so they are checked when it is made."""
    core = compiled.core
    assert core is not None
    async with sharing(2) as ranks:
        for _ in range(3):
            await everyone(ranks, lambda g: g.all_reduce(np.ones(4)))
        lane = ranks[0]._context.lane
        assert lane is not None
        areas = [lane.board.area(rank, 0) for rank in range(2)]
        free, waiting = lane.areas.free, lane.waiting
        made = {
            "lane": lane, "progress": waiting.progress, "naps": lane.board, "neighbours": None,
            "moved": lane.moved, "ranks": [0, 1], "polls": True, "crowded": False,
            "free": free, "fallback": None, "dtype": np.dtype("f8"), "shown": 0, "taken": 0,
            "words": lane.board.pages, "areas": areas, "lengths": (4, -1),
            "kernel": core.find("SUM", "float64"), "size": 2, "area": 0,
            "last": False, "op": "x", "call": b"x", "digest": 0, "nbytes": 0, "finish": None,
            "unended": 0,
        }  # fmt: skip
        copy, much = 0, areas[0].nbytes // 8
        core.Tape(steps=[(copy, 4, (3, 0), [(0, 0)])], **made)
        for steps in (
            [(copy, 5, (3, 0), [(0, 0)])],
            [(copy, 4, (3, 0), [(0, 1)])],
            [(copy, 4, (3, much - 3), [(0, 0)])],
            [(copy, 4, (3, -1), [(0, 0)])],
            [(copy, -1, (3, 0), [(0, 0)])],
            [(copy, 4, (4, 0), [(0, 0)])],  # the area of the other rank
            [(copy, 4, (5, 0), [(0, 0)])],
            [(copy, 4, (2, 0), [(0, 0)])],
            [(copy, 4, (-1, 0), [(0, 0)])],
            [(copy, 4, ((1 << 31) - 1, 0), [(0, 0)])],
            [(copy, 4, (3, 0), [])],
            [(1, 4, (0, 0), [(3, 0)] * 17)],
            [(-1, 4, (0, 0), [(3, 0)])],
        ):
            with pytest.raises(ValueError, match=r"."):
                core.Tape(steps=steps, **made)
        for wrong in (
            {"words": []}, {"words": [memoryview(bytearray(8))]}, {"kernel": 10_000},
            {"area": 9}, {"lengths": (-1, -1)},
        ):  # fmt: skip
            with pytest.raises(ValueError, match=r"."):
                core.Tape(**(made | {"steps": []} | wrong))
        for wrong in (
            {"ranks": [0]}, {"ranks": [0, -1]}, {"ranks": [0, "1"]},
        ):  # fmt: skip
            with pytest.raises(TypeError):
                core.Tape(**(made | {"steps": []} | wrong))
        with pytest.raises(TypeError):
            core.Tape(**(made | {"steps": [], "lane": object()}))
