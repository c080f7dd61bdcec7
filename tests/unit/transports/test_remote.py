"""Memory of other processes, read by the system."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from aiodist.transports import remote
from aiodist.transports.futex import address_of


def may_read_itself() -> bool:
    data = bytearray(1)
    try:
        remote.read(os.getpid(), address_of(memoryview(b"x")), memoryview(data))
    except OSError:
        return False
    return data == b"x"


needs_reading = pytest.mark.skipif(not may_read_itself(), reason="this system forbids it")

CHILD = """
import sys
from aiodist.transports import remote
from aiodist.transports.futex import address_of
offer = remote.offer()
data = memoryview(bytes(range(256)) * 1000)
print(offer.address, offer.shown().hex(), address_of(data), flush=True)
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
            assert remote.holds(child.pid, proof)
            remote.read(child.pid, int(start), memoryview(data))
        except PermissionError:
            pytest.skip("this system lets a process read none but its children, or nobody")
        finally:
            os.kill(child.pid, signal.SIGKILL)
        assert data == bytes(range(256)) * 1000
        child.wait()
        with pytest.raises(OSError, match=f"memory of process {child.pid} was not read: No such"):
            remote.read(child.pid, int(start), memoryview(data))


def offered() -> tuple[remote.MemoryProof, tuple[int, bytes]]:
    proof = remote.offer()
    assert proof is not None
    return proof, (proof.address, proof.shown())


@needs_reading
def test_another_process_has_no_such_proof() -> None:
    proof, (address, shown) = offered()
    assert remote.holds(os.getpid(), (address, shown))
    with pytest.raises(OSError, match=f"process {os.getpid()} is not the one that offers"):
        remote.holds(os.getpid(), (address, bytes(len(shown))))
    proof.withdraw()


@needs_reading
def test_an_offer_that_was_withdrawn() -> None:
    proof, shown = offered()
    other, others = offered()
    proof.withdraw()
    assert not remote.holds(os.getpid(), shown)
    again, anew = offered()  # in the same place
    assert again is proof
    assert not remote.holds(os.getpid(), shown)
    assert remote.holds(os.getpid(), anew)
    assert remote.holds(os.getpid(), others)
    again.withdraw()
    other.withdraw()


@needs_reading
def test_a_forked_copy_is_another_process() -> None:
    proof, (address, shown) = offered()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, b"same" if proof.shown() == shown else b"another")
        os.write(writing, b", same" if offered()[1][1][:8] == shown[:8] else b", another")
        os._exit(proof.address != address)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reading, 100) == b"another, another"
    assert remote.holds(os.getpid(), (address, shown))
    proof.withdraw()
    os.close(reading)
    os.close(writing)


@needs_reading
def test_memory_that_is_not_there() -> None:
    with pytest.raises(OSError, match="was not read: Bad address"):
        remote.read(os.getpid(), 4096, memoryview(bytearray(100)))


def test_a_system_that_reads_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_read", None)
    assert remote.offer() is None
    with pytest.raises(OSError, match="this system does not read"):
        remote.read(os.getpid(), 4096, memoryview(bytearray(1)))
