"""What becomes of the memory of arrays and tensors when operations on them are done."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest

pytestmark = pytest.mark.strength(2)

torch = pytest.importorskip("torch")

LARGE = 70_001  # elements of 4 bytes: over two frames


def swap(group, x, out):
    return group.sendrecv(x, 1 - group.rank, src=1 - group.rank, out=out)


def pass_on(group, x, out):
    return group.recv(src=0, out=out) if group.rank else group.send(x, 1)


# What two ranks do with tensors of 2 n elements, `x` to give and `out` to take.
CALLS = {
    "all_reduce": lambda g, x, out: g.all_reduce(x),
    "all_reduce out": lambda g, x, out: g.all_reduce(x, out=out),
    "all_reduce list": lambda g, x, out: g.all_reduce([x, out]),
    "custom": lambda g, x, out: g.all_reduce(x, lambda a, b: a + b),
    "reduce": lambda g, x, out: g.reduce(x, 0),
    "broadcast": lambda g, x, out: g.broadcast(x, 0),
    "all_gather": lambda g, x, out: g.all_gather(x[: len(x) // 2], out=out),
    "gather": lambda g, x, out: g.gather(x[: len(x) // 2], 0, out=None if g.rank else out),
    "scatter": lambda g, x, out: g.scatter(None if g.rank else [x, x], out=out),
    "reduce_scatter": lambda g, x, out: g.reduce_scatter(x, out=out[: len(x) // 2]),
    "all_to_all": lambda g, x, out: g.all_to_all([x, x], out=[out, 0 * out]),
    "scan": lambda g, x, out: g.scan(x),
    "sendrecv": swap,
    "send": pass_on,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("length", [2, 2 * LARGE])
@pytest.mark.sample(20)
def test_storage_can_be_freed_afterwards(run, groups, everyone, call, length):
    """FSDP and others free storage, and give it back before the next call of the same shape, which
    is looked at anew: nothing is written to where the tensor was."""

    async def main():
        async with groups(2) as ranks:
            given = [torch.zeros(length) for _ in ranks]
            taken = [torch.zeros(length) for _ in ranks]
            for value in (1.0, 2.0, 3.0):
                for x in given:
                    x.fill_(value)
                works = [CALLS[call](g, given[g.rank], taken[g.rank]) for g in ranks]
                await asyncio.gather(*works)
                if call == "all_reduce":
                    assert all(bool((x == 2 * value).all()) for x in given)
                for x in given + taken:
                    x.untyped_storage().resize_(0)
                # Whoever takes that memory next keeps it to himself.
                others = [torch.full((length,), -1.0) for _ in range(8)]
                for x in given + taken:
                    x.untyped_storage().resize_(4 * length)
                    x.fill_(0)
                works = [CALLS[call](g, given[g.rank], taken[g.rank]) for g in ranks]
                await asyncio.gather(*works)
                assert all(bool((other == -1).all()) for other in others)

    run(main())


def test_freed_tensors_are_refused(run, groups, everyone):
    """Also where calls of this shape went well before."""

    async def main():
        async with groups(2) as ranks:
            given = [torch.ones(4) for _ in ranks]
            for _ in range(3):
                await everyone(ranks, lambda g: g.all_reduce(given[g.rank]))
                await everyone(ranks, lambda g: pass_on(g, given[0], given[1]))
            for group, x in zip(ranks, given, strict=True):
                x.untyped_storage().resize_(0)
                for call in (group.all_reduce, lambda x, g=group: g.send(x, 1 - g.rank)):
                    with pytest.raises(ValueError, match="storage of this Tensor has 0 bytes"):
                        await call(x)

    run(main())


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("length", [2, 2 * LARGE])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_nothing_keeps_memory_when_it_is_done(run, groups, everyone, call, length, kind):
    async def main():
        async with groups(2) as ranks:
            alive = []

            def memory():
                array = np.zeros(length, np.float32)
                alive.append(weakref.ref(array))
                # A tensor that lies in an array keeps it.
                return array[:] if kind == "numpy" else torch.from_numpy(array)

            async def once():
                given, taken = [memory() for _ in ranks], [memory() for _ in ranks]
                await asyncio.gather(*[CALLS[call](g, given[g.rank], taken[g.rank]) for g in ranks])

            for _ in range(3):
                await once()
            await everyone(ranks, lambda g: g.barrier())
            await asyncio.sleep(0)  # futures let go of their callbacks
            gc.collect()
            assert [ref for ref in alive if ref() is not None] == []

    run(main())
