"""The state file of a coordinator: an append-only log that starts with a snapshot.

The file starts with 8 bytes that say what it is, and 8 random bytes that belong to it. Then come
two slots, written in turn, that say which frame was the last one to be on disk when somebody was
told of it: its number (8 bytes), and a CRC-32 (4). Then come frames: marker (4 bytes), number of
the frame (8), length of the payload (4), CRC-32 of the payload (4), CRC-32 of these fields (4), all
big-endian and seeded with the random bytes; payload. Frame 0 is the snapshot: a msgpack array
[coordinator, incarnation], and records (see `aiodist.membership.records`). Each further frame is
what one write has added.

A write is on disk before the next one begins, so only the last frame can be torn: then nobody was
told of it, the slots do not speak of it, and it is dropped. Where a frame is missing that they do
speak of, acknowledged writes are lost, and the file is refused, unless that is asked for. Anything
else that does not fit is damage, and is refused. A slot is written after its frame is on disk and
before anybody is told of that, and is on disk itself with the frame after it: so it outlives the
process at once, and the machine one write later, and costs no wait for the disk of its own.

Files of version 1 have no slots: there a lost frame at the end cannot be told from a torn one.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import struct
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgpack

from aiodist.membership.records import Record, decode_records, encode_record
from aiodist.transports.surroundings import closed_on_error

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

logger = logging.getLogger("aiodist.coordinator")

MAGIC = b"aiodist\x02"
MAGIC_1 = b"aiodist\x01"
SALT_BYTES = 8
_SLOT = struct.Struct(">QI")
SLOTS_AT = len(MAGIC) + SALT_BYTES
FRAMES_AT = SLOTS_AT + 2 * _SLOT.size
MARKER = b"\xa1FRM"
_HEAD = struct.Struct(">4sQII")
_CRC = struct.Struct(">I")
HEAD_BYTES = _HEAD.size + _CRC.size

COMPACT_BYTES = 4 * 1024 * 1024
"""A log is written anew, as a snapshot, when so many bytes, and as many as the snapshot had, were
added to it."""

RETRY_SHARE = 8
"""Where no file can be had for that, it is tried again after this part of these bytes."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a state file holds: who wrote it, for which time it was started, and what it knew."""

    coordinator: str
    incarnation: int
    records: list[Record]


class NoFilesError(OSError):
    """The process, or the system, has as many files open as it may."""


class LostWritesError(ValueError):
    """A state file lacks writes at its end that somebody was told of."""


