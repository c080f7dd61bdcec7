"""The state file of a coordinator: an append-only log that starts with a snapshot.

The file has, in this order, all numbers big-endian:

- 8 bytes that name the format, and 8 random bytes of this file, which seed all checksums.
- Two slots, written in turn. Each has the number (8 bytes) of the last frame that was acknowledged,
  and a CRC-32 (4).
- Frames. Each has a marker (4 bytes), its number (8), the length of its payload (4), the CRC-32 of
  the payload (4), the CRC-32 of these fields (4), and the payload.

Frame 0 is the snapshot: a msgpack array [coordinator, incarnation], and records (see
`aiodist.membership.records`). If it were too long for one frame, the next ones have the other
records. Each further frame has the records of one write.

A write is on disk before the next one begins, so a crash can tear only the last frame. If no slot
names that frame, it was not acknowledged and is dropped. If a slot names a missing frame,
acknowledged writes are lost, and the file is refused unless the caller forces it. All other errors
are damage, and the file is refused.

A slot is written after its frame is on disk and before any member is told. The slot itself reaches
the disk with the next frame. So it survives the end of the process at once and a power failure one
write later, and costs no extra wait for the disk.

Files of version 1 have no slots, so a lost last frame looks like a torn one.
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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgpack

from aiodist.files import write_all
from aiodist.membership.records import Record, decode_records, encode_record
from aiodist.transports.surroundings import closed_on_error

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

logger = logging.getLogger("aiodist.coordinator")

NAME = b"aiodist"
MAGIC = NAME + b"\x02"
MAGIC_1 = NAME + b"\x01"
SALT_BYTES = 8
_SLOT = struct.Struct(">QI")
SLOTS_AT = len(MAGIC) + SALT_BYTES
FRAMES_AT = SLOTS_AT + 2 * _SLOT.size
MARKER = b"\xa1FRM"
_HEAD = struct.Struct(">4sQII")
_CRC = struct.Struct(">I")
HEAD_BYTES = _HEAD.size + _CRC.size

COMPACT_BYTES = 4 * 1024 * 1024
"""A snapshot replaces the log after so many bytes were appended, and at least as many as the last
snapshot had."""

PART_BYTES = 256 * 1024 * 1024
"""A snapshot goes on in another frame after so many bytes, because the length of a frame has 32
bits. No record is that long."""

RETRY_SHARE = 8
"""If a snapshot cannot be written, it is tried again after this part of those bytes."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The contents of a state file: its coordinator, the number of that coordinator's start, and
    the records."""

    coordinator: str
    incarnation: int
    records: list[Record]


class SnapshotError(OSError):
    """A snapshot could not be written. The file is as it was."""


class LostWritesError(ValueError):
    """A state file lacks acknowledged writes at its end."""


class StateFile:
    """The open, locked file.

    `saved`: what it held (None: it did not exist). `force`: go on with a file whose last writes are
    lost. If `path` is a symbolic link, file and lock are at its present target. Not thread-safe.
    Call `write_snapshot` before the first `append`.
    """

    def __init__(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Raises OSError if the file cannot be opened (EWOULDBLOCK: another coordinator has it),
        ValueError if it is damaged or no state file, LostWritesError."""
        self.path = Path(os.path.realpath(path))
        self._force = force
        # The file, for appending; -1 before the first snapshot and after `close`.
        self._fd = self._folder = -1
        self._lock = _locked(self.path)  # the descriptor that holds the lock
        with closed_on_error(self):
            self.saved = self._read()
            # Synchronized after a rename; -1 if that is impossible.
            self._folder = _opened_folder(self.path.parent)
        self._salt = b""  # the random bytes of this file, which seed its checksums
        self._number = 0  # of the last frame
        self._added = 0  # bytes of frames since the snapshot
        self._snapshot = 0  # bytes of the snapshot

    @property
    def is_due(self) -> bool:
        """Whether a snapshot would now make the file much shorter."""
        return self._added > max(COMPACT_BYTES, self._snapshot)

    def write_snapshot(self, coordinator: str, incarnation: int, records: Iterable[Record]) -> None:
        """Replace the whole contents of the file. They are on disk on return.

        Raises SnapshotError, with nothing changed, if there is no room on the disk, or no file can
        be opened. Then a snapshot is due again after the file has grown.
        """
        new = self.path.with_name(self.path.name + ".new")
        salt = secrets.token_bytes(SALT_BYTES)
        who = msgpack.packb([coordinator, incarnation])
        parts = enumerate(_parts(chain((who,), map(encode_record, records))))
        frames = [_frame(salt, number, part) for number, part in parts]
        last = len(frames) - 1
        fd = -1
        try:
            fd = _made(new)
            write_all(fd, MAGIC + salt + 2 * _slot(salt, last))
            for frame in frames:
                write_all(fd, frame)
            # The new file is on disk before it gets the name, and the name is on disk before any
            # member is told. So a crash leaves either file whole.
            os.fsync(fd)
            os.replace(new, self.path)
        except OSError as error:
            # Let the log grow by a part of the limit first, so that not every write tries again.
            self._added -= max(COMPACT_BYTES, self._snapshot) // RETRY_SHARE
            if fd != -1:
                os.close(fd)
                with suppress(OSError):  # the log needs the room
                    new.unlink()
            # Writing and synchronizing do not name the file in their errors.
            reason = error.strerror or str(error)
            raise SnapshotError(error.errno or errno.EIO, reason, str(new)) from error
        if self._fd != -1:
            os.close(self._fd)
        self._fd, self._salt, self._number = fd, salt, last
        self._added, self._snapshot = 0, sum(map(len, frames))
        if self._folder != -1:
            os.fsync(self._folder)

    def append(self, records: Iterable[Record]) -> None:
        """Append records, all or none of them. They are on disk on return.

        After an OSError the contents of the file are unknown: do not use it any more.
        """
        # The slot comes after its frame is on disk (see the module), because a slot that names a
        # missing frame makes the next start refuse the file. The slots are written in turn, so that
        # a torn one leaves the other.
        self._number += 1
        frame = _frame(self._salt, self._number, b"".join(map(encode_record, records)))
        write_all(self._fd, frame)
        _sync_data(self._fd)
        os.lseek(self._fd, SLOTS_AT + self._number % 2 * _SLOT.size, os.SEEK_SET)
        write_all(self._fd, _slot(self._salt, self._number))
        os.lseek(self._fd, 0, os.SEEK_END)
        self._added += len(frame)

    def close(self) -> None:
        """Close the file and release its lock. Idempotent."""
        for fd in (self._fd, self._folder, self._lock):
            if fd != -1:
                os.close(fd)
        self._fd = self._folder = self._lock = -1

    def _read(self) -> Saved | None:
        data = _contents(self.path)
        if data is None:
            return None
        version = int.from_bytes(data[len(NAME) : len(MAGIC)])
        if data.startswith(NAME) and MAGIC[-1] < version < ord(" "):  # not the word in some text
            raise ValueError(
                f"the state file {self.path} has version {version} of the format, and this "
                f"aiodist reads versions up to {MAGIC[-1]}: install the aiodist that wrote it, or "
                "name another file"
            )
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
                "; it was not acknowledged" if start == FRAMES_AT else "",
                extra={"event": "state file cut off", "bytes": rest},
            )
        return saved

    def _check_last(self, found: int, told: int) -> None:
        """Check that all acknowledged writes are there. Raises LostWritesError."""
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


