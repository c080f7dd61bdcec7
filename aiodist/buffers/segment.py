"""Memory that one process of a host owns and writes, and the others map to read.

A segment is an anonymous memfd: it has no name that could be left behind, and is gone with the
last process that maps it. Its owner seals it against resizing (a reader of memory that shrinks
would die of SIGBUS) and against writing through any other mapping, then passes the descriptor on
(`aiodist.transports.handover`, or a connection of its own). What all are to write is sealed against
resizing alone (`all_write`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
from typing import Any, Final, Self

import numpy as np

from aiodist.errors import ProtocolError

if sys.platform == "linux":
    import fcntl

    _libc: Final = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _ints = (ctypes.c_int, ctypes.c_int, ctypes.c_int)
    _libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *_ints, ctypes.c_int64)
    _libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

_FAILED: Final = ctypes.c_void_p(-1).value
Memory: Any = type("Memory", (ctypes.c_ubyte * sys.maxsize,), {"__slots__": ("owner",)})
"""Memory from an address on; the arrays that are made of it know where it ends. What `owner` is set
to lives as long as they do."""


class _Mapping:
    """Mapped memory, until nobody refers to it any more."""

    __slots__ = ("_address", "_nbytes", "_unmap")

    def __init__(self, address: int, nbytes: int) -> None:
        self._address = address
        self._nbytes = nbytes
        self._unmap = _libc.munmap  # this module may be gone when the last view is

    def __del__(self) -> None:
        self._unmap(self._address, self._nbytes)


def _map(fd: int, nbytes: int, *, writes: bool) -> memoryview:
    """Map the first `nbytes` bytes of a file, for as long as there are views of them. Raises
    OSError.

    Not by `mmap.mmap`, which keeps a duplicate of the file open meanwhile (up to Python 3.12): a
    rank on a host of 64 would come to 64 files for each group.
    """
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
    address = _libc.mmap(None, nbytes, access, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = Memory.from_address(address)
    memory.owner = _Mapping(address, nbytes)
    view = np.frombuffer(memory, np.uint8, nbytes).data
    return view if writes else view.toreadonly()


_SEAL_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE (Linux 5.1): only mappings that exist already may write."""


class Segment:
    """A mapping of `nbytes` bytes: `create` one of your own, or `attach` that of a peer.

    `fd` is the descriptor of an owned segment, to be passed to peers, -1 for a closed one, and for
    an attached one that does not `keep` it: memory that is mapped needs none.
    """

    __slots__ = ("_memory", "fd", "nbytes")

    def __init__(self, memory: memoryview, fd: int) -> None:
        self.fd = fd
        self.nbytes = len(memory)
        self._memory: memoryview | None = memory

    @classmethod
    def create(cls, nbytes: int, name: str = "aiodist", *, all_write: bool = False) -> Self:
        """New memory, all zero, that this process alone writes (`all_write`: or any that has it).
        `name` is what /proc/self/maps shows.

        Raises ValueError for `nbytes` < 1, and OSError where the system gives no such memory."""
        if nbytes < 1:
            raise ValueError(f"a segment has at least 1 byte, not {nbytes}")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Mapped before it is sealed: the seal on future writes leaves this one mapping. Who can
            # do what from then on, until the memory is gone:
            #
            #                      this mapping   another of ours   one of a peer
            #     read             yes            yes               yes
            #     write            yes            no                no (`all_write`: yes)
            #     shrink, grow     no             no                no
            #     seal, unseal     no             no                no
            #
            # Ranks of one host trust each other no further than that: a rank that is broken, or
            # hostile, can write nonsense into its own memory, and its readers check what they read.
            # But it can neither change what others have written nor have a reader die of SIGBUS.
            os.ftruncate(fd, nbytes)
            memory = _map(fd, nbytes, writes=True)
            sizes = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            try:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sizes | (0 if all_write else _SEAL_FUTURE_WRITE))
            except OSError:  # an older kernel: a peer could write here, but not resize
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sizes)
            return cls(memory, fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int, *, writes: bool = False, keep: bool = False) -> Self:
        """Map a peer's segment of `nbytes` bytes to read it, or to write as well. Takes `fd` over:
        it is closed here whatever happens, unless all goes well and it is to be kept.

        Raises ProtocolError for what is no sealed memory of that size, OSError where it cannot be
        mapped."""
        try:
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError as error:
                raise ProtocolError(
                    f"a peer passed on what is no memory to share ({error}): expected a memfd"
                ) from None
            if not seals & fcntl.F_SEAL_SHRINK:
                raise ProtocolError(
                    "a peer passed on a segment that it could shrink, which would kill its readers"
                    " (SIGBUS): expected one sealed by F_SEAL_SHRINK"
                )
            # The size last: from here on it cannot change, for the seal is there, and cannot be
            # taken off. Looked at before that, it could be that of a file which shrinks until it is
            # sealed.
            size = os.fstat(fd).st_size
            if size != nbytes or nbytes < 1:
                raise ProtocolError(
                    f"a peer passed on a segment of {size} bytes: expected {nbytes}"
                )
            memory = _map(fd, nbytes, writes=writes)
            fd, kept = -1 if keep else fd, fd if keep else -1
            return cls(memory, kept)
        finally:
            if fd != -1:
                os.close(fd)

    @property
    def memory(self) -> memoryview:
        """All of it, as bytes: writable for the owner, read-only where attached. Raises ValueError
        once closed."""
        if self._memory is None:
            raise ValueError("this segment is closed")
        return self._memory

    def for_readers(self) -> Self:
        """The same memory of your own, with a file of its own to be passed on: then `is_read` tells
        whether anybody has it. Raises OSError where the system does not open a file once more."""
        # A lock belongs to an open file, which lasts as long as any descriptor of it, also one that
        # is under way to another process, and any mapping made by it, also that of a child that was
        # forked: the kernel lets go of the lock when the last of these is gone, however it went.
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return type(self)(self.memory, fd)
        except BaseException:
            os.close(fd)
            raise

    @property
    def is_read(self) -> bool:
        """Whether anybody has a file that `for_readers` gave, or maps memory by it."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Let go of it. The memory itself lasts until the last view of it is gone, those that
        users hold included. Idempotent."""
        # Not mmap.close(), which fails while there are views.
        self._memory = None
        fd, self.fd = self.fd, -1
        if fd != -1:
            os.close(fd)


def unsupported_reason() -> str | None:
    """Why segments cannot be used here, for people to read; None where they can.

    Peers tell each other what they wrote by flags in this memory, without a system call: data
    first, then the flag. A processor with total store order (x86-64) shows both to a reader in
    that order. Others (aarch64) may show the flag first, and Python has no instruction to stop
    them, so there shared memory is not used at all.
    """
    if sys.platform != "linux":
        return f"this is {sys.platform}, not Linux"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the processor is {platform.machine()}, and only x86_64 keeps the order of stores"
    if not hasattr(os, "memfd_create"):
        return "this Python was built without memfd_create"
    try:
        Segment.create(1).close()
    except OSError as error:
        return f"the system gives no sealed memory (memfd_create: {error})"
    return None
