"""CUDA tensors of torch. A tensor has shown up before this module is imported, so torch is
loaded."""

from __future__ import annotations

import functools
import os
import secrets
import socket
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import msgpack
from numpy.typing import NDArray

from aiodist.buffers import overlaps, tensors
from aiodist.buffers.dtypes import COMPLEX, NARROW, carrier
from aiodist.devices.base import Location
from aiodist.devices.driver import HANDLE_BYTES, PrimaryContext
from aiodist.types import ReduceOp

_PROCESS = secrets.token_bytes(16)
"""Identifies this process, because CUDA does not open handles that the same process has
exported."""

_OPERATORS = {
    "SUM": "add",
    "AVG": "add",
    "PREMUL_SUM": "add",
    "PRODUCT": "mul",
    "MIN": "minimum",
    "MAX": "maximum",
    "BAND": "bitwise_and",
    "BOR": "bitwise_or",
    "BXOR": "bitwise_xor",
    "LAND": "logical_and",
    "LOR": "logical_or",
    "LXOR": "logical_xor",
}
_REDUCED = frozenset(
    {"float16", "bfloat16", "float32", "float64", "complex64", "complex128"}
    | {"uint8", "int8", "int16", "int32", "int64"}
)
"""dtypes that have operators of torch on the device; bool has only the logical ones."""
_HALF = frozenset({"float16", "bfloat16"})

_events: weakref.WeakValueDictionary[int, CudaEvent] = weakref.WeakValueDictionary()


class CudaEvent:
    """`aiodist.devices.base.Event`: an interprocess event of torch."""

    def __init__(self, event: Any, device: Any, handle: bytes = b"") -> None:
        self.event = event
        self._device = device
        self._handle = handle
        if not handle:
            self._number = secrets.randbits(63)
            _events[self._number] = self

    @property
    def handle(self) -> bytes:
        if not self._handle:
            # Until it is first recorded, an event belongs to the current device, so set that.
            # Export it once: other processes open the event, and each later record is visible to
            # them.
            try:
                with sys.modules["torch"].cuda.device(self._device):
                    ipc = bytes(self.event.ipc_handle())
            except RuntimeError as error:
                raise OSError(f"an event has no handle: {error}") from error
            self._handle = msgpack.packb([_PROCESS, self._number, ipc])
        return self._handle

    def done(self) -> bool:
        return bool(self.event.query())


class CudaStream:
    """`aiodist.devices.base.Stream`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def record(self, event: Any) -> None:
        event.event.record(self.stream)

    def wait(self, event: Any) -> None:
        self.stream.wait_event(event.event)


class Mapping:
    """Memory of an allocation of this or another process, in the form that torch takes.

    Tensors made of it keep it alive. With `context`, it is unmapped with the last of them.
    """

    def __init__(
        self, context: PrimaryContext | None, base: int, nbytes: int, keeps: object | None = None
    ) -> None:
        self._keeps = keeps
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (base, False),
            "strides": None,
            "version": 3,
        }
        if context is not None:
            weakref.finalize(self, context.close, base).atexit = False


def of(tensor: Any) -> CudaDevice:
    return _device(tensor.device.index)


def current() -> CudaDevice | None:
    """torch's current device; None if torch or a GPU is missing."""
    torch = tensors.require()
    if torch is None or not torch.cuda.is_available():
        return None
    return _device(torch.cuda.current_device())


@functools.lru_cache(maxsize=64)
def _device(index: int) -> CudaDevice:
    return CudaDevice(index)


