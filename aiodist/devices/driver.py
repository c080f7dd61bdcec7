"""The part of the CUDA driver that shares allocations between processes, by ctypes.

torch can share, too, but counts references, and a killed reader never gives its reference back.
Here a reader may die at any time. Source: CUDA driver API reference, "Memory Management", "Unified
Addressing" and "Primary Context Management".
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE"""
_LAZY_ENABLE_PEER_ACCESS = 1
_BUFFER_ID = 7
"""CU_POINTER_ATTRIBUTE_BUFFER_ID: unique in the process, even after the allocation was freed."""


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [ctypes.c_uint],
    "cuGetErrorString": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int],
    "cuCtxPushCurrent_v2": [ctypes.c_void_p],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(ctypes.c_void_p)],
    "cuMemGetAddressRange_v2": [
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_uint64,
    ],
    "cuPointerGetAttribute": [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64],
    "cuIpcGetMemHandle": [ctypes.POINTER(_IpcHandle), ctypes.c_uint64],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(ctypes.c_uint64), _IpcHandle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [ctypes.c_uint64],
}


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int
    return library


def _call(name: str, *arguments: Any) -> None:
    library = _library()
    status = getattr(library, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        raise OSError(f"{name}: {(text.value or b'?').decode()} (CUresult {status})")


class PrimaryContext:
    """The primary context of the device with that ordinal, which torch uses.

    All methods raise OSError.
    """

    def __init__(self, ordinal: int) -> None:
        _call("cuInit", 0)
        device = ctypes.c_int()
        _call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._context = ctypes.c_void_p()
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    @contextmanager
    def _current(self) -> Iterator[None]:
        _call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def allocation(self, pointer: int) -> tuple[int, int, int]:
        """The allocation that contains `pointer`: its number, its first address, its bytes."""
        base, nbytes, number = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
        with self._current():
            _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), pointer)
            _call("cuPointerGetAttribute", ctypes.byref(number), _BUFFER_ID, pointer)
        return number.value, base.value, nbytes.value

    def number(self, pointer: int) -> int | None:
        """The number of the allocation that is at `pointer` now; None if there is none."""
        number = ctypes.c_uint64()
        try:
            with self._current():
                _call("cuPointerGetAttribute", ctypes.byref(number), _BUFFER_ID, pointer)
        except OSError:
            return None
        return number.value

    def export(self, base: int) -> bytes:
        """The handle with which other processes open an allocation."""
        handle = _IpcHandle()
        with self._current():
            _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map the allocation of another process, maybe of another device, and return its
        address."""
        pointer = ctypes.c_uint64()
        given = _IpcHandle.from_buffer_copy(handle)
        with self._current():
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), given, _LAZY_ENABLE_PEER_ACCESS)
        return pointer.value

    def close(self, pointer: int) -> None:
        """Unmap an allocation. No queued work may need it."""
        with self._current():
            _call("cuIpcCloseMemHandle", pointer)
