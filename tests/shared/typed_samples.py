"""Which type each call gives. `make lint` checks every `assert_type` here by mypy and by pyright,
and tests/unit/test_signatures.py checks that what comes at run time is of that type.

Calls of which users are to be warned stand in `wrong`: there an error that is missing is an error.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, assert_type

import numpy as np
from numpy.typing import NDArray

import aiodist
from aiodist import BlockingGroup, BlockingWork, Envelope, Group, ReduceOp, Window, Work

if TYPE_CHECKING:
    import distributed
    import torch

Floats = NDArray[np.float64]


def floats(length: int = 4) -> Floats:
    """A new array."""
    return np.ones(length)


def named() -> tuple[str, float]:
    """A value of several types."""
    return "x", 1.5


async def reductions(group: Group) -> None:
    """Arrays, numbers, lists of arrays; in place, and into `out`."""
    out: Floats | None = floats()
    work = group.all_reduce(floats())
    assert_type(work, Work[Floats])
    await work
    assert_type(await group.all_reduce(floats()), Floats)
    assert_type(await group.all_reduce(floats(), ReduceOp.AVG), Floats)
    assert_type(await group.all_reduce(floats(), lambda a, b: a + b, tag="t"), Floats)
    assert_type(await group.all_reduce(floats(), out=floats(), timeout=9), Floats)
    assert_type(await group.all_reduce(floats(), out=out), Floats)
    short: NDArray[np.float32] = np.ones(3, np.float32)
    assert_type(await group.all_reduce(short, codec=aiodist.codecs.int8()), NDArray[np.float32])
    assert_type(await group.all_reduce([floats(), floats()]), list[Floats])
    assert_type(await group.all_reduce((floats(), floats())), tuple[Floats, Floats])
    assert_type(await group.all_reduce([floats()], out=(floats(),)), tuple[Floats])
    assert_type(await group.all_reduce(bytearray(4)), bytearray)
    assert_type(await group.all_reduce(3), int)
    assert_type(await group.all_reduce(3, ReduceOp.AVG), float)
    assert_type(await group.all_reduce(3.5), float)
    assert_type(await group.all_reduce(1j), complex)
    assert_type(await group.all_reduce(True, ReduceOp.LAND), bool)
    assert_type(await group.all_reduce(np.float32(3)), np.float32)
    assert_type(await group.reduce(floats()), Floats | None)
    assert_type(await group.reduce(3, 1), int | None)
    assert_type(await group.reduce(3, 1, ReduceOp.AVG), float | None)
    assert_type(await group.reduce(3, op=ReduceOp.AVG), float | None)
    assert_type(
        await group.reduce(floats(), 0, out=floats() if group.rank == 0 else None), Floats | None
    )
    assert_type(await group.scan(floats()), Floats)
    assert_type(await group.scan(3, ReduceOp.MAX), int)
    assert_type(await group.exscan(3.5), float)
    assert_type(await group.exscan(floats(), out=floats()), Floats)
    assert_type(await group.reduce_scatter(floats()), Floats)
    assert_type(await group.reduce_scatter([floats(), floats()]), Floats)
    assert_type(await group.reduce_scatter([[floats()], [floats()]]), list[Floats])
    assert_type(await group.reduce_scatter([(floats(),), (floats(),)]), list[Floats])
    assert_type(await group.reduce_scatter([1, 2]), int)
    assert_type(await group.reduce_scatter([1, 2], ReduceOp.AVG), float)
    assert_type(await group.reduce_scatter(floats(), out=floats(2)), Floats)
    assert_type(await group.reduce_scatter(bytearray(4)), NDArray[Any])


async def movements(group: Group) -> None:
    """Values of any kind; buffers arrive as arrays."""
    is_source = group.rank == 0
    assert_type(await group.broadcast(floats()), Floats)
    assert_type(await group.broadcast({"a": 1} if is_source else None), dict[str, int])
    assert_type(await group.broadcast(named() if is_source else None), tuple[str, float])
    assert_type(await group.all_gather(group.rank), list[int])
    assert_type(await group.all_gather(floats()), list[Floats])
    assert_type(await group.all_gather(named(), tag=1), list[tuple[str, float]])
    assert_type(await group.all_gather(None), list[None])
    assert_type(await group.all_gather(array("b", [1])), list[NDArray[Any]])
    assert_type(await group.all_gather(floats(), out=floats(8)), Floats)
    assert_type(await group.all_gather(floats(), out=[floats(), floats()]), list[Floats])
    assert_type(await group.all_gather(floats(), out=[None, None]), list[Floats])
    assert_type(await group.all_gather(floats(), out=(None, None)), list[Floats])
    assert_type(await group.gather({"a": [1]}), list[dict[str, list[int]]] | None)
    assert_type(await group.gather(bytearray(4)), list[NDArray[Any]] | None)
    assert_type(
        await group.gather(floats(), out=floats(8) if is_source else None),
        Floats | list[Floats] | None,
    )
    assert_type(await group.scatter(["a", "b"] if is_source else None), str)
    assert_type(await group.scatter((floats(), floats()) if is_source else None), Floats)
    assert_type(await group.scatter([bytearray(4)] * 2 if is_source else None), NDArray[Any])
    assert_type(await group.scatter([floats()] * 2 if is_source else None, out=floats()), Floats)
    assert_type(await group.all_to_all([1, 2]), list[int])
    assert_type(await group.all_to_all([floats(), floats()]), list[Floats])
    assert_type(await group.all_to_all([floats(), floats()], out=floats(8)), Floats)
    assert_type(await group.all_to_all([floats(), floats()], out=[None, None]), list[Floats])
    assert_type(await group.share(floats() if is_source else None), Floats)
    assert_type(await group.reshard({"w": floats()}, {"w": floats()}), dict[str, Floats])
    assert_type(await group.barrier(), None)


async def messages(group: Group) -> None:
    """What comes is known where `out` says it."""
    other = 1 - group.rank
    assert_type(group.send(floats(), other), Work[None])
    assert_type(await group.probe(src=other), Envelope)
    assert_type(group.iprobe(src=other), Envelope | None)
    assert_type(await group.recv(src=other, out=floats()), Floats)
    group.send(floats(), other)
    assert_type(await group.recv(src=[0, 1], out=floats()), Floats)
    assert_type(await group.sendrecv(floats(), other), Any)
    assert_type(await group.sendrecv(floats(), other, src=other, out=floats()), Floats)
    sent = group.isend([floats()], other, tag="t")
    assert_type(await group.irecv(tag="t", out=[floats()]), list[Floats])
    assert_type(await sent, None)
    group.send(floats()[:2], other)
    assert_type(await group.recv(out=floats(), partial=True), Floats)


async def memory(group: Group) -> None:
    """Of the dtype, and of the kind, that is asked for."""
    assert_type(group.empty(3, np.float64), Floats)
    assert_type(group.empty((2, 2), np.dtype(np.int16)), NDArray[np.int16])
    assert_type(group.empty(3, like=floats()), Floats)
    assert_type(group.empty(3, "float32"), Any)


async def groups(group: Group) -> None:
    """Groups that are made of others, and what leads to the next epoch: all are Works."""
    verdict = assert_type(group.agree(True), Work[bool])
    assert_type(await verdict, bool)
    assert_type(await group.dup(timeout=9), Group)
    assert_type(await group.split(None, key=1), Group | None)
    assert_type(await group.subgroup([0, 1]), Group)
    found = assert_type(group.store.get("k"), Work[bytes | None])
    assert_type(await found, bytes | None)
    assert_type(await group.store.add("n", 2, ttl=9), int)
    assert_type(await group.store.set("k", b"v"), None)
    group = assert_type(await group.shrink(), Group)
    assert_type(await group.rendezvous(min_size=2), Group)


async def windows(group: Group) -> None:
    """What is read is numpy's, or what it is read into."""
    window = assert_type(await group.expose(floats()), Window)
    assert_type(await window.get(0), NDArray[Any])
    assert_type(await window.get(0, slice(0, 2)), NDArray[Any])
    assert_type(await window.get(0, (1,)), NDArray[Any])
    assert_type(await window.get(0, ..., out=floats()), Floats)
    assert_type(window.put(0, 1, 2.5), Work[None])
    assert_type(await window.put(0, slice(2), [1.0, 2.0]), None)
    assert_type(await window.accumulate(0, (..., np.int64(1)), np.float64(1)), None)
    assert_type(await window.fence(), None)
    await window.close()


