"""Reads files: what there is in a folder, whether each file is whole, and its tensors, which are
memory maps."""

from __future__ import annotations

import json
import mmap
import os
import signal
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from aiodist.channels.checks import crc32
from aiodist_cli.files import checkpoints
from aiodist_cli.files.checkpoints import INDEXES, TENSORS, IncompleteError, Listing, State
from aiodist_cli.files.names import RefusedError
from aiodist_cli.files.tree import Flat, Source

if sys.platform != "win32":
    import fcntl

PIECE = 8 << 20
"""Bytes that are read at once, so that a signal is heard in between."""

DTYPES = {
    "F16": "<f2", "F32": "<f4", "F64": "<f8", "BOOL": "?",
    "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
    "U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8",
}  # fmt: skip
"""The dtypes of safetensors that numpy knows. Tensors of others, such as BF16, travel as unsigned
integers of the same size, because only their bytes matter."""

Read = Callable[[int], None]
"""Told how many more bytes were read."""


def listing(source: Path) -> dict[str, State]:
    """What there is in a folder, without hidden files; or the one file that `source` is. Raises
    OSError."""
    found: dict[str, State] = {}
    if source.is_dir():
        _list(source, "", found)
    else:
        found[source.name] = _state(source.lstat())
    return found


def _list(folder: Path, before: str, found: dict[str, State]) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            name = f"{before}{entry.name}"
            # A trainer may remove any of it meanwhile.
            with suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    _list(Path(entry.path), f"{name}/", found)
                else:
                    found[name] = _state(entry.stat(follow_symlinks=False))


def _state(found: os.stat_result) -> State:
    return State(found.st_size, found.st_mtime_ns, found.st_ino, stat.S_ISREG(found.st_mode))


def sources(folder: Path, files: Listing, chosen: list[str]) -> list[Source]:
    """The files that were `chosen` of `files`, mapped to memory.

    Raises IncompleteError if a shard is missing, if a safetensors file is not as long as it should
    be, or if a file is not as it was listed. Raises RefusedError for a shard outside the folder,
    and OSError.
    """
    indexes = {name: (folder / name).read_bytes() for name in chosen if name.endswith(INDEXES)}
    checkpoints.check_complete(files, indexes)
    return [_source(folder / name, name, files[name]) for name in chosen]


def _source(path: Path, name: str, listed: State) -> Source:
    data = _mapped(path, name, listed)
    if not name.endswith(TENSORS):
        return Source(name, data, {})
    _check(path, name)
    front = 8 + int.from_bytes(data[:8].tobytes(), "little")
    return Source(name, data[:front], _tensors(data, front))


def _mapped(path: Path, name: str, listed: State) -> Flat:
    """The bytes of a file."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if _state(os.fstat(fd)) != listed:
            raise IncompleteError(f"{name} changed while it was looked at")
        if not listed.size:
            return np.zeros(0, np.uint8)
        _lease(fd)  # the map has a copy of the descriptor, so the lease ends with the map
        return np.frombuffer(mmap.mmap(fd, listed.size, access=mmap.ACCESS_READ), np.uint8)
    finally:
        os.close(fd)


def _lease(fd: int) -> None:
    """Have programs that open the file for writing wait until it is closed here: fcntl(2), leases.

    A program that cuts a file off while it is mapped would end this process by SIGBUS. Leases exist
    on Linux only, for files of one's own and on most file systems; elsewhere this does nothing. The
    system gives a lease up after 45 s (/proc/sys/fs/lease-break-time).
    """
    if sys.platform == "linux":
        with suppress(OSError):
            # The signal that a writer waits is SIGIO by default, which would end this process.
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)


def _check(path: Path, name: str) -> None:
    """Raises IncompleteError for a file that is not a whole one of safetensors."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise RefusedError(
            f"{name} needs the library safetensors: pip install 'aiodist[weights]'"
        ) from error
    try:
        # It checks the header, and that the tensors fill the rest of the file.
        with safe_open(path, "numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise IncompleteError(f"{name} is no whole safetensors file: {error}") from None


def _tensors(data: Flat, front: int) -> dict[str, Any]:
    """The tensors of a safetensors file in the order of their bytes."""
    header = json.loads(data[8:front].tobytes())
    header.pop("__metadata__", None)
    found: dict[str, Any] = {}
    for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = about["data_offsets"]
        lying = data[front + start : front + stop]
        found[name] = _shaped(lying, about["dtype"], tuple(about["shape"]))
    return found


def _shaped(lying: Flat, dtype: str, shape: tuple[int, ...]) -> Any:
    """The bytes as an array of elements of the size that they have in the file, because differences
    between versions are sought by elements."""
    count = int(np.prod(shape, dtype=object))
    size = len(lying) // count if count else 0
    known = DTYPES.get(dtype) or {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}.get(size)
    if not count or known is None or count * np.dtype(known).itemsize != len(lying):
        return lying
    return lying.view(known).reshape(shape)


def checked(sources: list[Source], read: Read) -> dict[str, int]:
    """Read all of it: the CRC-32 of each file, by name. May run in a thread; it ends with what
    `read` raises."""
    return {source.name: crc_of(source.pieces, read) for source in sources}


def crc_of(pieces: list[Any], read: Read) -> int:
    """The CRC-32 of these arrays, one behind the other."""
    check = 0
    for array in pieces:
        flat = array.reshape(-1).view(np.uint8)
        for at in range(0, len(flat), PIECE):
            check = crc32(flat[at : at + PIECE], check)
            read(len(flat[at : at + PIECE]))
    return check
