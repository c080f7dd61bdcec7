"""Everything that touches a tensor, for a library that works without torch.

torch is used if the program has imported it. Only `require`, called for tensors that came in a
message, imports it.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import mmap
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers.dtypes import CARRIERS, NARROW, TORCH, carrier
from aiodist.buffers.segment import Memory

HUGE = 4 << 20
"""Bytes from which huge pages are asked for, as numpy does and torch does not. The first writes to
such memory take a quarter of the time."""
_PAGE = 4096
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", 14)

_names: dict[Any, str] = {}
_carriers: dict[Any, np.dtype[Any]] = {}
"""The carriers of the dtypes of torch seen so far."""
_plain_types: list[type] = []


def loaded() -> Any | None:
    """Return the torch module if the program has imported it, as far as tensors."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") else None


def require() -> Any | None:
    """Return the torch module, imported if need be; None if it is not installed."""
    torch = loaded()
    if torch is None:
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            return None
    return torch


def is_tensor(value: object) -> bool:
    torch = loaded()
    return torch is not None and isinstance(value, torch.Tensor)


def plain_type() -> type | None:
    """Return `torch.Tensor` if the program has imported torch."""
    if _plain_types:
        return _plain_types[0]
    if found := getattr(sys.modules.get("torch"), "Tensor", None):
        _plain_types.append(found)
    return found


def is_dtype(value: object) -> bool:
    torch = loaded()
    return torch is not None and isinstance(value, torch.dtype)


def dtype_name(dtype: Any) -> str | None:
    """Return the wire name of a torch dtype; None if it does not travel."""
    name = _names.get(dtype)
    if name is None:
        name = str(dtype).removeprefix("torch.")
        if name not in TORCH:
            return None
        _carriers[dtype] = carrier(name)
        _names[dtype] = name  # last, because other threads look here first
    return name


def memory(tensor: Any) -> tuple[str, NDArray[Any], str | None]:
    """Return (dtype name, carrier array, why not writable) of a tensor.

    The array shares the memory of the tensor, with its shape and strides. A conjugated or negated
    view is copied, and the third item says so. The array keeps the storage alive but does not
    prevent resizing, so it must not be used after that. Raises TypeError for tensors that do not
    travel, and ValueError if the storage was freed.
    """
    if not tensor.is_cpu:
        raise TypeError(f"a tensor on {tensor.device} does not travel: pass x.cpu()")
    name = dense_name(tensor)
    frozen = None
    try:
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg()
            frozen = "is a lazily conjugated or negated view of other memory"
        return name, strided(tensor, carrier(name)), frozen
    except (RuntimeError, TypeError) as error:  # wrappers without plain memory
        raise _unreadable(tensor, error) from error


def dense_name(tensor: Any) -> str:
    """Return the dtype name of a tensor. Raises TypeError for tensors that do not travel."""
    torch = sys.modules["torch"]
    name = dtype_name(tensor.dtype)
    if name is None or tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise TypeError(
            f"a tensor of dtype {tensor.dtype} and layout {layout} does not travel: "
            "pass a dense, unquantised tensor"
        )
    # Such classes (DTensor, fake and functional tensors) pretend to be dense. At `data_ptr()` they
    # have a part of their elements, or nothing.
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise _unreadable(tensor, "its class computes in a way of its own")
    return name


def _unreadable(tensor: Any, why: object) -> TypeError:
    return TypeError(f"the memory of this {type(tensor).__name__} cannot be read: {why}")


