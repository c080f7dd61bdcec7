"""A folder that has one version of files, and is replaced as a whole or not at all. Linux only.

The next version is written beside the folder, to disk, and then exchanged with it in one step
(renameat2 with RENAME_EXCHANGE). So a program that opens the folder finds all files of one version,
and a crash at any moment leaves one of both. The folder remembers which version it has in a hidden
file, with the size and the CRC-32 of each file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aiodist.channels.checks import crc32
from aiodist_cli.files import names
from aiodist_cli.files.names import RefusedError
from aiodist_cli.files.reading import PIECE, Read
from aiodist_cli.files.tree import Source, Version, id_of

if sys.platform != "win32":
    import fcntl

META = ".aiodist.json"
"""The hidden file that says what is in the folder."""

LONGEST_META = 16 << 20
"""Most bytes of that file."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class FolderError(Exception):
    """The folder cannot be used. The text says why, and what to do."""


class Held(NamedTuple):
    """What is in the folder: the number of the version, and its id."""

    number: int
    id: str


class Folder:
    """``with Folder(path) as folder:`` the folder, which no other process replaces meanwhile. It is
    made if there is none. Entering raises FolderError; OSError."""

    def __init__(self, path: Path, channel: str) -> None:
        self.path = Path(os.path.abspath(path))
        self._channel = channel
        # Beside the folder, because only that is surely on the same file system.
        self._next = self.path.parent / f".{self.path.name}.aiodist-next"
        self._lock = -1
        self._made = False

    def __enter__(self) -> Folder:
        check_place(self.path)
        with contextlib.suppress(FileExistsError):
            self.path.mkdir()
            self._made = True
        self._lock = _locked(self.path)
        try:
            self._check_own()
            _remove(self._next)
            self._check_exchange()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            _remove(self._next)
            if self._made:  # and nothing came
                with contextlib.suppress(OSError):
                    self.path.rmdir()
        finally:
            os.close(self._lock)

    def _check_own(self) -> None:
        """A folder that this command did not write may have files of the user."""
        inside = os.listdir(self.path)
        if inside and META not in inside:
            raise FolderError(
                f"{self.path} has files that do not come from a channel, and they would be removed:"
                " name a new or an empty folder"
            )

    def _check_exchange(self) -> None:
        """Try it with two empty folders."""
        other = self._next / "other"
        other.mkdir(parents=True)
        try:
            _exchange(other, _made(self._next / "one"))
        except OSError as error:
            raise FolderError(
                f"the file system of {self.path} cannot exchange two folders in one step"
                f" ({error.strerror}): use a folder on a local disk"
            ) from error
        finally:
            _remove(self._next)

    def held(self, read: Read) -> Held | None:
        """What is in the folder, if all of it is as it was written. None: anything else. Reads all
        files; may run in a thread."""
        try:
            with open(self.path / META, "rb") as file:
                match json.loads(file.read(LONGEST_META)):
                    case {"channel": self._channel, "version": int(number), "files": dict(files)}:
                        found = {name: self._about(name, read) for name in names.check_all(files)}
                        wanted = {name: tuple(about) for name, about in files.items()}
                        return Held(number, id_of(found)) if found == wanted else None
        except (OSError, ValueError, TypeError):
            return None
        return None

    def _about(self, name: str, read: Read) -> tuple[int, int]:
        """The size and the CRC-32 of a file."""
        size = check = 0
        fd = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb", buffering=0) as file:
            while piece := file.read(PIECE):
                size += len(piece)
                check = crc32(piece, check)
                read(len(piece))
        return size, check

    def take(self, version: Version, number: int, wrote: Read) -> None:
        """Replace the folder by that version. May run in a thread; what `wrote` raises, which is
        told how many more bytes were written, ends it.

        Raises FolderError if the disk has no room, or the folder was removed; RefusedError if the
        bytes are not those that the publisher read; OSError. The folder is as it was then.
        """
        try:
            self._check_room(version)
            self._next.mkdir(mode=0o755)
            for file in version.files:
                self._write(file, version.checks[file.name], wrote)
            files = {one.name: (one.size, version.checks[one.name]) for one in version.files}
            self._write_meta(self._next, number, files)
            for folder, _, _ in os.walk(self._next):
                _sync(Path(folder))
            self._replace()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise FolderError(
                    f"the disk of {self.path} is full: version {number} has {version.size} bytes"
                ) from error
            raise
        finally:
            _remove(self._next)

    def _check_room(self, version: Version) -> None:
        found = os.statvfs(self.path.parent)
        if found.f_bavail * found.f_frsize < version.size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _write(self, file: Source, check: int, wrote: Read) -> None:
        path = self._next / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        found = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o644), "wb", buffering=0) as out:
            for array in file.pieces:
                flat = array.reshape(-1).view(np.uint8)
                for at in range(0, len(flat), PIECE):
                    piece = flat[at : at + PIECE].data
                    found = crc32(piece, found)
                    while piece:
                        piece = piece[out.write(piece) :]
                    wrote(len(flat[at : at + PIECE]))
            os.fsync(out.fileno())
        if found != check:
            raise RefusedError(
                f"{file.name} has other bytes than its checksum says: it was changed while it was"
                " published"
            )

    def _write_meta(self, folder: Path, number: int, files: Mapping[str, tuple[int, int]]) -> None:
        about = {"channel": self._channel, "version": number, "files": files}
        path = folder / f"{META}.next"
        with open(path, "w", encoding="utf-8") as out:
            json.dump(about, out)
            out.flush()
            os.fsync(out.fileno())
        path.rename(folder / META)

    def renumber(self, number: int) -> None:
        """The same files have a new number. Raises OSError."""
        about = json.loads((self.path / META).read_text(encoding="utf-8"))
        self._write_meta(self.path, number, about["files"])

    def _replace(self) -> None:
        # The new folder is locked before it is seen, so another process finds one of both locked.
        lock = _locked(self._next)
        try:
            _exchange(self._next, self.path)
        except OSError as error:
            os.close(lock)
            if error.errno == errno.ENOENT:
                raise FolderError(f"{self.path} was removed by another program") from error
            raise
        os.close(self._lock)
        self._lock, self._made = lock, False
        _sync(self.path.parent)


