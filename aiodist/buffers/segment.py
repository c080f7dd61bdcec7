"""Memory that one process of a host owns and writes, and the others map to read.

A segment is an anonymous memfd. It has no name that could be left behind, and is gone with the last
process that maps it. Its owner seals it against resizing, because memory that shrinks kills its
readers (SIGBUS), and against writes through any other mapping. Then it passes the descriptor on
(`aiodist.transports.handover`, or a connection of its own). Memory that all ranks write is sealed
only against resizing (`all_write`).
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
"""Memory from an address on. Arrays made of it know its end. `owner` lives as long as they do."""


class _Mapping:
    """Mapped memory, until nothing refers to it any more."""

    __slots__ = ("_address", "_nbytes", "_unmap")

    def __init__(self, address: int, nbytes: int) -> None:
        self._address = address
        self._nbytes = nbytes
        self._unmap = _libc.munmap  # kept, because this module may be gone when the last view goes

    def __del__(self) -> None:
        self._unmap(self._address, self._nbytes)


def _map(fd: int, nbytes: int, *, writes: bool) -> memoryview:
    """Map the first `nbytes` bytes of a file, for as long as there are views of them. Raises
    OSError.

    `mmap.mmap` would keep a duplicate of the file open meanwhile (up to Python 3.12). On a host of
    64 ranks that would be 64 files for each group.
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
    """A mapping of `nbytes` bytes: `create` your own, or `attach` a peer's.

    `fd` is the descriptor of an owned segment, to pass to peers. It is -1 if the segment is closed,
    or attached without `keep`, because mapped memory needs no descriptor.
    """

    __slots__ = ("_memory", "fd", "nbytes")

    def __init__(self, memory: memoryview, fd: int) -> None:
        self.fd = fd
        self.nbytes = len(memory)
        self._memory: memoryview | None = memory

    @classmethod
    def create(cls, nbytes: int, name: str = "aiodist", *, all_write: bool = False) -> Self:
        """Make new memory, all zero, that only this process writes (`all_write`: any that has it).

        /proc/self/maps shows `name`. Raises ValueError for `nbytes` < 1, and OSError if the system
        gives no such memory.
        """
        if nbytes < 1:
            raise ValueError(f"a segment has at least 1 byte, not {nbytes}")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Mapped before it is sealed, so that the seal on future writes spares this mapping.
            # From then on::
            #
            #                          this mapping   another of ours   one of a peer
            #         read             yes            yes               yes
            #         write            yes            no                no (`all_write`: yes)
            #         shrink, grow     no             no                no
            #         seal, unseal     no             no                no
            #
            # Ranks of one host trust each other only so far. A broken or hostile rank can write
            # nonsense into its own memory, so readers check what they read. But it cannot change
            # what others have written, and cannot kill a reader by SIGBUS.
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
        """Map a peer's segment of `nbytes` bytes to read it, or to write as well.

        Takes over `fd`, which is closed unless this succeeds with `keep`. Raises ProtocolError
        unless it is sealed memory of that size, and OSError if it cannot be mapped.
        """
        try:
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError as error:
                raise ProtocolError(
                    f"a peer passed on a descriptor of no memory ({error}): expected a memfd"
                ) from None
            if not seals & fcntl.F_SEAL_SHRINK:
                raise ProtocolError(
                    "a peer passed on a segment that it could shrink, which would kill its readers"
                    " (SIGBUS): expected one sealed by F_SEAL_SHRINK"
                )
            # The size last, because the seal now fixes it. Before that, it could be the size of a
            # file that shrinks until it is sealed.
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
        """All of it, as bytes: writable for the owner, read-only if attached. Raises ValueError
        once closed."""
        if self._memory is None:
            raise ValueError("this segment is closed")
        return self._memory

    def for_readers(self) -> Self:
        """Return the same memory with a file of its own to pass on, so that `is_read` can tell of
        readers.

        Raises OSError if the system cannot open the file once more.
        """
        # A lock belongs to an open file. That lasts as long as any descriptor of it, even one under
        # way to another process, and any mapping made by it, even that of a forked child. The
        # kernel releases the lock with the last of these, however it ends.
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return type(self)(self.memory, fd)
        except BaseException:
            os.close(fd)
            raise

    @property
    def is_read(self) -> bool:
        """Whether some process has a file that `for_readers` gave, or maps memory by it."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Release it. Idempotent.

        The memory lasts until its last view is gone, including views that users hold.
        """
        # Not mmap.close(), because it fails while there are views.
        self._memory = None
        fd, self.fd = self.fd, -1
        if fd != -1:
            os.close(fd)


def unsupported_reason() -> str | None:
    """Return why segments cannot be used here, for people; None if they can.

    Peers tell each other what they wrote by flags in this memory, without a system call: data
    first, then the flag. A processor with total store order (x86-64) shows both to a reader in that
    order. Others (aarch64) may show the flag first, and Python has no instruction to prevent that.
    So shared memory is not used there.
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