async def channels(group: Group) -> None:
    """What is received may be anything; what it is read into is known."""
    channel = f"policy {group.rank}"
    async with (
        aiodist.publisher(channel, address=group.address, lease=9, transports="inproc") as out,
        aiodist.subscriber(channel, address=group.address, patience=9.0) as weights,
    ):
        assert_type(out.newest, int | None)
        assert_type(await out.publish({"w": floats()}, version=1), None)
        assert_type(await weights.wait(newer_than=0), int)
        assert_type(await weights.latest(), tuple[int, Any])
        assert_type(await weights.latest(into={"w": floats()}), int)
        async for version, _ in weights:
            assert_type(version, int)
            break
        async with aclosing(weights.stream(1)) as arrays:
            async for name, _ in arrays:
                assert_type(name, str)


async def tensors(group: Group) -> None:
    """Tensors of torch."""
    import torch

    def ones() -> torch.Tensor:
        return torch.ones(4)

    assert_type(await group.all_reduce(ones()), torch.Tensor)
    assert_type(await group.all_reduce([ones()]), list[torch.Tensor])
    assert_type(await group.all_reduce(floats().astype(np.float32), out=ones()), torch.Tensor)
    assert_type(await group.all_gather(ones()), list[torch.Tensor])
    assert_type(await group.reduce_scatter(ones()), torch.Tensor)
    assert_type(await group.broadcast({"w": ones()}), dict[str, torch.Tensor])
    assert_type(await group.scatter([ones(), ones()] if group.rank == 0 else None), torch.Tensor)
    assert_type(group.empty(3, like=ones()), torch.Tensor)


