"""Memory of another process of this host, read by the system: nothing is staged, and nobody waits.

Linux lets a process read the memory of another one of its user, where that is not forbidden: by
Yama (`ptrace_scope`), by a container's seccomp profile, or as the other one's privileges differ.
Whoever is to be read says where its memory is, and shows a proof that it is the process which it is
taken for: bytes that nobody else has at that address. (Process ids are different in other
namespaces, and are used again.) So it is only its own memory that a process can name.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

PROOF: Final = 16
"""Bytes of a proof."""

_proof: Final = np.frombuffer(bytearray(secrets.token_bytes(PROOF)), np.uint8)


def _prove_anew() -> None:
    _proof[:] = np.frombuffer(secrets.token_bytes(PROOF), np.uint8)


class _Span(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("start", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_read: Any = None
if sys.platform == "linux":
    _read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    os.register_at_fork(after_in_child=_prove_anew)  # the copy in the child is another process
if _read is not None:
    _spans = (ctypes.POINTER(_Span), ctypes.c_ulong)
    _read.argtypes = (ctypes.c_int, *_spans, *_spans, ctypes.c_ulong)
    _read.restype = ctypes.c_ssize_t


def address_of(view: memoryview) -> int:
    """Where contiguous memory begins."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def offered() -> tuple[int, bytes] | None:
    """The proof that is read here: its address, and what is there; None: nobody can read this."""
    return None if _read is None else (address_of(_proof.data), _proof.tobytes())


def read(pid: int, address: int, into: memoryview) -> None:
    """Read memory of process `pid`, from `address` on, as much as there is room for in `into`.
    Raises OSError: of what is in `into` by then, nothing is known."""
    if _read is None:
        raise OSError("this system does not read the memory of other processes")
    start, left = address_of(into), into.nbytes
    while left:
        here, there = _Span(start, left), _Span(address, left)
        count = _read(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            error = ctypes.get_errno()
            raise OSError(error, f"memory of process {pid} was not read: {os.strerror(error)}")
        start, address, left = start + count, address + count, left - count


def check(pid: int, proof: Sequence[Any]) -> None:
    """Raise OSError where `pid` is not the process that has offered this proof."""
    address, expected = proof
    found = bytearray(PROOF)
    read(pid, address, memoryview(found))
    if found != expected:
        raise OSError(f"process {pid} is not the one that offers its memory")
