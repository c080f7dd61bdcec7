"""Attacks on listeners: `make fuzz` and `make crowd`.

``fuzz`` sends damaged and random frames to a coordinator and to ranks; ``crowd`` opens connections
that never finish the greeting. All the while the group that lives there has to work; its process
must not end, and its memory stays within `MOST_MIB` of what it had before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

from aiodist.wire import kinds, messages, returning
from aiodist.wire.frames import Decoder, encode, pack_fields, prefix
from aiodist.wire.proof import make_proof

MOST_MIB = 64.0
"""Memory that an attack may cost."""

TOKEN = b"the token of the target"
NAME = b"hidden"
"""The group's name: no byte that a stranger gets may show it."""


class Target:
    """The process that is attacked."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("target.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        doors = [one.removeprefix("tcp://").rpartition(":") for one in self._answer()]
        self.doors = [(host, int(port)) for host, _, port in doors]
        self.check()
        self.idle = self.check()["VmRSS"]
        self.peak = 0.0

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the target has ended: {self._process.wait()}"
        return json.loads(line)

    def check(self) -> dict[str, float]:
        """Whether the group works; its memory."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, float] = self._answer()
        return found

    def check_memory(self) -> None:
        found = self.check()
        self.peak = max(self.peak, found["VmHWM"] - self.idle)
        assert self.peak < MOST_MIB, f"{self.peak:.1f} MiB over idle, the limit is {MOST_MIB:g}"

    def close(self) -> None:
        """End it, in order. Raises AssertionError where it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()


@contextlib.contextmanager
def target() -> Iterator[Target]:
    attacked = Target()
    try:
        yield attacked
        attacked.close()
    finally:
        attacked.kill()


class Fuzzer:
    """Makes frames, from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.sent = 0

    def value(self, depth: int = 0) -> Any:
        """Something that msgpack knows."""
        rng = self.rng
        kind = rng.randrange(12 if depth < 3 else 9)
        if kind < 3:
            return rng.choice([0, 1, -1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63), rng.random()])
        if kind < 5:
            return rng.randbytes(rng.choice([0, 1, 8, 16, 32, 64, 900]))
        if kind < 7:
            return rng.choice(["", "aiodist", "world", "\0", "x" * 300, "\U0010ffff"])
        if kind < 9:
            return rng.choice([None, True, False, float("nan"), float("inf")])
        if kind < 11:
            return [self.value(depth + 1) for _ in range(rng.randrange(6))]
        return {str(n): self.value(depth + 1) for n in range(rng.randrange(4))}

    def control(self) -> bytes:
        """A frame for the coordinator."""
        rng = self.rng
        code = rng.choice([*range(1, 6), *range(10, 28), *range(30, 40), rng.randrange(300)])
        body = msgpack.packb([self.value() for _ in range(rng.randrange(10))])
        return encode(pack_fields(code, rng.choice([0, 1, 7, 2**32 - 1])), body)

    def sound(self) -> bytes:
        """A frame as members send them, but without sense."""
        rng = self.rng
        key, data = rng.choice("abc"), rng.randbytes(rng.randrange(100))
        ask = messages.JoinRequest(
            group=rng.choice(["a", "b"]), id=rng.choice("xyz"), size=rng.randrange(1, 4)
        )
        view = messages.View(ask.group, rng.randrange(1, 4), ())
        message = rng.choice(
            [
                ask,
                messages.Withdraw(),
                messages.Leave(),
                messages.Renew(),
                messages.StatusRequest(),
                returning.Rejoin(ask, rng.randrange(4), view.epoch, view.digest, (1,), (), view),
                returning.Rejoin(ask, rng.randrange(4), view.epoch, data[:16], (), (2,)),
                messages.StoreGet(key),
                messages.StoreSet(key, data, rng.choice([None, 0.01])),
                messages.StoreAdd(key, rng.randrange(-(2**63), 2**63)),
                messages.StoreCompareSet(key, rng.choice([None, data]), data),
                messages.StoreDelete(key),
                messages.StoreWait((key,)),
                messages.StoreWatch(key, rng.random() < 0.5),
                messages.StoreCancel(rng.randrange(9)),
            ]
        )
        return messages.encode_message(message, rng.randrange(9))

    def peer(self) -> bytes:
        """A frame for a rank."""
        fields = [self.value() for _ in range(self.rng.randrange(8))]
        return encode(pack_fields(self.rng.randrange(20), *fields), self.rng.randbytes(2))

    def damaged(self, data: bytes) -> bytes:
        rng = self.rng
        way = rng.randrange(6)
        if way == 0:
            return data
        if way == 1:
            return data[: rng.randrange(len(data) + 1)]
        if way == 2:
            return prefix(rng.randbytes(rng.choice([0, 4, 300])), 2 ** rng.randrange(33) - 1)
        if way == 3:
            return rng.randbytes(rng.randrange(1, 400))
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 6)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)

    def attack(self, door: tuple[str, int], kind: str) -> None:
        """One connection: a greeting that goes some way, then frames, until it is closed."""
        rng = self.rng
        with contextlib.suppress(OSError), socket.create_connection(door, timeout=10) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            let_in = False
            if rng.random() < 0.8:
                let_in = self._greet(sock, kind)
            if let_in:
                frames = [self.sound() for _ in range(100)] + [self.damaged(self.control())]
            else:
                make = self.control if kind == "coordinator" else self.peer
                frames = [self.damaged(make()) for _ in range(10)]
            data = b"".join(frames)
            self.sent += len(frames)
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            heard = b""
            while more := sock.recv(65536):
                heard += more
            assert let_in or NAME not in heard, "a stranger heard the name of the group"

    def _greet(self, sock: socket.socket, kind: str) -> bool:
        """Whether it was let in: with the token, where it is used."""
        rng = self.rng
        nonce = rng.randbytes(32)
        if kind == "rank":
            hello = encode(pack_fields(kinds.HELLO, kinds.MAGIC, kinds.VERSION, nonce))
            sent = hello if rng.random() < 0.9 else self.damaged(hello)
            sock.sendall(sent)
            if sent == hello:  # else there may be no answer
                sock.recv(4096)
            proof = encode(pack_fields(kinds.PROOF, rng.randrange(-1, 3), rng.randbytes(32)))
            sock.sendall(proof if rng.random() < 0.5 else self.damaged(proof))
            self.sent += 2
            return False
        sock.sendall(messages.encode_message(messages.Hello(nonce)))
        [challenge] = Decoder().feed(sock.recv(4096))
        found = messages.decode_message(challenge)[1]
        assert isinstance(found, messages.Challenge)
        token = TOKEN if rng.random() < 0.5 else b"guessed"
        mac = make_proof(token, "member", nonce, found.nonce)
        sock.sendall(messages.encode_message(messages.Proof(mac)))
        self.sent += 2
        return token == TOKEN