def strided(tensor: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the memory of a tensor with its shape and strides. Raises as `_memory_of`."""
    shape, strides, size = tensor.shape, None, dtype.itemsize
    elements = tensor.numel()
    if not tensor.is_contiguous():
        steps = tensor.stride()
        strides = [step * size for step in steps]
        # It has elements, because otherwise it would be contiguous.
        elements = 1 + sum([(n - 1) * step for n, step in zip(shape, steps, strict=True)])
    return np.ndarray(shape, dtype, _memory_of(tensor, elements * size), 0, strides)


def plain(tensor: Any) -> NDArray[Any] | None:
    """Return the memory of a plain tensor as a flat carrier array; None if it is unusual."""
    dtype = _carriers.get(tensor.dtype)
    if dtype is None:
        if dtype_name(tensor.dtype) is None:
            return None
        dtype = _carriers[tensor.dtype]
    return None if tensor.is_nested else flat(tensor, dtype, tensor.numel())


def flat(tensor: Any, dtype: np.dtype[Any], length: int) -> NDArray[Any] | None:
    """Return the flat memory of a tensor of `length` elements with carrier `dtype`.

    Returns None if it is not contiguous, is a lazy view, or has no memory of its own here.
    """
    try:
        if not tensor.is_contiguous() or not tensor.is_cpu or tensor.is_neg() or tensor.is_conj():
            return None
        return np.ndarray(length, dtype, _memory_of(tensor, length * dtype.itemsize))
    except (RuntimeError, TypeError, ValueError):
        return None


def _memory_of(tensor: Any, nbytes: int) -> Any:
    """Return the memory of a tensor whose elements span `nbytes`, and the rest of its storage.

    Raises ValueError if its storage was freed or made too small, and what torch raises if it has
    none.
    """
    # A tensor is a window on a storage, which other tensors may share::
    #
    #     storage   [ start ................................... start + held )
    #     tensor               [ address ...... address + nbytes )
    #
    # numpy gets only the address, so nothing but this check protects us from memory that belongs to
    # something else by now. Storages do shrink: sharded training (FSDP) frees the parameters of a
    # layer by `storage.resize_(0)` after each use, while their tensors live on. They grow again
    # before the next use, maybe at another address.
    #
    # An array keeps the storage object alive, and not its memory. So arrays are made anew for each
    # operation, and none is kept beyond its end. `tensor.numpy()` would forbid resizing that
    # storage for good.
    storage = tensor.untyped_storage()
    start, held, address = storage.data_ptr(), storage.nbytes(), tensor.data_ptr()
    if nbytes and (not start or address + nbytes > start + held):
        raise ValueError(
            f"the storage of this {type(tensor).__name__} has {held} bytes, fewer than its "
            "elements take: it was freed, or made smaller"
        )
    found = Memory.from_address(address)
    found.owner = storage
    return found


def dtype_of(torch: Any, name: str) -> Any:
    """Return the dtype of that wire name. Raises TypeError if this torch does not know it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch {torch.__version__} has no dtype {name!r}: a newer one is needed")
    return dtype


def new(torch: Any, name: str, shape: Sequence[int], **where: Any) -> Any:
    """Make an uninitialised tensor, as ``torch.empty`` does. Raises as `dtype_of`, and
    MemoryError."""
    dtype = dtype_of(torch, name)
    try:
        if name not in CARRIERS:
            return torch.empty(shape, dtype=dtype, **where)
        # torch.empty warns for some of them
        return torch.empty(shape, dtype=getattr(torch, carrier(name).name), **where).view(dtype)
    except RuntimeError as error:
        # torch has a class for that only if it is memory of a GPU.
        if "allocate" in str(error) or "out of memory" in str(error):
            raise MemoryError(str(error)) from error
        raise


def empty(torch: Any, name: str, shape: Sequence[int]) -> Any:
    """Make an uninitialised CPU tensor. Raises as `new`."""
    made = new(torch, name, shape)
    nbytes = math.prod(shape) * carrier(name).itemsize
    if nbytes >= HUGE:
        _ask_for_huge_pages(made.data_ptr(), nbytes)
    return made


def _ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Ask for huge pages in new memory. Systems without them ignore that."""
    # At the first write to a page the kernel finds and clears one. With pages of 4 KiB, a receive
    # into new memory spends much of its time on that. The result does not matter, because this is
    # advice.
    advise = _advise()
    if advise is not None:
        start = -(-address // _PAGE) * _PAGE
        advise(start, address + nbytes - start, _HUGE_PAGES)


@cache
def _advise() -> Callable[[int, int, int], int] | None:
    """Return ``madvise`` of the C library, or None."""
    if sys.platform != "linux":
        return None
    advise: Any = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return cast("Callable[[int, int, int], int]", advise)


def wrap(array: NDArray[Any], name: str) -> Any:
    """Make a tensor of dtype `name` over the memory of a carrier array."""
    torch = sys.modules["torch"]
    tensor = torch.from_numpy(array)
    return tensor.view(getattr(torch, name)) if name in CARRIERS else tensor


def seen(flat: NDArray[Any], name: str, shape: tuple[int, ...]) -> Any | None:
    """Return a tensor of dtype `name` over the memory of `flat`. Do not write to this tensor.

    None if torch is not installed, does not know the dtype, or cannot copy it.
    """
    torch = require()
    if torch is None or name in NARROW or not hasattr(torch, name):
        return None
    # torch warns of arrays that are read-only.
    memory = Memory.from_address(flat.__array_interface__["data"][0])
    memory.owner = flat
    return wrap(np.ndarray(shape, flat.dtype, memory), name)


def mark_written(tensor: Any) -> None:
    """Tell autograd that the memory was written without its knowledge."""
    # autograd saves tensors for the backward pass by reference. By the version counter it notices
    # that the memory has changed, and raises, instead of giving a wrong gradient. numpy and sockets
    # write without counting.
    if not tensor.is_inference():  # inference tensors have no version counter
        _increment_version()((tensor,))


@cache
def _increment_version() -> Callable[[tuple[Any, ...]], None]:
    torch = sys.modules["torch"]
    # The public function takes a third of the time of a small call, and only calls the other one.
    increment = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)
    return cast("Callable[[tuple[Any, ...]], None]", increment)
