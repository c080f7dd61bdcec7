"""What it costs to carry bytes over TCP, by each way that Linux has: ``python -m
benchmarks.ways_to_send [--mib 256] [--rounds 5]``.

One thread sends from memory that processes can share, another one receives into memory of its own,
both by calls of up to a MiB, over the loopback device. Prints the processor time of each of them
and of both, in ms: the least of all rounds, which take turns. What comes is compared with what was
sent.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

CALL = 1 << 20
"""Bytes of one call."""

SO_ZEROCOPY = getattr(socket, "SO_ZEROCOPY", 60)
MSG_ZEROCOPY = getattr(socket, "MSG_ZEROCOPY", 0x4000000)

_COMPLETION = struct.Struct("=8xII")
"""Of `struct sock_extended_err`: the first and the last call that is complete."""


class Source(NamedTuple):
    """What is sent: a file in memory, and the same bytes mapped."""

    fd: int
    memory: memoryview


Way = Callable[[socket.socket, Source], None]
"""Sends all of it. Raises OSError where the system does not know that way."""


def by_send(sock: socket.socket, source: Source) -> None:
    """The kernel copies, as for aiodist."""
    for at in range(0, len(source.memory), CALL):
        sock.sendall(source.memory[at : at + CALL])


def by_sendfile(sock: socket.socket, source: Source) -> None:
    """The kernel sends the pages of the file."""
    at = 0
    while at < len(source.memory):
        at += os.sendfile(sock.fileno(), source.fd, at, min(CALL, len(source.memory) - at))


def by_splice(sock: socket.socket, source: Source) -> None:
    """Pages are lent to a pipe, and moved from there to the socket."""
    vmsplice = ctypes.CDLL(None, use_errno=True).vmsplice
    start = ctypes.addressof(ctypes.c_char.from_buffer(source.memory))
    reads, writes = os.pipe()
    try:
        at = 0
        while at < len(source.memory):
            vector = struct.pack("@PN", start + at, len(source.memory) - at)
            lent = vmsplice(writes, vector, ctypes.c_ulong(1), ctypes.c_uint(0))
            if lent < 0:
                raise OSError(ctypes.get_errno(), "vmsplice")
            at += lent
            while lent:
                lent -= os.splice(reads, sock.fileno(), lent)
    finally:
        os.close(reads)
        os.close(writes)


def by_zerocopy(sock: socket.socket, source: Source) -> None:
    """Pages are lent to the socket, which says when it is done with them."""
    sock.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, 1)
    calls = at = 0
    while at < len(source.memory):
        at += sock.send(source.memory[at : at + CALL], MSG_ZEROCOPY)
        calls += 1
    done = -1
    while done < calls - 1:
        try:
            _, said, _, _ = sock.recvmsg(0, 256, socket.MSG_ERRQUEUE)
        except BlockingIOError:
            time.sleep(0.001)
            continue
        for _, _, data in said:
            done = max(done, _COMPLETION.unpack_from(data)[1])


WAYS: dict[str, Way] = {
    "send": by_send,
    "sendfile": by_sendfile,
    "vmsplice, splice": by_splice,
    "MSG_ZEROCOPY": by_zerocopy,
}


def carried(way: Way, source: Source, into: memoryview) -> tuple[float, float]:
    """Carry all of it once: the processor time of who sends, and of who receives."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        out = socket.create_connection(server.getsockname())
        sock, _ = server.accept()
    failed: list[OSError] = []
    spent = 0.0

    def send() -> None:
        nonlocal spent
        begin = time.thread_time()
        try:
            way(out, source)
        except OSError as error:
            failed.append(error)
        spent = time.thread_time() - begin
        out.shutdown(socket.SHUT_WR)

    with closing(out), closing(sock):
        sender = threading.Thread(target=send)
        sender.start()
        begin = time.thread_time()
        at = 0
        while count := sock.recv_into(into[at : at + CALL]):
            at += count
        received = time.thread_time() - begin
        sender.join()
    if failed:
        raise failed[0]
    if into != source.memory:
        raise ValueError("what came is not what was sent")
    return spent, received


def measured(fd: int, mib: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """What each of the ways took in each round; `fd`: an empty file."""
    os.truncate(fd, mib << 20)
    memory = memoryview(mmap.mmap(fd, mib << 20))
    into = memoryview(bytearray(mib << 20))
    memory[:] = os.urandom(CALL) * mib
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, way in WAYS.items():
            try:
                found[name].append(carried(way, Source(fd, memory), into))
            except OSError as error:
                print(f"not measured: {name}: {error}", file=sys.stderr)
    return found


def main(arguments: Sequence[str]) -> int:
    """Measure all ways in turns."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ways_to_send",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mib", type=int, default=256, help="how much is sent")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    with open(os.memfd_create("ways"), "r+b") as file:
        found = measured(file.fileno(), options.mib, options.rounds)
    print(f"{f'{options.mib} MiB, processor ms':24}{'sender':>10}{'receiver':>10}{'both':>10}")
    for name, runs in found.items():
        if runs:
            best = min(runs, key=sum)
            print(f"{name:24}" + "".join(f"{ms * 1e3:10.1f}" for ms in (*best, sum(best))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
