"""Attacks on listeners: `make fuzz` and `make crowd`.

``fuzz`` sends damaged and random frames to a coordinator and to ranks, as a stranger, as a member
of their group (`hostile.py`), and as a coordinator to who connects; ``crowd`` opens connections
that never finish the greeting.

All the while the group that lives there has to work. The process must not end, nothing in it may
fail in a way that aiodist does not expect, and its memory stays within `MOST_MIB` of what it had
before. Members that are attacked by others of their group get rid of them: who is not evicted by
their lies shrinks the group, and its sums are right.
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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from corpus import CONTROL, PEER, Corpus
from hostile import FLOODS, QUIET, Hostile, Wire, show_token

from aiodist.wire import codec, kinds, messages
from aiodist.wire.frames import encode, pack_fields
from aiodist.wire.messages import JoinRequest
from aiodist.wire.proof import make_proof

MOST_MIB = 64.0
"""Memory that an attack may cost."""

TOKEN = b"the token of the target"
HOSTILE = 6
"""Members of a group that are the attacker's, beside the two that are attacked."""

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

    def check(self) -> dict[str, Any]:
        """Whether the group works, and nothing has failed that may not; its memory."""
        found: dict[str, Any] = self.tell("check")
        assert not found["bugs"], "\n".join(found["bugs"])
        return found

    def tell(self, command: str, **fields: object) -> Any:
        """Give a command: its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": command, **fields}) + "\n")
        self._process.stdin.flush()
        return self._answer()

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
    """Attacks, from one seed."""

    def __init__(self, seed: int) -> None:
        self.corpus = Corpus(seed)
        self.rng = self.corpus.rng
        self.sent = 0
        self.ends: Counter[str] = Counter()

    # -- strangers, and who has the token but is of no group that matters --------------------------

    def attack(self, door: tuple[str, int], kind: str) -> None:
        """One connection: a greeting that goes some way, then frames, until it is closed."""
        rng = self.rng
        with contextlib.suppress(OSError), socket.create_connection(door, timeout=10) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            let_in = False
            if rng.random() < 0.8:
                let_in = self._greet(sock, kind)
            if let_in:
                frames = [*self._join(), *[self._quiet() for _ in range(100)]]
                frames += [self._any(), self.corpus.damaged(self.corpus.bad_control())]
            elif kind == "coordinator":
                frames = [self.corpus.damaged(self._any()) for _ in range(10)]
            else:
                frames = [self.corpus.damaged(self._peer()) for _ in range(10)]
            self.sent += len(frames)
            sock.sendall(b"".join(frames))
            sock.shutdown(socket.SHUT_WR)
            heard = b""
            while more := sock.recv(65536):
                heard += more
            assert let_in or NAME not in heard, "a stranger heard the name of the group"

    def _join(self) -> list[bytes]:
        """Mostly it becomes a member of some small group first."""
        given = {"group": self.rng.choice("ab"), "size": 1, "min_size": None, "max_size": None}
        ask = self.corpus.control(JoinRequest, **given, rank=None, id=self.rng.choice("xyz"))
        return [ask] if self.rng.random() < 0.8 else []

    def _quiet(self) -> bytes:
        return self.corpus.control(self.corpus.pick(QUIET))

    def _any(self) -> bytes:
        if self.rng.random() < 0.5:
            return self.corpus.bad_control()
        return self.corpus.control(self.corpus.pick(CONTROL))

    def _peer(self) -> bytes:
        way = self.rng.randrange(3)
        if way == 0:
            return self.corpus.own()
        return self.corpus.bad_peer() if way == 1 else self.corpus.peer(self.corpus.pick([*PEER]))

    def _greet(self, sock: socket.socket, kind: str) -> bool:
        """Whether it was let in: with the token, where it is used."""
        rng, damaged = self.rng, self.corpus.damaged
        nonce = rng.randbytes(32)
        self.sent += 2
        if kind == "rank":
            hello = encode(pack_fields(kinds.HELLO, kinds.MAGIC, kinds.VERSION, nonce))
            sent = hello if rng.random() < 0.9 else damaged(hello)
            sock.sendall(sent)
            if sent == hello:  # else there may be no answer
                sock.recv(4096)
            mark = rng.choice([rng.randbytes(8), rng.randrange(-1, 3)])
            claim = rng.choice([(0, 0), (rng.randrange(-1, 9), rng.getrandbits(60)), ()])
            proof = encode(pack_fields(kinds.PROOF, mark, rng.randbytes(32), *claim))
            sock.sendall(proof if rng.random() < 0.5 else damaged(proof))
            return False
        token = TOKEN if rng.random() < 0.5 else b"guessed"
        show_token(Wire(sock), token)
        return token == TOKEN

    # -- members of the group that is attacked -----------------------------------------------------

    def betray(self, attacked: Target, number: int) -> None:
        """A group in which most members are hostile: the others get rid of them, and go on."""
        name = f"betrayed {number}"
        attacked.tell("suffer", group=name, size=2 + HOSTILE)
        door = attacked.doors[0]
        members = [
            Hostile(self.corpus, door, name, TOKEN, dials=n % 2 == 0, size=2 + HOSTILE)
            for n in range(HOSTILE)
        ]
        try:
            for member in members:
                member.join()
            if number % 4 == 3:  # instead of variety, one thing too often
                members[0].flood(FLOODS[number // 4 % len(FLOODS)])
            for member in members:
                member.attack()
                self.sent += member.sent
        finally:
            for member in members:
                member.close()
        self.ends.update(attacked.tell("over"))

    # -- a coordinator that is none ----------------------------------------------------------------

    def deceive(self, attacked: Target) -> None:
        """Somebody connects to a coordinator that answers with whatever comes to its mind."""
        corpus, rng = self.corpus, self.rng
        token = TOKEN if rng.random() < 0.7 else None
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(5.0)
            address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            attacked.tell("dial", address=address, token=token and token.decode())
            with contextlib.suppress(OSError), listener.accept()[0] as sock:
                wire = Wire(sock)
                hello = codec.decode_message(wire.frame())[1]
                assert isinstance(hello, messages.Hello)
                if rng.random() < 0.8:
                    nonce = rng.randbytes(32)
                    wire.send(codec.encode_message(messages.Challenge(nonce, token is not None)))
                    wire.frame()
                    mac = make_proof(token or b"", "coordinator", hello.nonce, nonce)
                    welcome = messages.Welcome("h", mac if token else b"", "c", 1, False)
                    wire.send(codec.encode_message(welcome))
                frames = [corpus.control(corpus.pick(CONTROL)) for _ in range(30)]
                frames += [corpus.damaged(self._any()) for _ in range(3)]
                for frame in frames:
                    wire.send(frame)
                    self.sent += 1
        self.ends.update(f"deceived: {end}" for end in attacked.tell("over"))


def fuzz(frames: int, seed: int, seconds: float) -> dict[str, Any]:
    """Send at least `frames` frames, or for `seconds`, whatever is reached first."""
    fuzzer = Fuzzer(seed)
    start = time.monotonic()
    rounds = 0
    with target() as attacked:
        while fuzzer.sent < frames and time.monotonic() - start < seconds:
            for door, kind in zip(attacked.doors, ("coordinator", "rank", "rank"), strict=True):
                for _ in range(20):
                    fuzzer.attack(door, kind)
            fuzzer.betray(attacked, rounds)
            fuzzer.deceive(attacked)
            attacked.check_memory()
            rounds += 1
    return {
        "frames": fuzzer.sent,
        "connections": 60 * rounds,
        "groups betrayed": rounds,
        "ends": dict(fuzzer.ends.most_common()),
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
