"""The state file: what was written is read again, whatever was cut off; damage is refused."""

from __future__ import annotations

import errno
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from aiodist.membership.records import EpochGiven, Record
from aiodist.runtime import state_file
from aiodist.runtime.state_file import HEAD_BYTES, MAGIC, SALT_BYTES, StateFile


def records(*numbers: int) -> list[Record]:
    return [EpochGiven(f"group {number}", number) for number in numbers]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


def written(path: Path, *batches: list[Record]) -> list[int]:
    """Write a file with a snapshot of no records and these batches: its sizes after each."""
    file = StateFile(path)
    file.write_snapshot("me", 3, [])
    sizes = [path.stat().st_size]
    for batch in batches:
        file.append(batch)
        sizes.append(path.stat().st_size)
    file.close()
    return sizes


def read(path: Path) -> Any:
    file = StateFile(path)
    file.close()
    return file.saved


def test_what_was_written_is_read(path: Path) -> None:
    assert read(path) is None
    written(path, records(1), records(2, 3))
    saved = read(path)
    assert (saved.coordinator, saved.incarnation) == ("me", 3)
    assert saved.records == records(1, 2, 3)
    if sys.platform != "win32":
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_snapshot_takes_the_place_of_all(path: Path) -> None:
    file = StateFile(path)
    file.write_snapshot("me", 1, records(1))
    file.append(records(2))
    file.write_snapshot("me", 1, records(3))
    file.append(records(4))
    file.close()
    file.close()
    assert read(path).records == records(3, 4)
    assert sorted(one.name for one in path.parent.iterdir()) == ["state", "state.lock"]


def test_a_write_that_was_cut_off_anywhere_is_dropped(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, before, after = written(path, records(1), records(2, 3))
    whole = path.read_bytes()
    for size in range(before, after):
        path.write_bytes(whole[:size])
        assert read(path).records == records(1)
        # The file has its length already, and the rest of it never came.
        path.write_bytes(whole[:size] + bytes(after - size))
        assert read(path).records == records(1)
    assert "dropping" in caplog.records[0].getMessage()
    assert caplog.records[0].levelno == logging.WARNING
    assert path.write_bytes(whole)
    assert read(path).records == records(1, 2, 3)


def test_what_comes_after_a_cut_off_write_is_kept(path: Path) -> None:
    _, before, after = written(path, records(1), records(2))
    os.truncate(path, after - 1)
    file = StateFile(path)
    assert file.saved is not None
    file.write_snapshot("me", 4, file.saved.records)
    file.append(records(5))
    file.close()
    assert read(path).records == records(1, 5)
    assert read(path).incarnation == 4
    assert before < after


def test_damage_amid_the_file_is_refused(path: Path) -> None:
    _, first, _ = written(path, records(1), records(2))
    whole = path.read_bytes()
    for at in range(len(MAGIC) + SALT_BYTES, first):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"state file .* is damaged: "):
            StateFile(path)


def test_a_damaged_salt_is_damage(path: Path) -> None:
    written(path, records(1))
    data = bytearray(path.read_bytes())
    data[len(MAGIC)] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged: its snapshot is not whole"):
        StateFile(path)


@pytest.mark.parametrize("data", [b"", b"{}", b"\x00" * 100, MAGIC, MAGIC[:4]])
def test_other_files_are_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(ValueError, match="state is no state file of a coordinator: name another"):
        StateFile(path)
    assert path.read_bytes() == data


@pytest.mark.parametrize("payload", [b"\xc1", b"\x92\x01\x02", b"\x92\xa1x\x01\x92\x09\x90"])
def test_frames_that_make_no_sense_are_damage(path: Path, payload: bytes) -> None:
    salt = bytes(SALT_BYTES)
    path.write_bytes(MAGIC + salt + state_file._frame(salt, 0, payload))
    with pytest.raises(ValueError, match="is damaged"):
        StateFile(path)


def test_a_value_that_looks_like_a_frame_is_none(path: Path) -> None:
    """Whoever writes values does not know the salt."""
    _, before, after = written(path, records(1), records(2))
    forged = state_file._frame(b"guessed!", 7, b"")
    os.truncate(path, before + HEAD_BYTES)
    with path.open("ab") as file:
        file.write(forged)
    assert read(path).records == records(1)
    assert after


def test_one_coordinator_has_it(path: Path) -> None:
    file = StateFile(path)
    with pytest.raises(OSError, match="is in use by another coordinator") as info:
        StateFile(path)
    assert info.value.errno == errno.EWOULDBLOCK
    file.close()
    read(path)


def test_a_refused_file_is_not_locked(path: Path) -> None:
    path.write_bytes(b"x")
    for _ in range(2):
        with pytest.raises(ValueError, match="no state file"):
            StateFile(path)


def test_a_long_log_is_written_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "COMPACT_BYTES", 200)
    file = StateFile(path)
    file.write_snapshot("me", 1, records(*range(50)))
    turns = 0
    while not file.is_due:
        file.append(records(turns))
        turns += 1
    assert turns > 10  # at least as long as the snapshot
    file.write_snapshot("me", 1, [])
    assert not file.is_due
    file.close()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        StateFile(tmp_path / "missing" / "state")


def test_a_snapshot_that_cannot_be_written_leaves_the_old_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(path, records(1))
    file = StateFile(path)

    def fail(fd: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="no space"):
            file.write_snapshot("me", 4, [])
    file.close()
    assert read(path).records == records(1)