def check_place(path: Path) -> None:
    """Raises FolderError if no folder there can be exchanged."""
    if sys.platform != "linux":
        raise FolderError("a folder is exchanged in one step on Linux only")
    if path.is_symlink():
        raise FolderError(f"{path} is a link: name the folder that it leads to")
    if path.exists() and not path.is_dir():
        raise FolderError(f"{path} is a file: name a folder")
    if not path.parent.is_dir():
        raise FolderError(f"there is no folder {path.parent}")
    if not path.name or os.path.realpath(path) in mount_points():
        raise FolderError(
            f"{path} is a mount point, which cannot be exchanged: name a folder in it, such as"
            f" {path / 'current'}"
        )


def mount_points(table: str = "/proc/self/mountinfo") -> set[str]:
    """The places at which file systems are mounted."""
    with open(table, encoding="utf-8", errors="surrogateescape") as lines:
        return {_unescaped(line.split(" ")[4]) for line in lines}


def _unescaped(path: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, char)
    return path


def _locked(path: Path) -> int:
    """A file descriptor that locks a folder. Raises FolderError if another process has it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have exchanged the folder between both calls.
        if not os.path.samestat(os.fstat(fd), os.stat(path)):
            raise BlockingIOError
    except BlockingIOError:
        os.close(fd)
        raise FolderError(
            f"another process replaces {path}: end it, or name another folder"
        ) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _exchange(one: Path, other: Path) -> None:
    """Exchange two folders in one step. Raises OSError."""
    renameat2: Any = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    words = os.fsencode(one), os.fsencode(other)
    if renameat2(_AT_FDCWD, words[0], _AT_FDCWD, words[1], _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def _sync(folder: Path) -> None:
    """Have the names in a folder on disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    """Remove a folder, if there is one, and not what links in it lead to."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