class StateFile:
    """The open, locked file. `saved` is what it held (None: there was none). `force`: go on with
    what there is of a file whose last writes are lost.

    Where `path` is a symbolic link, the file is the one that it leads to now, and so is the lock.

    Not thread-safe: one call at a time. `write_snapshot` comes first, then `append` may be called.
    """

    def __init__(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Raises OSError where the file cannot be had (EWOULDBLOCK: another coordinator has it),
        ValueError where it is none, or damaged, LostWritesError."""
        self.path = Path(os.path.realpath(path))
        self._force = force
        # The file, to be added to; -1 before the first snapshot and after `close`.
        self._fd = self._folder = -1
        self._lock = _locked(self.path)  # the descriptor that holds the lock
        with closed_on_error(self):
            self.saved = self._read()
            # Synchronized after a rename; -1: cannot be.
            self._folder = _opened_folder(self.path.parent)
        self._salt = b""  # what belongs to this file, and seeds its checksums
        self._number = 0  # of the last frame
        self._added = 0  # bytes of frames since the snapshot
        self._snapshot = 0  # bytes of the snapshot

    @property
    def is_due(self) -> bool:
        """Whether a snapshot would now make the file much shorter."""
        return self._added > max(COMPACT_BYTES, self._snapshot)

    def write_snapshot(self, coordinator: str, incarnation: int, records: Iterable[Record]) -> None:
        """Replace all that the file holds, or nothing of it. It is on disk on return. Raises
        NoFilesError, with nothing changed, where the process may open no more files: then it is
        due again once the file has grown a while."""
        new = self.path.with_name(self.path.name + ".new")
        try:
            fd = _made(new)
        except NoFilesError:
            # Not due at once, or every write would try again: the log grows by a part of the limit
            # first.
            self._added -= max(COMPACT_BYTES, self._snapshot) // RETRY_SHARE
            raise
        try:
            salt = secrets.token_bytes(SALT_BYTES)
            who = msgpack.packb([coordinator, incarnation])
            frame = _frame(salt, 0, b"".join((who, *map(encode_record, records))))
            _write_all(fd, MAGIC + salt + 2 * _slot(salt, 0))
            _write_all(fd, frame)
            # In this order: the new file is on disk before it has the name, and the name is on disk
            # before anybody is told. A crash at any point leaves the old file whole, or the new
            # one.
            os.fsync(fd)
            os.replace(new, self.path)
            if self._folder != -1:
                os.fsync(self._folder)
        except BaseException:
            os.close(fd)
            raise
        if self._fd != -1:
            os.close(self._fd)
        self._fd, self._salt, self._number = fd, salt, 0
        self._added, self._snapshot = 0, len(frame)

    def append(self, records: Iterable[Record]) -> None:
        """Add records, all or none of them. They are on disk on return. After an OSError nothing
        is known of what the file holds: it must not be used any more."""
        # Frame, disk, slot, in this order (see the module): a slot that speaks of a frame which is
        # not on disk would make the next start refuse the file. The two slots are written in turn,
        # so that one that is torn leaves the other.
        self._number += 1
        frame = _frame(self._salt, self._number, b"".join(map(encode_record, records)))
        _write_all(self._fd, frame)
        _sync_data(self._fd)
        os.lseek(self._fd, SLOTS_AT + self._number % 2 * _SLOT.size, os.SEEK_SET)
        _write_all(self._fd, _slot(self._salt, self._number))
        os.lseek(self._fd, 0, os.SEEK_END)
        self._added += len(frame)

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        for fd in (self._fd, self._folder, self._lock):
            if fd != -1:
                os.close(fd)
        self._fd = self._folder = self._lock = -1

    def _read(self) -> Saved | None:
        data = _contents(self.path)
        if data is None:
            return None
        start = {MAGIC: FRAMES_AT, MAGIC_1: SLOTS_AT}.get(data[: len(MAGIC)], len(data) + 1)
        if len(data) < start:
            raise ValueError(
                f"{self.path} is no state file of a coordinator: name another file (it is made if "
                "it does not exist), or move this one away"
            )
        try:
            frames, rest = _frames(data, start)
            if not frames:
                raise ValueError("its snapshot is not whole")
            self._check_last(len(frames) - 1, _last_told(data) if start == FRAMES_AT else 0)
            saved = _saved(frames)
        except LostWritesError:
            raise
        except ValueError as error:
            raise ValueError(
                f"the state file {self.path} is damaged: {error}. Restore it from a backup, or "
                "move it away: then groups that are running are taken over from their members, "
                "without what was in their stores"
            ) from None
        if rest:
            logger.warning(
                "%s: dropping %d bytes of a write that was cut off%s",
                self.path,
                rest,
                "; nobody was told of it" if start == FRAMES_AT else "",
                extra={"event": "state file cut off", "bytes": rest},
            )
        return saved

    def _check_last(self, found: int, told: int) -> None:
        """Whether all writes are there that somebody was told of. Raises LostWritesError."""
        if found >= told:
            return
        text = f"the state file {self.path} lacks its last {told - found} acknowledged writes"
        if not self._force:
            raise LostWritesError(
                f"{text}: it was cut off after they were on disk. Restore it from a backup of a "
                "later time, or start with force=True (--force) to go on with what is there: then "
                "members may miss values in their stores that they were told are kept"
            )
        logger.warning("%s; going on without them, as was asked for", text)


_BINARY: int = getattr(os, "O_BINARY", 0)
_NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)
"""For opening what may be a pipe."""


def _frame(salt: bytes, number: int, payload: bytes) -> bytes:
    seed = zlib.crc32(salt)
    head = _HEAD.pack(MARKER, number, len(payload), zlib.crc32(payload, seed))
    return b"".join((head, _CRC.pack(zlib.crc32(head, seed)), payload))


def _slot(salt: bytes, number: int) -> bytes:
    """Says that frame `number` is on disk."""
    data = number.to_bytes(8, "big")
    return data + _CRC.pack(zlib.crc32(data, zlib.crc32(salt)))


def _last_told(data: bytes) -> int:
    """The last frame that somebody may have been told of. Raises ValueError for damage."""
    salt = data[len(MAGIC) : SLOTS_AT]
    slots = [data[at : at + _SLOT.size] for at in range(SLOTS_AT, FRAMES_AT, _SLOT.size)]
    said: dict[bytes, int] = {slot: _SLOT.unpack(slot)[0] for slot in slots}
    numbers = [number for slot, number in said.items() if _slot(salt, number) == slot]
    if not numbers:  # one of them may be torn
        raise ValueError("it does not say what was acknowledged")
    return max(numbers)


def _frames(data: bytes, at: int) -> tuple[list[bytes], int]:
    """The payloads of the frames of a file, which begin at byte `at`, and how many bytes of a torn
    one are behind them. Raises ValueError for damage."""
    seed = zlib.crc32(data[len(MAGIC) : SLOTS_AT])
    frames: list[bytes] = []
    # Where the file does not go on, that is one of two things, which look alike at that place::
    #
    #     │ frame 7 │ frame 8, half      the write was cut off: nobody was told, it is dropped
    #     │ frame 7 │ ##### │ frame 9    a later frame is whole: 8 was on disk before 9 began,
    #                                    so this is damage, and what is behind it was told
    #
    # Frames have the number and the random bytes of the file in their checksums: what is left of an
    # older file on the same blocks is not taken for a later frame.
    while at < len(data):
        payload = _payload_at(data, at, len(frames), seed)
        if payload is None:
            break
        frames.append(payload)
        at += HEAD_BYTES + len(payload)
    if at < len(data) and _has_later_frame(data, at + 1, len(frames), seed):
        raise ValueError(f"frame {len(frames)}, at byte {at}, does not fit its checksum")
    return frames, len(data) - at


def _payload_at(data: bytes, at: int, number: int, seed: int) -> bytes | None:
    """The payload of frame `number`, if it is whole."""
    start = at + HEAD_BYTES
    if start > len(data):
        return None
    marker, found, length, crc = _HEAD.unpack_from(data, at)
    head = data[at : at + _HEAD.size]
    if marker != MARKER or found != number:
        return None
    if _CRC.unpack_from(data, at + _HEAD.size)[0] != zlib.crc32(head, seed):
        return None
    payload = data[start : start + length]
    return payload if len(payload) == length and zlib.crc32(payload, seed) == crc else None


def _has_later_frame(data: bytes, at: int, number: int, seed: int) -> bool:
    """Whether a frame that was written after `number` is anywhere behind `at`: then `number` was
    on disk, and what is there now is damage."""
    while (at := data.find(MARKER, at)) != -1:
        if at + _HEAD.size <= len(data):
            later = _HEAD.unpack_from(data, at)[1]
            if later > number and _payload_at(data, at, later, seed) is not None:
                return True
        at += 1
    return False


def _saved(frames: list[bytes]) -> Saved:
    unpacker = msgpack.Unpacker(max_buffer_size=max(len(frames[0]), 1))
    unpacker.feed(frames[0])
    try:
        coordinator, incarnation = unpacker.unpack()
    except Exception as error:  # msgpack raises half a dozen unrelated types
        raise ValueError(f"it does not say whose it is ({error})") from None
    if type(coordinator) is not str or type(incarnation) is not int:
        raise ValueError("it does not say whose it is")
    records = decode_records(frames[0][unpacker.tell() :])
    for payload in frames[1:]:
        records += decode_records(payload)
    return Saved(coordinator, incarnation, records)


def _locked(path: Path) -> int:
    """Lock `path` for this process: by a file beside it, for `path` itself is replaced."""
    flags = os.O_RDWR | os.O_CREAT | _NO_FOLLOW | _BINARY
    fd = os.open(path.with_name(path.name + ".lock"), flags, 0o600)
    try:
        if sys.platform == "win32":
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise OSError(
            errno.EWOULDBLOCK,
            f"the state file {path} is in use by another coordinator ({error.strerror}): end that "
            "one, or give each a file of its own",
        ) from None
    return fd


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync_data(fd: int) -> None:
    """Have what was written on disk."""
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # there fsync leaves it in the cache of the disk
    elif hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def _opened_folder(folder: Path) -> int:
    """For having the names in `folder` on disk; -1 where the system has no such thing."""
    return -1 if sys.platform == "win32" else os.open(folder, os.O_RDONLY)


def _made(path: Path) -> int:
    """A new file for this user only, in place of what a coordinator that crashed may have left: it
    is never somebody else's, nor elsewhere. Raises OSError, NoFilesError."""
    path.unlink(missing_ok=True)
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | _BINARY, 0o600)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise NoFilesError(*error.args) from error
        raise


def _contents(path: Path) -> bytes | None:
    """What a file holds; None: there is none. Raises OSError, ValueError for what is no file."""
    try:
        fd = os.open(path, os.O_RDONLY | _NO_WAIT | _BINARY)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):  # before `open`, which refuses folders by number
        os.close(fd)
        raise ValueError(f"{path} is no file that can hold a state: name another one")
    with open(fd, "rb") as file:
        return file.read()
