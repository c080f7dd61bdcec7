"""Memory of another process of this host, read by the system, without staging or waiting.

Linux lets a process read the memory of another one of its user, unless something forbids that: Yama
(`ptrace_scope`), a container's seccomp profile, or differing privileges. The process to be read
tells its address, and shows a proof that it is the right process: bytes at an address that no other
process has. (Process ids differ in other namespaces, and are reused.) So a process can only name
its own memory.

The proof also covers the offer, because it is changed before the memory is used for something else.
If it is unchanged after reading, the data that was read is right, without asking. This needs a
processor that shows stores in their order (x86-64).
"""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import secrets
import sys
from collections.abc import Sequence
from typing import Any, Final

from aiodist.transports.futex import address_of

_SECRET: Final = 8
PROOF: Final = _SECRET + 8
"""Bytes of a proof: a part for the process, and the number of the offer (0: none)."""

_numbers: Final = itertools.count(1)
_proofs: Final[list[MemoryProof]] = []
"""All proofs so far: their addresses always hold a proof."""
_free: Final[list[MemoryProof]] = []
_secret: Final = bytearray(secrets.token_bytes(_SECRET))


class MemoryProof:
    """Proves that this process offers its memory, and that the offer holds."""

    __slots__ = ("_memory", "address")

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(_secret + bytes(PROOF - _SECRET)))
        self.address = address_of(self._memory)
        _proofs.append(self)

    def prove(self) -> None:
        """Begin a new offer."""
        self._memory[_SECRET:] = next(_numbers).to_bytes(PROOF - _SECRET, "little")

    def shown(self) -> bytes:
        """Return the bytes of the proof."""
        return self._memory.tobytes()

    def prove_anew(self) -> None:
        """Show the secret of this process, because it is a fork."""
        self._memory[:_SECRET] = _secret

    def withdraw(self) -> None:
        """End the offer, because the memory will be used for something else."""
        self._memory[_SECRET:] = bytes(PROOF - _SECRET)
        _free.append(self)


def _prove_anew() -> None:
    _secret[:] = secrets.token_bytes(_SECRET)
    for proof in _proofs:
        proof.prove_anew()


class _Span(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("start", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_read: Any = None
if sys.platform == "linux" and platform.machine() == "x86_64":
    _read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    # because the copy in the child is another process
    os.register_at_fork(after_in_child=_prove_anew)
if _read is not None:
    _spans = (ctypes.POINTER(_Span), ctypes.c_ulong)
    _read.argtypes = (ctypes.c_int, *_spans, *_spans, ctypes.c_ulong)
    _read.restype = ctypes.c_ssize_t


def offer() -> MemoryProof | None:
    """Return the proof of a new offer, which holds until it is withdrawn; None: reading is
    impossible."""
    if _read is None:
        return None
    proof = _free.pop() if _free else MemoryProof()
    proof.prove()
    return proof


def read(pid: int, address: int, into: memoryview) -> None:
    """Read memory of process `pid`, from `address` on, until `into` is full.

    Raises OSError. The content of `into` is undefined then.
    """
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


def holds(pid: int, proof: Sequence[Any]) -> bool:
    """Tell whether the offer of process `pid` with this proof holds, so that what was read is
    right.

    Raises OSError if that is not the process that has made the offer.
    """
    address, expected = proof
    found = bytearray(PROOF)
    read(pid, address, memoryview(found))
    if found[:_SECRET] != expected[:_SECRET]:
        raise OSError(f"process {pid} is not the one that offers its memory")
    return bool(found == expected)
