"""torch, seen from a library that does without: everything that touches a tensor is here.

torch is used if the program has imported it. Only `require`, called for tensors that came in a
message, imports it.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers.dtypes import CARRIERS, TORCH, carrier

HUGE = 4 << 20
"""Bytes from which memory comes from numpy: it asks for huge pages then, which torch does not, and
the first writes to it take a quarter of the time."""

_WRITABLE = 0x200
"""``PyBUF_WRITE``."""
_view_of: Callable[[int, int, int], memoryview] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))

_names: dict[Any, str] = {}
_plain_types: list[type] = []


def loaded() -> Any | None:
    """The torch module, if the program imported it (and that import got as far as tensors)."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") else None


def require() -> Any | None:
    """The torch module, imported if need be; None where it is not installed."""
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
    """`torch.Tensor`, if the program has imported torch."""
    if _plain_types:
        return _plain_types[0]
    if found := getattr(sys.modules.get("torch"), "Tensor", None):
        _plain_types.append(found)
    return found


def is_dtype(value: object) -> bool:
    torch = loaded()
    return torch is not None and isinstance(value, torch.dtype)


def dtype_name(dtype: Any) -> str | None:
    """The wire name of a torch dtype; None for one that does not travel."""
    name = _names.get(dtype)
    if name is None:
        name = str(dtype).removeprefix("torch.")
        if name not in TORCH:
            return None
        _names[dtype] = name
    return name


def memory(tensor: Any) -> tuple[str, NDArray[Any], str | None]:
    """(dtype name, carrier array, why not writable) of a tensor.

    The array shares the memory of the tensor, with its shape and strides, except for a conjugated
    or negated view: then it is a copy, and the third item says so. Raises TypeError for tensors
    that do not travel.
    """
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise TypeError(f"a tensor on {tensor.device} does not travel: pass x.cpu()")
    name = dtype_name(tensor.dtype)
    if name is None or tensor.layout is not torch.strided:
        raise TypeError(
            f"a tensor of dtype {tensor.dtype} and layout {tensor.layout} does not travel: "
            "pass a dense, unquantised tensor"
        )
    frozen = None
    try:
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
            frozen = "is a lazily conjugated or negated view of other memory"
        if name in CARRIERS:
            tensor = tensor.view(getattr(torch, carrier(name).name))
        return name, tensor.numpy(), frozen
    except (RuntimeError, TypeError, ValueError) as error:  # subclasses without plain memory
        raise TypeError(
            f"the memory of this {type(tensor).__name__} cannot be read: {error}"
        ) from error


def window(tensor: Any, nbytes: int) -> memoryview | None:
    """The memory of a plain tensor of `nbytes` bytes (more than 0), as bytes to be written at once:
    the tensor has to outlive it. None for a tensor that is not contiguous, needs gradients, or has
    no memory of its own here. Takes half as long as ``tensor.numpy()``."""
    try:
        if (
            not tensor.is_contiguous()
            or tensor.requires_grad
            or not tensor.is_cpu
            or tensor.is_neg()
            or tensor.is_conj()
        ):
            return None
        return _view_of(tensor.data_ptr(), nbytes, _WRITABLE)
    except RuntimeError:  # no storage, or not one of its own
        return None


def empty(torch: Any, name: str, shape: Sequence[int]) -> Any:
    """An uninitialised CPU tensor. Raises TypeError where this torch does not know the dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch {torch.__version__} has no dtype {name!r}: a newer one is needed")
    if math.prod(shape) * carrier(name).itemsize >= HUGE:
        return wrap(np.empty(shape, carrier(name)), name)
    if name in CARRIERS:  # torch.empty warns for some of them
        return torch.empty(shape, dtype=getattr(torch, carrier(name).name)).view(dtype)
    return torch.empty(shape, dtype=dtype)


def wrap(array: NDArray[Any], name: str) -> Any:
    """A tensor of dtype `name` over the memory of a carrier array."""
    torch = sys.modules["torch"]
    tensor = torch.from_numpy(array)
    return tensor.view(getattr(torch, name)) if name in CARRIERS else tensor


def mark_written(tensor: Any) -> None:
    """Tell autograd that the memory was written behind its back."""
    if not tensor.is_inference():  # these have no version counter
        _increment_version()(tensor)


@cache
def _increment_version() -> Callable[[Any], None]:
    increment: Callable[[Any], None] = sys.modules["torch"].autograd.graph.increment_version
    return increment
