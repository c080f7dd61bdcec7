"""Memory owned by one process and read by others."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import platform
import runpy
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from aiodist.buffers import segment as module
from aiodist.buffers.segment import Segment, unsupported_reason
from aiodist.errors import ProtocolError

pytestmark = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))

SIZE = 10_000


def attached(own: Segment) -> Segment:
    return Segment.attach(os.dup(own.fd), own.nbytes)


def test_a_peer_sees_what_the_owner_writes() -> None:
    own = Segment.create(SIZE)
    peer = attached(own)
    assert own.nbytes == peer.nbytes == len(own.memory) == len(peer.memory) == SIZE
    assert peer.memory == bytes(SIZE)
    own.memory[7:10] = b"abc"
    own.memory[-1] = 5
    assert bytes(peer.memory[7:10]) == b"abc"
    assert peer.memory[-1] == 5
    own.close()
    assert bytes(peer.memory[7:10]) == b"abc"
    peer.close()


def test_a_peer_may_keep_the_file_to_pass_it_on() -> None:
    own = Segment.create(SIZE)
    own.memory[0] = 7
    peer = Segment.attach(os.dup(own.fd), SIZE, keep=True)
    own.close()
    other = attached(peer)
    assert other.memory[0] == 7
    assert other.memory.readonly
    with pytest.raises(ProtocolError, match="expected 1"):
        Segment.attach(os.dup(peer.fd), 1, keep=True)
    peer.close()
    assert peer.fd == -1
    other.close()


def test_a_peer_cannot_write() -> None:
    own = Segment.create(SIZE)
    peer = attached(own)
    assert peer.memory.readonly
    with pytest.raises(TypeError, match="read-only"):
        peer.memory[0] = 1
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(own.fd, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(own.fd, SIZE)  # another writable mapping
    assert peer.fd == -1
    own.close()
    peer.close()


def test_nobody_can_resize_it() -> None:
    own = Segment.create(SIZE)
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(own.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(own.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    own.close()


def test_kernels_without_the_seal_against_future_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SEAL_FUTURE_WRITE", 1 << 30)  # EINVAL
    own = Segment.create(SIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(own.fd, 0)
    peer = attached(own)
    own.memory[0] = 9
    assert peer.memory[0] == 9
    own.close()
    peer.close()


def test_what_is_mapped_needs_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    own = Segment.create(SIZE)
    peer = attached(own)
    written, read = own.memory, peer.memory
    own.close()
    assert os.listdir("/proc/self/fd") == before
    written[:5] = b"hello"
    assert read[:5] == b"hello"


def test_descriptors_are_not_inherited() -> None:
    own = Segment.create(SIZE)
    assert not os.get_inheritable(own.fd)
    own.close()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_empty_segment_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        Segment.create(nbytes)


@pytest.mark.parametrize("told", [SIZE - 1, SIZE + 1, 0, -1])
def test_attaching_with_another_size_is_refused(told: int) -> None:
    own = Segment.create(SIZE)
    fd = os.dup(own.fd)
    with pytest.raises(ProtocolError, match=f"of {SIZE} bytes: expected {told}"):
        Segment.attach(fd, told)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    own.close()


def test_attaching_what_could_shrink_is_refused() -> None:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    with pytest.raises(ProtocolError, match="SIGBUS"):
        Segment.attach(fd, SIZE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_what_shrinks_while_it_is_looked_at_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    look = os.fstat

    def shrinks(number: int) -> os.stat_result:
        found = look(number)
        os.ftruncate(fd, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return found

    with monkeypatch.context() as during, pytest.raises(ProtocolError, match="SIGBUS"):
        during.setattr(os, "fstat", shrinks)
        Segment.attach(os.dup(fd), SIZE)
    os.close(fd)


def test_attaching_an_empty_memfd_is_refused() -> None:
    fd = os.memfd_create("empty", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(ProtocolError, match="of 0 bytes"):
        Segment.attach(fd, 0)


def test_attaching_a_file_is_refused() -> None:
    with tempfile.TemporaryFile(dir="/proc/self/cwd") as file:
        file.truncate(SIZE)
        with pytest.raises(ProtocolError, match="expected a memfd"):
            Segment.attach(os.dup(file.fileno()), SIZE)


def test_closing_leaves_the_views_of_users_alone() -> None:
    own = Segment.create(SIZE)
    peer = attached(own)
    written = np.frombuffer(own.memory, np.uint8)
    read = np.frombuffer(peer.memory, np.uint8)
    view = own.memory[10:20]
    for segment in (own, peer):
        segment.close()
        segment.close()
        assert segment.fd == -1
        with pytest.raises(ValueError, match="closed"):
            _ = segment.memory
    written[:] = 3
    view[0] = 4
    assert read[9] == 3
    assert read[10] == 4


def test_the_last_view_frees_the_mapping() -> None:
    own = Segment.create(SIZE, "aiodist-once-only")
    array = np.frombuffer(own.memory, np.uint8)
    own.close()
    assert "aiodist-once-only" in mappings()
    del array
    gc.collect()
    assert "aiodist-once-only" not in mappings()


def mappings() -> str:
    with open("/proc/self/maps", encoding="utf-8") as file:
        return file.read()


def test_why_it_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unsupported_reason() is None
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "aarch64")
        assert "aarch64" in str(unsupported_reason())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert "darwin" in str(unsupported_reason())
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", forbidden)
        assert "Operation not permitted" in str(unsupported_reason())
    with monkeypatch.context() as patch:
        patch.delattr(os, "memfd_create")
        assert "without memfd_create" in str(unsupported_reason())


def forbidden(name: str, flags: int) -> int:
    raise PermissionError(1, "Operation not permitted")


def test_memory_that_cannot_be_had_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError):
        Segment.create(2**62)
    assert os.listdir("/proc/self/fd") == before


def test_it_can_be_imported_where_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no fcntl."""
    monkeypatch.setattr(sys, "platform", "win32")
    found = runpy.run_path(module.__file__)
    assert "fcntl" not in found
    assert found["unsupported_reason"]() is not None


READER = """
import mmap, os, sys
fd = int(sys.argv[1])
memory = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
os.close(fd)
print(flush=True)
sys.stdin.read()
"""


def test_the_owner_knows_whether_anybody_reads_what_was_passed_on() -> None:
    own = Segment.create(SIZE)
    assert not own.is_read
    passed = own.for_readers()
    assert own.is_read  # it may be under way
    peer = attached(passed)
    passed.close()
    assert own.is_read
    own.memory[3] = 9
    view = peer.memory[3:4]
    peer.close()
    assert own.is_read
    assert view[0] == 9
    del view
    assert not own.is_read
    own.close()


@pytest.mark.parametrize("how", ["ends", "killed"])
def test_who_has_died_does_not_read(how: str) -> None:
    own = Segment.create(SIZE)
    passed = own.for_readers()
    command = [sys.executable, "-c", READER, str(passed.fd)]
    pipe = subprocess.PIPE
    reader = subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=[passed.fd])
    passed.close()
    with reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        assert own.is_read
        if how == "killed":
            reader.kill()
    assert not own.is_read
    own.close()


def test_a_file_that_cannot_be_locked_is_not_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Segment.create(SIZE)
    before = len(os.listdir("/proc/self/fd"))

    def refuses(fd: int, how: int) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with pytest.raises(OSError, match="no locks"):
        own.for_readers()
    assert own.is_read  # for all that is known
    assert len(os.listdir("/proc/self/fd")) == before
    own.close()