def blocking(group: BlockingGroup) -> None:
    """The same operations, as ordinary calls."""
    other = 1 - group.rank
    assert_type(group.all_reduce(floats()), Floats)
    assert_type(group.all_reduce(3, ReduceOp.AVG), float)
    assert_type(group.all_reduce(floats(), out=floats()), Floats)
    assert_type(group.reduce(3), int | None)
    assert_type(group.exscan(3.5), float)
    assert_type(group.reduce_scatter([1, 2]), int)
    assert_type(group.broadcast("a" if group.rank == 0 else None), str)
    assert_type(group.all_gather(group.rank), list[int])
    assert_type(group.gather("a"), list[str] | None)
    assert_type(group.scatter(["a", "b"] if group.rank == 0 else None), str)
    assert_type(group.all_to_all([1, 2]), list[int])
    assert_type(group.share(floats() if group.rank == 0 else None), Floats)
    assert_type(group.barrier(), None)
    sent = assert_type(group.isend(floats(), other), BlockingWork[None])
    assert_type(group.recv(src=other, out=floats()), Floats)
    assert_type(sent.wait(), None)
    group.send(floats(), other)
    received = assert_type(group.irecv(out=floats()), BlockingWork[Floats])
    assert_type(group.start(group.barrier), BlockingWork[None])
    assert_type(received.wait(), Floats)
    assert_type(group.iprobe(), Envelope | None)
    assert_type(group.empty(3, np.float64), Floats)
    with group.expose(floats()) as window:
        assert_type(window.get(0, 1), NDArray[Any])
        assert_type(window.get(0, slice(2), out=floats(2)), Floats)
        assert_type(window.put(0, 1, 2), None)


async def noted(group: Group, name: str, times: int = 1) -> str:
    """A program for `runs`."""
    return name * times * group.size


def runs() -> None:
    """`aiodist.run` knows what its function takes and gives."""
    assert_type(aiodist.run(noted, 2, ("a",)), list[str])
    assert_type(aiodist.run(noted, nprocs=2, args=("a", 2), op_timeout=9, timeout=50), list[str])
    assert_type(aiodist.run(noted, 2, ["a"]), list[str])


def clusters(client: distributed.Client) -> None:
    """Groups on Ray and Dask, which are not there when tests run. Never called."""
    import aiodist_dask
    import aiodist_ray

    aiodist_ray.connect("train", size=2, op_timeout=9, timeout=60)
    aiodist_ray.connect("train", token="a")  # type: ignore[call-arg]
    aiodist_ray.connect(min_size="a")  # type: ignore[arg-type]
    ranks = aiodist_dask.groups(client, op_timeout=9, transports="tcp", timeout=60)
    ranks.run(noted, "a", times=2)
    ranks.run(noted, 1)  # type: ignore[arg-type]
    aiodist_dask.groups(client, size=2)  # type: ignore[call-arg]


async def wrong(group: Group, both: BlockingGroup, texts: Sequence[str]) -> None:
    """None of these lines is without an error. Never called."""
    await group.all_reduce("a")  # type: ignore[type-var]
    await group.all_reduce([1, 2])  # type: ignore[type-var]
    await group.all_reduce({"a": floats()})  # type: ignore[call-overload]
    await group.all_reduce(floats(), op="sum")  # type: ignore[call-overload]
    await group.all_reduce(floats(), tga=1)  # type: ignore[call-overload]
    await group.all_reduce(floats(), tag=1.5)  # type: ignore[call-overload]
    await group.all_reduce(3, out=3)  # type: ignore[call-overload]
    await group.scatter(floats())  # type: ignore[call-overload]
    await group.all_to_all("ab")  # type: ignore[call-overload]
    await group.broadcast(floats(), src="0")  # type: ignore[call-overload]
    await group.recv(partial=True)  # type: ignore[call-overload]
    await group.agree("a")  # type: ignore[arg-type]
    await group.store.set("k", "a")  # type: ignore[arg-type]
    window = await group.expose("a")  # type: ignore[arg-type]
    await window.get(0, 1.5)  # type: ignore[call-overload]
    await window.get(0, out=3)  # type: ignore[call-overload]
    await window.put(0, "a", 3)  # type: ignore[arg-type]
    aiodist.publisher("policy", size=2)  # type: ignore[call-arg]
    aiodist.subscriber("policy", lease="a")  # type: ignore[arg-type]
    both.all_reduce("a")  # type: ignore[type-var]
    both.all_gather(1, timeout="a")  # type: ignore[call-overload]
    aiodist.run(noted, 2, (1,))  # type: ignore[arg-type]
    aiodist.run(noted, 2)  # type: ignore[arg-type]
    aiodist.run(noted, 2, ("a",), op_timout=1)  # type: ignore[call-overload]
    aiodist.local(2, min_size=1)  # type: ignore[call-arg]
    aiodist.epochs(lease="a")  # type: ignore[arg-type]
    aiodist.lifespan(leese=1)  # type: ignore[call-arg]
