"""Memory of other processes, read by the system."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from aiodist.transports import remote


def may_read_itself() -> bool:
    data = bytearray(1)
    try:
        remote.read(os.getpid(), remote.address_of(memoryview(b"x")), memoryview(data))
    except OSError:
        return False
    return data == b"x"


needs_reading = pytest.mark.skipif(not may_read_itself(), reason="this system forbids it")

CHILD = """
import sys
from aiodist.transports import remote
address, proof = remote.offered()
data = memoryview(bytes(range(256)) * 1000)
print(address, proof.hex(), remote.address_of(data), flush=True)
sys.stdin.read()
"""


@needs_reading
def test_memory_of_another_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        where, shown, start = child.stdout.readline().split()
        proof = (int(where), bytes.fromhex(shown))
        data = bytearray(256_000)
        try:
            remote.check(child.pid, proof)
            remote.read(child.pid, int(start), memoryview(data))
        except PermissionError:
            pytest.skip("this system lets a process read none but its children, or nobody")
        finally:
            os.kill(child.pid, signal.SIGKILL)
        assert data == bytes(range(256)) * 1000
        child.wait()
        with pytest.raises(OSError, match=f"memory of process {child.pid} was not read: No such"):
            remote.read(child.pid, int(start), memoryview(data))


@needs_reading
def test_another_process_has_no_such_proof() -> None:
    address, proof = remote.offered() or (0, b"")
    remote.check(os.getpid(), (address, proof))
    with pytest.raises(OSError, match=f"process {os.getpid()} is not the one that offers"):
        remote.check(os.getpid(), (address, bytes(len(proof))))


@needs_reading
def test_a_forked_copy_is_another_process() -> None:
    address, proof = remote.offered() or (0, b"")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        found = remote.offered()
        os.write(writing, b"same" if found == (address, proof) else b"another")
        os._exit(found is None or found[0] != address)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reading, 100) == b"another"
    assert remote.offered() == (address, proof)
    os.close(reading)
    os.close(writing)


@needs_reading
def test_memory_that_is_not_there() -> None:
    with pytest.raises(OSError, match="was not read: Bad address"):
        remote.read(os.getpid(), 4096, memoryview(bytearray(100)))


def test_a_system_that_reads_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_read", None)
    assert remote.offered() is None
    with pytest.raises(OSError, match="this system does not read"):
        remote.read(os.getpid(), 4096, memoryview(bytearray(1)))