class CudaDevice:
    """`aiodist.devices.base.Device`: one GPU, as torch sees it."""

    kind = "cuda"

    def __init__(self, index: int) -> None:
        self._torch: Any = sys.modules["torch"]
        self._index = index
        self._device = self._torch.device("cuda", index)
        self._context: PrimaryContext | None = None
        self._handles: dict[int, tuple[int, bytes]] = {}
        """By the number of an allocation: its address, and the handle."""

    def _driver(self) -> PrimaryContext:
        if self._context is None:
            self._context = PrimaryContext(self._index)
        return self._context

    # Arrays.

    def describe(self, array: Any) -> tuple[str, tuple[int, ...]]:
        return tensors.dense_name(array), tuple(array.shape)

    def layout(self, array: Any) -> NDArray[Any]:
        return tensors.strided(array, carrier(tensors.dense_name(array)))

    def can_write(self, array: Any) -> bool:
        if array.is_conj() or array.is_neg():
            return False
        return array.is_contiguous() or not overlaps.folds(self.layout(array))

    def flat(self, array: Any) -> Any | None:
        array = array.detach()
        if not array.is_contiguous() or array.is_conj() or array.is_neg():
            return None
        return array.view(-1)

    def empty(self, stream: Any, name: str, shape: Sequence[int]) -> Any:
        torch = self._torch
        # torch's allocator reuses memory as soon as its tensor is gone, in the order of one stream.
        # This array is used on two streams. So it comes from the pool of `stream`, which writes it
        # first, and is given back when the current stream is done with it, too.
        with torch.cuda.stream(stream.stream):
            array = tensors.new(torch, name, tuple(shape), device=self._device)
        array.record_stream(torch.cuda.current_stream(self._device))
        return array

    def host(self, name: str, shape: Sequence[int]) -> Any:
        return tensors.new(self._torch, name, tuple(shape), pin_memory=True)

    def written(self, array: Any) -> None:
        tensors.mark_written(array)

    # Order.

    def current(self) -> CudaStream:
        return CudaStream(self._torch.cuda.current_stream(self._device))

    def stream(self) -> CudaStream:
        return CudaStream(self._torch.cuda.Stream(self._device))

    def event(self) -> CudaEvent:
        return CudaEvent(self._torch.cuda.Event(interprocess=True), self._device)

    def open_event(self, handle: bytes) -> CudaEvent:
        process, number, ipc = msgpack.unpackb(handle)
        if process == _PROCESS:
            return _events[number]
        try:
            event = self._torch.cuda.Event.from_ipc_handle(self._device, ipc)
            return CudaEvent(event, self._device, handle)
        except RuntimeError as error:
            raise OSError(f"cannot open an event of another process: {error}") from error

    # Memory of other processes.

    def locate(self, flat: Any) -> Location:
        if not flat.numel():  # an empty array may have no address
            flat = self._torch.empty(1, dtype=self._torch.uint8, device=self._device)
        pointer = flat.data_ptr()
        driver = self._driver()
        number, base, nbytes = driver.allocation(pointer)
        if number not in self._handles:
            where = [_PROCESS, _host(), base, nbytes, driver.export(base)]
            self._handles[number] = base, msgpack.packb(where)
        return Location(number, self._handles[number][1], pointer - base)

    def holds(self, allocation: int) -> bool:
        base, _ = self._handles.get(allocation, (0, b""))
        held = bool(base) and self._driver().number(base) == allocation
        if not held:
            self._handles.pop(allocation, None)
        return held

    def _whole(self, memory: Mapping) -> Any:
        # Name the device, because torch would copy to the host otherwise. Memory of another GPU
        # also gets this device, because it is mapped for work on this one.
        return self._torch.as_tensor(memory, device=self._device)

    def open(self, handle: bytes) -> Any:
        process, host, base, nbytes, ipc = msgpack.unpackb(handle)
        # In tests several ranks share one process and its addresses. The driver would refuse to map
        # them.
        if process == _PROCESS:
            return self._whole(Mapping(None, base, nbytes))
        if host != _host():
            raise OSError("it is on another host")
        if len(ipc) != HANDLE_BYTES:
            raise OSError("its handle is malformed")
        driver = self._driver()
        return self._whole(Mapping(driver, driver.open(ipc), nbytes))

    def at(
        self, memory: Any, offset: int, name: str, length: int, owner: object | None = None
    ) -> Any:
        dtype = tensors.dtype_of(self._torch, name)
        stop = offset + length * carrier(name).itemsize
        if not 0 <= offset <= stop <= memory.nbytes:
            raise ValueError(f"bytes {offset} to {stop} of an allocation of {memory.nbytes}")
        if owner is not None:
            memory = self._whole(Mapping(None, memory.data_ptr(), memory.nbytes, (memory, owner)))
        return memory[offset:stop].view(dtype)

    # Work.

    def copy(self, stream: Any, into: Any, source: Any) -> None:
        into, source = into.detach(), source.detach()
        if tensors.dtype_name(into.dtype) in NARROW:  # torch cannot copy these
            into, source = into.view(self._torch.uint8), source.view(self._torch.uint8)
        with self._torch.cuda.stream(stream.stream), self._torch.no_grad():
            into.copy_(source, non_blocking=True)

    def reduces(self, op: ReduceOp, name: str) -> bool:
        if name == "bool":
            return op.name in ("BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR")
        if op.name == "PRODUCT" and name in COMPLEX:
            return False  # torch rounds it differently from the host
        return name in _REDUCED and op.name in _OPERATORS

    def reduce(
        self, stream: Any, op: ReduceOp, operands: Sequence[Any], into: Any, size: int
    ) -> None:
        torch = self._torch
        combine = getattr(torch, _OPERATORS[op.name])
        if into.is_complex() and combine is torch.add:
            # The parts are scaled separately, as on the host, because inf * (2+0j) contains a NaN.
            operands = [torch.view_as_real(operand) for operand in operands]
            into = torch.view_as_real(into)
        # torch combines two operands of half precision in float32 and rounds once. For more
        # operands we do that here.
        several = len(operands) > 2 or op.name in ("AVG", "PREMUL_SUM")
        summed = several and combine in (torch.add, torch.mul)
        half = summed and tensors.dtype_name(into.dtype) in _HALF

        def load(operand: Any) -> Any:
            if half:
                operand = operand.to(torch.float32)
            if op.name in ("LAND", "LOR", "LXOR"):
                operand = operand != 0
            return operand * op.factor if op.name == "PREMUL_SUM" else operand

        # `into` may be one of the operands, so it is written after all others are read.
        with torch.cuda.stream(stream.stream), torch.no_grad():
            total = load(operands[0])
            for operand in operands[1:-1]:
                total = combine(total, load(operand))
            if len(operands) > 1:
                last = load(operands[-1])
                if not half and op.name != "AVG" and total.dtype == last.dtype == into.dtype:
                    combine(total, last, out=into)
                    return
                total = combine(total, last)
            if op.name == "AVG":
                # CUDA multiplies by the reciprocal of a number of the host, which rounds otherwise.
                total = total / total.new_full((), size)
            into.copy_(total)


@functools.lru_cache(maxsize=1)
def _host() -> str:
    """Identifies the kernel, because handles are valid under one kernel only."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return f"{socket.gethostname()} {os.uname().release}"