def _parts(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join pieces to parts of at most PART_BYTES, unless one piece is longer."""
    part: list[bytes] = []
    size = 0
    for piece in pieces:
        if part and size + len(piece) > PART_BYTES:
            yield b"".join(part)
            part, size = [], 0
        part.append(piece)
        size += len(piece)
    yield b"".join(part)


def _frame(salt: bytes, number: int, payload: bytes) -> bytes:
    seed = zlib.crc32(salt)
    head = _HEAD.pack(MARKER, number, len(payload), zlib.crc32(payload, seed))
    return b"".join((head, _CRC.pack(zlib.crc32(head, seed)), payload))


def _slot(salt: bytes, number: int) -> bytes:
    data = number.to_bytes(8, "big")
    return data + _CRC.pack(zlib.crc32(data, zlib.crc32(salt)))


def _last_told(data: bytes) -> int:
    """The last frame that may have been acknowledged. Raises ValueError for damage."""
    salt = data[len(MAGIC) : SLOTS_AT]
    slots = [data[at : at + _SLOT.size] for at in range(SLOTS_AT, FRAMES_AT, _SLOT.size)]
    said: dict[bytes, int] = {slot: _SLOT.unpack(slot)[0] for slot in slots}
    numbers = [number for slot, number in said.items() if _slot(salt, number) == slot]
    if not numbers:  # one of them may be torn
        raise ValueError("it does not say what was acknowledged")
    return max(numbers)


def _frames(data: bytes, at: int) -> tuple[list[bytes], int]:
    """Return the payloads of the frames from byte `at` on, and the number of bytes of a torn frame
    after them.

    Raises ValueError for damage.
    """
    seed = zlib.crc32(data[len(MAGIC) : SLOTS_AT])
    frames: list[bytes] = []
    # If the next frame is not whole, what follows tells a torn write from damage::
    #
    #     │ frame 7 │ frame 8, half      the write was cut off: not acknowledged, dropped
    #     │ frame 7 │ ##### │ frame 9    a later frame is whole: 8 was on disk before 9 began,
    #                                    so this is damage, and what is behind it was told
    #
    # The checksums include the frame's number and the random bytes of the file, so parts of an
    # older file on the same blocks never count as a later frame.
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
    """Whether a later frame than `number` is anywhere after `at`: then `number` was on disk and is
    damaged now."""
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
        raise ValueError(f"it does not name its coordinator ({error})") from None
    if type(coordinator) is not str or type(incarnation) is not int:
        raise ValueError("it does not name its coordinator")
    records = decode_records(frames[0][unpacker.tell() :])
    for payload in frames[1:]:
        records += decode_records(payload)
    return Saved(coordinator, incarnation, records)


def _locked(path: Path) -> int:
    """Lock `path` for this process, by a file beside it, because `path` itself is replaced."""
    flags = os.O_RDWR | os.O_CREAT | _NO_FOLLOW | _BINARY
    lock = path.with_name(path.name + ".lock")
    try:
        fd = os.open(lock, flags, 0o600)
    except OSError as error:
        raise OSError(
            error.errno, f"the state file {path} cannot be locked by {lock} ({error.strerror})"
        ) from None
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


def _sync_data(fd: int) -> None:
    """Wait until the data is on disk."""
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # fsync of macOS leaves it in the cache of the disk
    elif hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def _opened_folder(folder: Path) -> int:
    """Open `folder` to synchronize names in it; -1 if the system cannot do that."""
    return -1 if sys.platform == "win32" else os.open(folder, os.O_RDONLY)


def _made(path: Path) -> int:
    """Make a new file for this user only, and remove what a crashed coordinator left there.

    It never opens another user's file or follows a link. Raises OSError.
    """
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | _BINARY, 0o600)


def _contents(path: Path) -> bytes | None:
    """Read a file; None if it does not exist. Raises OSError, and ValueError if it is no regular
    file."""
    try:
        fd = os.open(path, os.O_RDONLY | _NO_WAIT | _BINARY)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):  # before `open`, which refuses folders by number
        os.close(fd)
        raise ValueError(f"{path} is no file that can hold a state: name another one")
    with open(fd, "rb") as file:
        return file.read()
