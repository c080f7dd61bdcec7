"""The code of `devices/cuda.py` around a CUDA that is none: tensors of the CPU that say they are on
a GPU, streams without delay, and allocations of this process. What a GPU does is not tried by this,
but what is asked of torch, and with which arguments, is."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist import Group, ReduceOp
from aiodist.devices import cuda, device_of
from aiodist.devices import shares as device_shares

torch = pytest.importorskip("torch")

PAGE = 1 << 20


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = True

    @property
    def device(self) -> Any:
        return torch.device("cuda", 0)

    def record_stream(self, stream: Any) -> None:
        assert isinstance(stream, FakeStream)

    def cpu(self) -> Any:
        return self.as_subclass(torch.Tensor).clone()


class FakeStream:
    def __init__(self, device: Any) -> None:
        assert device == torch.device("cuda", 0)

    def wait_event(self, event: Any) -> None:
        assert isinstance(event, FakeEvent)


class FakeEvent:
    def __init__(self, interprocess: bool = False) -> None:
        assert interprocess

    def record(self, stream: Any) -> None:
        assert isinstance(stream, FakeStream)

    def query(self) -> bool:
        return True

    def ipc_handle(self) -> bytes:
        return b"\1" * 64


class FakeCuda:
    Stream = FakeStream
    Event = FakeEvent

    def current_stream(self, device: Any) -> FakeStream:
        return FakeStream(device)

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        assert isinstance(stream, FakeStream)
        return contextlib.nullcontext()


class FakeTorch:
    """torch, with that CUDA."""

    cuda = FakeCuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, shape: Any, *, dtype: Any, device: Any = None, pin_memory: bool = False) -> Any:
        assert (device is None) == pin_memory
        made = torch.empty(shape, dtype=dtype)
        return made if device is None else made.as_subclass(OnGpu)

    def as_tensor(self, memory: Any, *, device: Any) -> Any:
        assert device == torch.device("cuda", 0)  # without one it goes to the host
        there = memory.__cuda_array_interface__
        ((nbytes,), (base, read_only)) = there["shape"], there["data"]
        assert (there["typestr"], there["version"], read_only) == ("|u1", 3, False)
        memory_of = (ctypes.c_ubyte * nbytes).from_address(base)
        memory_of.keeps = memory
        return torch.from_numpy(np.frombuffer(memory_of, np.uint8)).as_subclass(OnGpu)


class FakeDriver:
    """All memory of this process is in allocations that are long enough."""

    def allocation(self, pointer: int) -> tuple[int, int, int]:
        base = pointer - pointer % PAGE
        return base, base, 1 << 30

    def number(self, pointer: int) -> int:
        return pointer

    def export(self, base: int) -> bytes:
        return b"\2" * 64


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Any]]:
    """Puts arrays on it."""
    cuda._device.cache_clear()
    device: Any = cuda._device(0)
    device._torch = FakeTorch()
    device._context = FakeDriver()
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(device_shares, "_for_good", [])
    yield lambda values: torch.as_tensor(values).clone().as_subclass(OnGpu)
    cuda._device.cache_clear()


async def each(groups: list[Group], call: Callable[[Group, int], Any]) -> list[Any]:
    return list(await asyncio.gather(*(call(g, g.rank) for g in groups)))


def check(got: Any, due: Any) -> None:
    assert device_of(got) is not None
    np.testing.assert_array_equal(got.cpu().numpy(), due)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")],
)
def test_no_memory(
    gpu: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def empty(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(FakeTorch, "empty", empty)
    device = cuda._device(0)
    with pytest.raises(MemoryError, match="out of memory"):
        device.empty(device.current(), "float32", (3,))
    with pytest.raises(MemoryError, match="out of memory"):
        device.host("float32", (3,))


def test_a_tensor_whose_memory_was_freed_is_nowhere(gpu: Callable[[Any], Any]) -> None:
    x = gpu(np.ones(3))
    x.untyped_storage().resize_(0)
    assert cuda._device(0).locate(x).allocation == 0


async def test_events_without_handles(
    gpu: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(self: Any) -> bytes:
        raise RuntimeError("CUDA error: not supported")

    monkeypatch.setattr(FakeEvent, "ipc_handle", none)
    async with aiodist.local(2, transports=("inproc", "cuda_ipc")) as groups:
        for got in await each(groups, lambda g, r: g.all_reduce(gpu(np.ones(3)))):
            check(got, np.full(3, 2))
    assert any("an event has no handle: CUDA error" in line for line in caplog.messages)


@pytest.mark.parametrize("allowed", ["cuda_ipc", "through the host"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "complex64"])
async def test_collectives(gpu: Callable[[Any], Any], dtype: str, allowed: str) -> None:
    way = ("inproc", "cuda_ipc") if allowed == "cuda_ipc" else ("inproc",)
    async with aiodist.local(3, transports=way) as groups:
        xs = [(np.arange(6).reshape(2, 3) + r).astype(dtype) for r in range(3)]
        on = [gpu(x) for x in xs]
        for got, own in zip(await each(groups, lambda g, r: g.all_reduce(on[r])), on, strict=True):
            assert got is own
            check(got, sum(xs))
        on = [gpu(x) for x in xs]
        part = await each(groups, lambda g, r: g.reduce_scatter(on[r].T))
        for rank, got in enumerate(part):
            check(got, sum(xs).T[rank : rank + 1])
        for parts in await each(groups, lambda g, r: g.all_gather({"x": on[r], "n": r})):
            for src, tree in enumerate(parts):
                check(tree["x"], xs[src])
        for got in await each(groups, lambda g, r: g.broadcast(on[1] if r == 1 else None, 1)):
            check(got, xs[1])
        outs = [gpu(np.zeros_like(x.T)) for x in xs]
        await each(groups, lambda g, r: g.scatter(on if r == 0 else None, 0, out=outs[r].T))
        for rank, out in enumerate(outs):
            check(out.T, xs[rank])
        problems = {group._context.device_memory.problem for group in groups}
        assert problems == ({""} if allowed == "cuda_ipc" else {"transports= leaves it out"})


async def test_half_precision_and_gradients(gpu: Callable[[Any], Any]) -> None:
    async with aiodist.local(2) as groups:
        xs = [gpu(torch.full((5,), 1.5 + r)).to(torch.bfloat16) for r in range(2)]
        versions = [x._version for x in xs]
        await each(groups, lambda g, r: g.all_reduce(xs[r], ReduceOp.AVG))
        for x, version in zip(xs, versions, strict=True):
            assert x.dtype is torch.bfloat16 and x.tolist() == [2.0] * 5
            assert x._version > version
        ws = [torch.nn.Parameter(gpu(torch.ones(3))) for _ in range(2)]
        gathered = await each(groups, lambda g, r: g.all_gather(ws[r]))
        check(gathered[0][1].detach(), np.ones(3))


async def test_messages_and_shares(gpu: Callable[[Any], Any]) -> None:
    async with aiodist.local(2) as groups:
        x = gpu(np.arange(9.0))
        await each(groups, lambda g, r: g.all_reduce(gpu(np.ones(1))))
        _, got = await asyncio.gather(groups[0].send({"x": x, "empty": x[:0]}, 1), groups[1].recv())
        check(got["x"], np.arange(9.0))
        assert got["empty"].shape == (0,)
        out = np.zeros(9)
        await asyncio.gather(groups[0].send(x, 1), groups[1].recv(out=out))
        np.testing.assert_array_equal(out, np.arange(9.0))
        on = gpu(np.zeros(9))
        await asyncio.gather(groups[0].send(out + 1, 1), groups[1].recv(out=on))
        check(on, np.arange(1.0, 10.0))
        _, mapped = await each(groups, lambda g, r: g.share(x if r == 0 else None))
        x.fill_(5.0)
        check(mapped, np.full(9, 5.0))
        assert mapped.data_ptr() == x.data_ptr()
        del mapped
        while groups[0]._context.device_memory.shares._lent:
            gc.collect()  # tensors of a class of Python's own may be parts of cycles
            await each(groups, lambda g, r: g.barrier())
