"""The state file: what was written is read again, whatever was cut off; damage is refused."""

from __future__ import annotations

import errno
import logging
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from aiodist.coordinator import state_file
from aiodist.coordinator.state_file import (
    FRAMES_AT,
    HEAD_BYTES,
    MAGIC,
    MAGIC_1,
    SALT_BYTES,
    SLOTS_AT,
    LostWritesError,
    SnapshotError,
    StateFile,
)
from aiodist.membership.records import EpochGiven, Record


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


def read(path: Path, *, force: bool = False) -> Any:
    file = StateFile(path, force=force)
    file.close()
    return file.saved


def unacknowledged(path: Path, batch: list[Record]) -> tuple[bytes, int]:
    """Add a batch of which nobody is told: the file as it is then, and its size before."""
    file = StateFile(path)
    assert file.saved is not None
    file.write_snapshot("me", 3, file.saved.records)
    before = path.read_bytes()
    file.append(batch)
    file.close()
    return before + path.read_bytes()[len(before) :], len(before)


def test_what_was_written_is_read(path: Path) -> None:
    assert read(path) is None
    written(path, records(1), records(2, 3))
    saved = read(path)
    assert (saved.coordinator, saved.incarnation) == ("me", 3)
    assert saved.records == records(1, 2, 3)
    if sys.platform != "win32":
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_snapshot_may_be_longer_than_a_frame(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "_HEAD", struct.Struct(">4sQxxxBI"))  # lengths below 256
    monkeypatch.setattr(state_file, "PART_BYTES", 255)
    file = StateFile(path)
    file.write_snapshot("me", 1, records(*range(100)))
    size = path.stat().st_size
    for number in (100, 101):
        file.append(records(number))
    file.close()
    assert read(path).records == records(*range(102))
    os.truncate(path, size - 1)  # in its last frame
    with pytest.raises(LostWritesError):
        read(path)


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
    written(path, records(1))
    whole, before = unacknowledged(path, records(2, 3))
    for size in range(before, len(whole)):
        path.write_bytes(whole[:size])
        assert read(path).records == records(1)
        # The file has its length already, and the rest of it never came.
        path.write_bytes(whole[:size] + bytes(len(whole) - size))
        assert read(path).records == records(1)
    assert caplog.records[0].getMessage().endswith("was cut off; it was not acknowledged")
    assert caplog.records[0].levelno == logging.WARNING
    assert path.write_bytes(whole)
    assert read(path).records == records(1, 2, 3)


def test_what_comes_after_a_cut_off_write_is_kept(path: Path) -> None:
    written(path, records(1))
    whole, _ = unacknowledged(path, records(2))
    path.write_bytes(whole[:-1])
    file = StateFile(path)
    assert file.saved is not None
    file.write_snapshot("me", 4, file.saved.records)
    file.append(records(5))
    file.close()
    assert read(path).records == records(1, 5)
    assert read(path).incarnation == 4


@pytest.mark.parametrize("filled", [False, True])
def test_acknowledged_writes_that_are_lost_are_noticed(
    path: Path, caplog: pytest.LogCaptureFixture, filled: bool
) -> None:
    """The file was cut off anywhere behind its snapshot, and maybe has zeros there."""
    sizes = written(path, records(1), records(2), records(3))
    whole = path.read_bytes()
    for size in range(sizes[0], sizes[-1]):
        path.write_bytes(whole[:size] + bytes(filled * (sizes[-1] - size)))
        there = sum([size >= end for end in sizes]) - 1
        with pytest.raises(LostWritesError, match=rf"its last {3 - there} acknowl.*--force"):
            read(path)
        assert read(path, force=True).records == records(1, 2, 3)[:there]
    assert "going on without them" in caplog.text
    path.write_bytes(whole)
    assert read(path).records == records(1, 2, 3)


def test_one_slot_may_be_torn(path: Path) -> None:
    written(path, records(1), records(2), records(3))
    whole = path.read_bytes()
    for at in range(SLOTS_AT, FRAMES_AT):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        assert read(path).records == records(1, 2, 3)
        damaged[SLOTS_AT:FRAMES_AT] = bytes(FRAMES_AT - SLOTS_AT)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="it does not say what was acknowledged"):
            read(path)


def test_files_of_version_1_are_read(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(path, records(1), records(2))
    data = path.read_bytes()
    old = MAGIC_1 + data[len(MAGIC) : SLOTS_AT] + data[FRAMES_AT:]
    path.write_bytes(old)
    assert read(path).records == records(1, 2)
    path.write_bytes(old[:-1])
    assert read(path).records == records(1)
    assert caplog.records[0].getMessage().endswith("a write that was cut off")
    file = StateFile(path)
    file.write_snapshot("me", 4, records(1))
    file.close()
    assert path.read_bytes().startswith(MAGIC)


def test_damage_amid_the_file_is_refused(path: Path) -> None:
    _, first, _ = written(path, records(1), records(2))
    whole = path.read_bytes()
    for at in (*range(len(MAGIC), SLOTS_AT), *range(FRAMES_AT, first)):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"state file .* is damaged: "):
            StateFile(path)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_flipped_byte_anywhere_is_noticed_or_does_no_harm(path: Path, mask: int) -> None:
    written(path, records(1), records(2), records(3))
    whole = path.read_bytes()
    noticed = 0
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= mask
        path.write_bytes(damaged)
        try:
            found = read(path)
        except ValueError:
            noticed += 1
        else:
            assert found.records == records(1, 2, 3)
            assert SLOTS_AT <= at < FRAMES_AT  # there are two slots, which say the same
    assert noticed == len(whole) - (FRAMES_AT - SLOTS_AT)


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