def fuzz(frames: int, seed: int, seconds: float) -> dict[str, float]:
    """Send at least `frames` frames, or for `seconds`, whatever is reached first."""
    fuzzer = Fuzzer(seed)
    start = time.monotonic()
    connections = 0
    with target() as attacked:
        while fuzzer.sent < frames and time.monotonic() - start < seconds:
            for door, kind in zip(attacked.doors, ("coordinator", "rank", "rank"), strict=True):
                for _ in range(20):
                    fuzzer.attack(door, kind)
                    connections += 1
            attacked.check_memory()
    return {
        "frames": fuzzer.sent,
        "connections": connections,
        "seconds": round(time.monotonic() - start, 1),
        "MiB over idle": round(attacked.peak, 1),
    }


def crowd(size: int) -> dict[str, float]:
    """Open `size` connections to each listener, that say nothing or the beginning of a greeting."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    beginnings = [b"", b"\x92", encode(pack_fields(kinds.HELLO, kinds.MAGIC, kinds.VERSION))[:9]]
    start = time.monotonic()
    held: list[socket.socket] = []
    closed = 0
    with target() as attacked, contextlib.ExitStack() as stack:
        for n in range(size):
            for door in attacked.doors:
                sock = stack.enter_context(socket.create_connection(door, timeout=10))
                with contextlib.suppress(OSError):
                    sock.sendall(beginnings[n % len(beginnings)])
                held.append(sock)
            if n % 50 == 0:
                attacked.check_memory()
        attacked.check_memory()
        poll = select.poll()
        for sock in held:
            poll.register(sock, select.POLLIN)
        closed = len(poll.poll(0))
    return {
        "connections": len(held),
        "dropped": closed,
        "seconds": round(time.monotonic() - start, 1),
        "MiB over idle": round(attacked.peak, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    ways = parser.add_subparsers(dest="way", required=True)
    fuzzing = ways.add_parser("fuzz")
    fuzzing.add_argument("-n", type=int, default=1_000_000, help="how many frames")
    fuzzing.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    fuzzing.add_argument("--seconds", type=float, default=3600.0, help="how long at most")
    crowding = ways.add_parser("crowd")
    crowding.add_argument("-n", type=int, default=2000, help="connections to each listener")
    given = parser.parse_args()
    if given.way == "fuzz":
        print(f"seed {given.seed}", flush=True)
        print(fuzz(given.n, given.seed, given.seconds))
    else:
        print(crowd(given.n))


if __name__ == "__main__":
    main()
