"""Memory of another process of this host, read by the system: nothing is staged, and nobody waits.

Linux lets a process read the memory of another one of its user, where that is not forbidden: by
Yama (`ptrace_scope`), by a container's seccomp profile, or as the other one's privileges differ.
Whoever is to be read says where its memory is, and shows a proof that it is the process which it is
taken for: bytes that nobody else has at that address. (Process ids are different in other
namespaces, and are used again.) So it is only its own memory that a process can name.

The proof is one of the offer, too: it is changed before the memory is used for something else.
Whoever finds it unchanged after reading knows that what was read is right, and need not ask. That
takes a processor that shows stores in their order (x86-64).
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
"""Bytes of a proof: those that are of the process, and the number of an offer; 0: there is none."""

_numbers: Final = itertools.count(1)
_proofs: Final[list[Proof]] = []
"""All there have ever been: what lies at their addresses is always a proof."""
_free: Final[list[Proof]] = []
_secret: Final = bytearray(secrets.token_bytes(_SECRET))


class Proof:
    """That this is the process which offers its memory, and that the offer holds. `address`: where
    it lies."""

    __slots__ = ("_memory", "address")

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(_secret + bytes(PROOF - _SECRET)))
        self.address = address_of(self._memory)
        _proofs.append(self)

    def prove(self) -> None:
        """There is a new offer."""
        self._memory[_SECRET:] = next(_numbers).to_bytes(PROOF - _SECRET, "little")

    def shown(self) -> bytes:
        """What lies there now."""
        return self._memory.tobytes()

    def prove_anew(self) -> None:
        """This is another process now."""
        self._memory[:_SECRET] = _secret

    def withdraw(self) -> None:
        """The memory is used for something else from now on."""
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
    os.register_at_fork(after_in_child=_prove_anew)  # the copy in the child is another process
if _read is not None:
    _spans = (ctypes.POINTER(_Span), ctypes.c_ulong)
    _read.argtypes = (ctypes.c_int, *_spans, *_spans, ctypes.c_ulong)
    _read.restype = ctypes.c_ssize_t


def offer() -> Proof | None:
    """The proof of an offer, which holds until it is withdrawn; None: nobody can read this."""
    if _read is None:
        return None
    proof = _free.pop() if _free else Proof()
    proof.prove()
    return proof


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


def holds(pid: int, proof: Sequence[Any]) -> bool:
    """Whether what process `pid` has offered with this proof was not withdrawn: then what was read
    until now is right. Raises OSError where it is not the process that has offered this."""
    address, expected = proof
    found = bytearray(PROOF)
    read(pid, address, memoryview(found))
    if found[:_SECRET] != expected[:_SECRET]:
        raise OSError(f"process {pid} is not the one that offers its memory")
    return bool(found == expected)
