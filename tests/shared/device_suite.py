"""What every device has to show, as programs of ranks in processes of their own.

``aiodist.run(device_suite.reductions, 2, ("standin",))`` runs one of `PROGRAMS`; it raises where
something is wrong. The tests run them on the stand-in, and on a GPU where there is one.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from standin import StandinDevice

from aiodist.errors import CollectiveAbortedError, MismatchError
from aiodist.group import Group
from aiodist.types import ReduceOp

Values = NDArray[Any]


class Kit(Protocol):
    """What programs do with a device beside collectives. All in stream order."""

    def put(self, values: Values) -> Any: ...

    def get(self, array: Any) -> Values: ...

    def fill(self, array: Any, value: float) -> None: ...

    def slow(self) -> None:
        """Some milliseconds of work."""
        ...


class StandinKit:
    """`Kit` of a stand-in."""

    def __init__(self, device: StandinDevice) -> None:
        self.put = device.put
        self.get = device.get
        self.fill = device.fill
        self._device = device

    def slow(self) -> None:
        self._device.current().put(lambda: time.sleep(0.005))


class CudaKit:
    """`Kit` of the first GPU that torch sees; all ranks share it."""

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._torch.cuda.set_device(0)

    def put(self, values: Values) -> Any:
        return self._torch.from_numpy(values.copy()).cuda()

    def get(self, array: Any) -> Values:
        values: Values = array.cpu().numpy()
        return values

    def fill(self, array: Any, value: float) -> None:
        array.fill_(value)

    def slow(self) -> None:
        self._torch.cuda._sleep(20_000_000)


@contextmanager
def kit_of(kind: str) -> Iterator[Kit]:
    """The kit of "standin" or "cuda"."""
    if kind == "cuda":
        yield CudaKit()
        return
    device = StandinDevice()
    try:
        yield StandinKit(device)
    finally:
        device.close()


def given(rank: int, dtype: str, length: int = 1000) -> Values:
    """The input of a rank: small whole numbers, whose sums are exact in all dtypes."""
    return (np.random.default_rng(rank).integers(0, 9, length)).astype(dtype)


async def lane_is_there(group: Group) -> None:
    """Until untagged collectives run in shared memory, or are known not to."""
    over = 0
    while not over:  # as often on all ranks
        setup = group._context._setup
        over = await group.all_reduce(int(setup is None or setup.over), ReduceOp.MIN)


def equal(got: Values, due: Any) -> None:
    np.testing.assert_array_equal(got, due)


async def reductions(group: Group, kind: str) -> None:
    """All reductions, on a lane and over links, in place and apart."""
    rank, size = group.rank, group.size
    await lane_is_there(group)
    with kit_of(kind) as kit:
        for dtype in ("float32", "float16", "float64", "int64", "uint8", "complex64"):
            xs = [given(peer, dtype) for peer in range(size)]
            for tag in (None, "tagged"):
                x = kit.put(xs[rank])
                assert await group.all_reduce(x, tag=tag) is x
                equal(kit.get(x), sum(xs))
                x = kit.put(xs[rank])
                result = await group.reduce(x, size - 1, tag=tag)
                equal(kit.get(x), sum(xs) if rank == size - 1 else xs[rank])
                assert (result is x) == (rank == size - 1)
                part = await group.reduce_scatter(kit.put(xs[rank]), tag=tag)
                equal(kit.get(part), np.array_split(sum(xs), size)[rank])
                equal(kit.get(await group.scan(kit.put(xs[rank]), tag=tag)), sum(xs[: rank + 1]))
        small = [given(peer, "int32").reshape(20, 50) for peer in range(size)]
        x = kit.put(small[rank])
        await group.all_reduce([x.T, kit.put(np.ones(3))], ReduceOp.MAX)
        equal(kit.get(x), np.maximum.reduce(small))


async def moves(group: Group, kind: str) -> None:
    """All collectives that move arrays."""
    rank, size = group.rank, group.size
    await lane_is_there(group)
    with kit_of(kind) as kit:
        xs = [given(peer, "float32", 100 + peer) for peer in range(size)]
        for peer, part in enumerate(await group.all_gather(kit.put(xs[rank]))):
            equal(kit.get(part), xs[peer])
        parts = await group.gather(kit.put(xs[rank]), 0, tag="tagged")
        assert (parts is None) == (rank != 0)
        for peer, part in enumerate(parts or []):
            equal(kit.get(part), xs[peer])
        x = kit.put(xs[0] if rank == 0 else np.zeros_like(xs[0]))
        equal(kit.get(await group.broadcast(x)), xs[0])
        slots = [kit.put(xs[rank] + peer) for peer in range(size)]
        for peer, part in enumerate(await group.all_to_all(slots)):
            equal(kit.get(part), xs[peer] + rank)


async def mixed(group: Group, kind: str) -> None:
    """Some ranks give arrays on the device and others arrays of the host: all patterns of that."""
    rank, size = group.rank, group.size
    await lane_is_there(group)
    with kit_of(kind) as kit:
        for pattern in range(1, 2**size - 1):
            on_device = bool(pattern >> rank & 1)

            def put(values: Values, on_device: bool = on_device) -> Any:
                return kit.put(values) if on_device else values.copy()

            def check(got: Any, due: Any, on_device: bool = on_device) -> None:
                assert isinstance(got, np.ndarray) is not on_device
                equal(kit.get(got) if on_device else got, due)

            for length in (5, 300_000) if pattern < 4 else (5,):
                xs = [given(peer, "float32", length) for peer in range(size)]
                for tag in (None, "tagged"):
                    if on_device and pattern % size == rank:
                        kit.slow()
                    check(await group.all_reduce(put(xs[rank]), tag=tag), sum(xs))
                    x = put(xs[rank])
                    dst = pattern % size
                    result = await group.reduce(x, dst, tag=tag)
                    assert (result is x) == (rank == dst)
                    check(x, sum(xs) if rank == dst else xs[rank])
                    part = await group.reduce_scatter(put(xs[rank]), tag=tag)
                    check(part, np.array_split(sum(xs), size)[rank])
                    check(await group.scan(put(xs[rank]), tag=tag), sum(xs[: rank + 1]))
                    into = put(xs[rank])
                    check(await group.broadcast(into, dst, tag=tag), xs[dst])
                    outs = [put(np.zeros(length, np.float32)) for _ in range(size)]
                    await group.all_gather(put(xs[rank]), out=outs, tag=tag)
                    for out, due in zip(outs, xs, strict=True):
                        check(out, due)
            # A message from every rank to the next, whatever is there.
            after, before = (rank + 1) % size, (rank - 1) % size
            into = put(np.zeros(40_000))
            x = put(np.full(40_000, float(rank)))
            check(await group.sendrecv(x, after, src=before, out=into), np.full(40_000, before))
        # Where all have arrays on the device, that is where they are reduced.
        x = kit.put(np.full(9, float(rank)))
        await group.all_reduce(x)
        equal(kit.get(x), np.full(9, float(sum(range(size)))))
        try:
            await group.all_reduce(kit.put(np.ones(3)) if rank else np.ones(4))
        except MismatchError as error:
            assert error.calls[0] == "all_reduce(SUM, float64[4])"
            assert (
                error.calls.get(1, "all_reduce(SUM, float64[3])") == "all_reduce(SUM, float64[3])"
            )
        else:
            raise AssertionError("shapes differed")
        await group.barrier()


async def order(group: Group, kind: str) -> None:
    """Operations come after what is queued, and before what is queued after them."""
    await lane_is_there(group)
    with kit_of(kind) as kit:
        x = kit.put(np.zeros(200_000, np.float32))
        for turn in range(20):
            if turn % group.size == group.rank:
                kit.slow()
            kit.fill(x, group.rank + turn)
            await group.all_reduce(x, tag=None if turn % 3 else "tagged")
            due = group.size * turn + sum(range(group.size))
            equal(kit.get(x), np.full(200_000, due, np.float32))


async def at_once(group: Group, kind: str) -> None:
    """Many operations at a time, started in another order on each rank."""
    with kit_of(kind) as kit:
        names = [f"tag {number}" for number in range(8)]
        xs = {name: kit.put(np.full(5000, float(index))) for index, name in enumerate(names)}
        turned = names[group.rank :] + names[: group.rank]
        await asyncio.gather(*(group.all_reduce(xs[name], tag=name) for name in turned))
        for index, name in enumerate(names):
            equal(kit.get(xs[name]), np.full(5000, float(index * group.size)))


async def given_up(group: Group, kind: str) -> None:
    """A cancelled operation and a mismatch leave the group as good as before."""
    await lane_is_there(group)
    with kit_of(kind) as kit:
        x = kit.put(np.ones(300_000))
        for turn in range(5):
            if group.rank == turn % group.size:
                kit.slow()
            work = group.all_reduce(x)
            if group.rank == turn % group.size:
                work.cancel()
                kit.fill(x, 7.0)
                equal(kit.get(x), np.full(300_000, 7.0))
            else:
                try:
                    await work
                except CollectiveAbortedError:
                    pass
                else:
                    raise AssertionError("a cancelled operation completed")
            await group.barrier()
            kit.fill(x, 1.0)
            await group.all_reduce(x)
            equal(kit.get(x), np.full(300_000, float(group.size)))
        try:
            await group.all_reduce(kit.put(np.ones(3 + group.rank)))
        except MismatchError:
            pass
        else:
            raise AssertionError("shapes differed")
        # What was given up is let go of once no rank has work for it under way.
        while await group.all_reduce(len(group._context.device_memory._limbo), ReduceOp.MAX):
            pass


async def messages(group: Group, kind: str) -> None:
    """Point to point, of arrays small and large, into arrays that are given and new ones."""
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    with kit_of(kind) as kit:
        await warm_up(group, kit)
        for length in (1, 1000, 300_000):
            for turn in range(5):
                x = kit.put(np.full(length, float(group.rank + turn)))
                if turn % 2:
                    kit.slow()
                    kit.fill(x, group.rank + turn)
                out = kit.put(np.zeros(length)) if turn % 3 else None
                got = await group.sendrecv(x, after, src=before, tag=turn, out=out)
                kit.fill(x, -1.0)
                equal(kit.get(got), np.full(length, float(before + turn)))
        # From a device to the host, and back.
        there = np.zeros(5000)
        sending = group.send(kit.put(np.full(5000, float(group.rank))), after)
        await asyncio.gather(sending, group.recv(src=before, out=there))
        equal(there, np.full(5000, float(before)))
        out = kit.put(np.zeros(5000))
        await asyncio.gather(group.send(there, after), group.recv(src=before, out=out))
        equal(kit.get(out), np.full(5000, float((before - 1) % group.size)))


async def trees(group: Group, kind: str) -> None:
    """Trees with arrays on the device and on the host; ranks that give nothing."""
    await lane_is_there(group)
    with kit_of(kind) as kit:
        await warm_up(group, kit)
        for tag in (None, "tagged"):
            own = {"w": kit.put(given(group.rank, "float32")), "host": np.arange(group.rank + 1)}
            for rank, tree in enumerate(await group.all_gather(own, tag=tag)):
                equal(kit.get(tree["w"]), given(rank, "float32"))
                equal(tree["host"], np.arange(rank + 1))
            tree = await group.broadcast(own if group.rank == 0 else None, tag=tag)
            equal(kit.get(tree["w"]), given(0, "float32"))
            slots = [[kit.put(given(peer, "int16")), peer] for peer in range(group.size)]
            x, number = await group.scatter(slots if group.rank == 0 else None, tag=tag)
            assert number == group.rank
            equal(kit.get(x), given(group.rank, "int16"))


async def sharing(group: Group, kind: str) -> None:
    """One memory for all, which its owner has dropped. Its owner has it back at once, and not when
    the garbage collector runs."""
    gc.disable()
    await lane_is_there(group)
    with kit_of(kind) as kit:
        await warm_up(group, kit)
        x = kit.put(np.zeros(300_000)) if group.rank == 0 else None
        if group.rank == 0:
            kit.slow()
            kit.fill(x, 3.0)
        got: Any = await group.share({"w": x} if group.rank == 0 else None)
        x = None
        equal(kit.get(got["w"]), np.full(300_000, 3.0))
        await group.barrier()
        if group.rank == group.size - 1 and kind == "cuda":  # others' stand-ins are read-only
            kit.fill(got["w"], 4.0)
            kit.get(got["w"])
        await group.barrier()
        equal(kit.get(got["w"]), np.full(300_000, 4.0 if kind == "cuda" else 3.0))
        got = None
        while await group.all_reduce(len(group._context.device_memory.shares._lent), ReduceOp.MAX):
            pass


async def warm_up(group: Group, kit: Kit) -> None:
    """From here on what comes from a device goes to that of the rank."""
    await group.all_reduce(kit.put(np.ones(1)), tag="warm-up")


PROGRAMS = (reductions, mixed, moves, order, at_once, given_up, messages, trees, sharing)
"""All of them: ``async def program(group, kind)``."""
