"""A folder is replaced as a whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiodist_cli.files import folder as folders
from aiodist_cli.files.folder import META, Folder, FolderError, Held
from aiodist_cli.files.names import RefusedError
from aiodist_cli.files.reading import checked
from aiodist_cli.files.tree import Source, Version, version_of


def ignore(_: int) -> None:
    pass


def version(**files: bytes) -> Version:
    sources = [
        Source(name.replace("__", "/"), np.frombuffer(data, np.uint8), {})
        for name, data in files.items()
    ]
    return version_of(sources, checked(sources, ignore))


def content(path: Path) -> dict[str, bytes]:
    return {
        str(one.relative_to(path)): one.read_bytes()
        for one in path.rglob("*")
        if one.is_file() and one.name != META
    }


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A folder to be; beside it nothing is left in the end."""
    (tmp_path / "models").mkdir()
    yield tmp_path / "models" / "policy"
    assert {*os.listdir(tmp_path / "models")} <= {"policy"}


def test_a_version_replaces_the_one_before(path: Path) -> None:
    one, two = version(a=b"1", sub__b=b"2" * 100), version(c=b"")
    with Folder(path, "policy") as folder:
        assert content(path) == {}
        assert folder.held(ignore) is None
        folder.take(one, 7, ignore)
        assert content(path) == {"a": b"1", "sub/b": b"2" * 100}
        assert folder.held(ignore) == Held(7, one.id)
        before = os.open(path / "a", os.O_RDONLY)
        folder.take(two, 8, ignore)
        assert content(path) == {"c": b""}
        assert os.read(before, 9) == b"1"  # a program that has a file open keeps it
        os.close(before)
    with Folder(path, "policy") as folder:
        assert folder.held(ignore) == Held(8, two.id)
        folder.renumber(9)
        assert folder.held(ignore) == Held(9, two.id)
    with Folder(path, "another") as folder:
        assert folder.held(ignore) is None


@pytest.mark.parametrize("harm", ["longer", "other", "gone", "link", "meta", "no meta"])
def test_a_folder_that_was_changed_is_not_trusted(path: Path, harm: str, tmp_path: Path) -> None:
    with Folder(path, "policy") as folder:
        folder.take(version(a=b"1", b=b"2"), 7, ignore)
        file = path / "a"
        match harm:
            case "longer":
                file.write_bytes(b"11")
            case "other":
                file.write_bytes(b"2")
            case "gone":
                file.unlink()
            case "link":
                (tmp_path / "a").write_bytes(b"1")
                file.unlink()
                file.symlink_to(tmp_path / "a")
            case "meta":
                (path / META).write_text('{"version": 7}')
            case "no meta":
                (path / META).unlink()
        assert folder.held(ignore) is None


def test_nothing_is_left_of_a_folder_that_got_no_version(path: Path) -> None:
    with Folder(path, "policy"):
        assert path.is_dir()
    assert not path.exists()
    path.mkdir()
    with Folder(path, "policy"):
        pass
    assert path.is_dir()


def test_files_of_others_are_not_removed(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("x")
    with pytest.raises(FolderError, match="would be removed"), Folder(path, "policy"):
        pass
    assert content(path) == {"thesis.tex": b"x"}


def test_two_processes_do_not_share_a_folder(path: Path) -> None:
    with Folder(path, "policy") as folder:
        for number in (1, 2):
            folder.take(version(a=b"1"), number, ignore)
            with pytest.raises(FolderError, match="another process"), Folder(path, "policy"):
                pass
    with Folder(path, "policy"):
        pass


def test_a_lock_of_a_folder_that_was_exchanged_is_none(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.mkdir()
    flock = folders.fcntl.flock

    def late(fd: int, how: int) -> None:
        flock(fd, how)
        path.rename(path.with_name("old"))
        path.mkdir()

    monkeypatch.setattr(folders.fcntl, "flock", late)
    with pytest.raises(FolderError, match="another process"), Folder(path, "policy"):
        pass
    path.with_name("old").rmdir()


def test_places_that_cannot_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name, problem in [
        ("file", "is a file"),
        ("link", "is a link"),
        ("no/policy", "there is no folder"),
        ("/proc", "is a mount point"),
        ("/", "is a mount point"),
    ]:
        with pytest.raises(FolderError, match=problem), Folder(tmp_path / name, "policy"):
            pass

    def refuses(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(folders, "_exchange", refuses)
    with pytest.raises(FolderError, match="cannot exchange"), Folder(tmp_path / "x", "policy"):
        pass
    assert {*os.listdir(tmp_path)} == {"file", "link"}


def test_mount_points_with_odd_names(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text("36 35 98:0 / /mnt/a\\040b\\134040 rw shared:1 - ext4 /dev/sda rw\n")
    assert folders.mount_points(str(table)) == {"/mnt/a b\\040"}


class Broken(Exception):
    """What a test raises amid the writing."""


@pytest.mark.parametrize("harm", ["full", "full at once", "stopped", "damaged", "exchange"])
def test_the_old_folder_stays_whatever_fails(
    path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    old, new = version(a=b"1"), version(a=b"2", b=b"3" * 100)
    expected: type[Exception] = FolderError
    written: list[int] = []

    def wrote(nbytes: int) -> None:
        written.append(nbytes)
        if harm == "stopped" and len(written) == 2:
            raise Broken

    def fails(number: int) -> Any:
        def work(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return work

    with Folder(path, "policy") as folder:
        folder.take(old, 1, ignore)
        match harm:
            case "full":
                monkeypatch.setattr(os, "fsync", fails(errno.ENOSPC))
            case "full at once":
                room = os.statvfs_result((1, 1, 0, 0, 0, 0, 0, 0, 0, 255))
                monkeypatch.setattr(os, "statvfs", lambda _: room)
            case "stopped":
                expected = Broken
            case "damaged":
                expected = RefusedError
                new = new._replace(checks={"a": new.checks["a"], "b": 7})
            case "exchange":
                expected = OSError
                monkeypatch.setattr(folders, "_exchange", fails(errno.EIO))
        with pytest.raises(expected):
            folder.take(new, 2, wrote)
        monkeypatch.undo()
        assert written == [] if harm == "full at once" else written
        assert content(path) == {"a": b"1"}
        assert folder.held(ignore) == Held(1, old.id)
        folder.take(version(a=b"4"), 3, ignore)
        assert content(path) == {"a": b"4"}


def test_what_a_killed_process_left_is_removed(path: Path) -> None:
    path.mkdir()
    left = path.with_name(".policy.aiodist-next")
    left.mkdir()
    (left / "model.safetensors").touch()
    with Folder(path, "policy"):
        assert not left.exists()


def test_the_folder_is_removed_meanwhile(path: Path) -> None:
    with Folder(path, "policy") as folder:
        path.rmdir()
        with pytest.raises(FolderError, match="was removed"):
            folder.take(version(a=b"1"), 1, ignore)