def test_a_file_of_a_newer_version_is_refused(path: Path) -> None:
    path.write_bytes(b"aiodist\x03" + 100 * b"x")
    with pytest.raises(ValueError, match="has version 3 of the format, and this aiodist reads"):
        StateFile(path)


@pytest.mark.parametrize("payload", [b"\xc1", b"\x92\x01\x02", b"\x92\xa1x\x01\x92\x09\x90"])
def test_frames_that_make_no_sense_are_damage(path: Path, payload: bytes) -> None:
    salt = bytes(SALT_BYTES)
    slots = 2 * state_file._slot(salt, 0)
    path.write_bytes(MAGIC + salt + slots + state_file._frame(salt, 0, payload))
    with pytest.raises(ValueError, match="is damaged"):
        StateFile(path)


def test_a_value_that_looks_like_a_frame_is_none(path: Path) -> None:
    """Whoever writes values does not know the salt."""
    written(path, records(1))
    whole, before = unacknowledged(path, records(2))
    forged = state_file._frame(b"guessed!", 7, b"")
    path.write_bytes(whole[: before + HEAD_BYTES] + forged)
    assert read(path).records == records(1)


def test_one_coordinator_has_it(path: Path) -> None:
    file = StateFile(path)
    with pytest.raises(OSError, match="is in use by another coordinator") as info:
        StateFile(path)
    assert info.value.errno == errno.EWOULDBLOCK
    file.close()
    read(path)


unix = pytest.mark.skipif(sys.platform == "win32", reason="modes, pipes and links of Unix")


@unix
def test_a_symbolic_link_is_followed_and_stays(path: Path) -> None:
    written(path, records(1))
    (path.parent / "elsewhere").mkdir()
    link = path.parent / "elsewhere" / "link"
    link.symlink_to(path)
    file = StateFile(link)
    with pytest.raises(OSError, match="is in use by another coordinator"):
        StateFile(path)
    file.write_snapshot("me", 4, records(2))
    file.append(records(3))
    file.close()
    assert link.readlink() == path
    assert not path.is_symlink()
    assert read(path).records == read(link).records == records(2, 3)


@unix
def test_what_lies_in_the_way_of_a_snapshot_is_not_written_to(path: Path) -> None:
    victim = path.parent / "victim"
    victim.write_text("mine")
    new = path.parent / "state.new"
    new.symlink_to(victim)
    written(path, records(1))
    assert victim.read_text() == "mine"
    assert not path.is_symlink()
    new.touch()
    new.chmod(0o666)
    with new.open("w") as held:  # by whoever made it
        written(path, records(1))
        held.write("forged")
    assert path.stat().st_mode & 0o777 == 0o600
    assert read(path).records == records(1)


def test_a_file_in_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the state file .*nowhere.state cannot be locked"):
        StateFile(tmp_path / "nowhere" / "state")


@unix
def test_a_lock_is_no_link(path: Path) -> None:
    (path.parent / "state.lock").symlink_to(path.parent / "victim")
    with pytest.raises(OSError, match=r"state\.lock") as info:
        StateFile(path)
    assert info.value.errno == errno.ELOOP
    assert not (path.parent / "victim").exists()


@unix
def test_a_pipe_is_no_file(path: Path) -> None:
    os.mkfifo(path)
    for _ in range(2):
        with pytest.raises(ValueError, match="is no file that can hold a state"):
            StateFile(path)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("open", errno.EMFILE),
        ("write", errno.ENOSPC),
        ("fsync", errno.EDQUOT),
        ("replace", errno.EIO),
    ],
)
def test_a_snapshot_that_cannot_be_written_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """The file as it is goes on, with the room that the new one has taken."""
    file = StateFile(path)
    file.write_snapshot("me", 3, records(1))

    def fail(*arguments: Any) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, name, fail)
        with pytest.raises(SnapshotError) as info:
            file.write_snapshot("me", 3, records(1, 2))
        assert (info.value.errno, info.value.filename) == (code, f"{path}.new")
    assert sorted(one.name for one in path.parent.iterdir()) == ["state", "state.lock"]
    file.append(records(2))
    file.close()
    assert read(path).records == records(1, 2)


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


@unix
def test_a_folder_is_no_file(path: Path) -> None:
    path.mkdir()
    with pytest.raises(ValueError, match=rf"{path} is no file that can hold a state"):
        StateFile(path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        StateFile(tmp_path / "missing" / "state")
