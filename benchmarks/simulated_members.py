"""More members than one machine has ports for: joins and a barrier, in virtual time.

The coordinator is the real one from the bytes that come to the bytes that go: its connections, its
state machine, what it decodes and encodes. Only the sockets are missing. The virtual clock goes on
by the processor time that each of its steps takes, as measured while it is carried out; by what the
kernel takes of it for each connection, which is the difference between the processor time of a real
coordinator and of a simulated one, for the same groups; by the time that messages are on their way;
and by the bytes, at the speed of its network. A member is a host of its own: its clock goes on by
what it takes to decode its view.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from aiodist.coordinator.connection import Connection
from aiodist.coordinator.encoding import Encoder
from aiodist.membership.effects import Received, SendMessage
from aiodist.membership.machine import Membership
from aiodist.transports.sparing import Sparing
from aiodist.wire.codec import decode_message, encode_message
from aiodist.wire.frames import Decoder
from aiodist.wire.limits import MAX_CONTROL_HEADER, MAX_REPLY
from aiodist.wire.messages import Challenge, EpochView, Hello, JoinRequest, Message, Proof, Welcome
from aiodist.wire.proof import NONCE_BYTES, make_proof
from aiodist.wire.recovery import BallotResult, Purpose, Vote

TOKEN = b"of this benchmark"
ONE_WAY = 0.25e-3
"""Seconds that a message is on its way."""
BYTES_A_SECOND = 1.25e9
"""Of the coordinator's network: 10 Gbit/s."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Virtual `seconds` until all are through the barrier; of the coordinator's processor, `busy`
    by measured code, and `kernel` for each connection. `sent`: bytes."""

    members: int
    size: int
    seconds: float
    busy: float
    kernel: float
    sent: int

    def __str__(self) -> str:
        return (
            f"{self.members:,} members in groups of {self.size:,}, simulated: joins and a barrier "
            f"in {self.seconds:.1f} s of virtual time, {self.sent / 1e9:.2f} GB sent; of the "
            f"coordinator's processor {self.busy:.1f} s for its code, and "
            f"{1e6 * self.kernel:.0f} µs a member for the kernel"
        )


class Simulation:
    """The coordinator as its connections see it, and the clock."""

    token: bytes | None = TOKEN
    name = "simulated"
    incarnation = 1
    returns = True

    def __init__(self, members: int, size: int, kernel: float) -> None:
        self.sparing = Sparing(logging.getLogger("aiodist.benchmark"))
        self._machine = Membership()
        self._kernel = kernel
        self._now = self._free = self._sent_until = 0.0
        self.busy = 0.0
        self.sent = 0
        self.through = 0
        self._turn = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._out: list[tuple[_Member, bytes]] = []
        self.views: dict[bytes, tuple[EpochView, float]] = {}
        """What the members of a group are told, and what it took the first of them to decode."""
        self._members = [_Member(self, number, number // size, size) for number in range(members)]

    def run(self) -> float:
        """Until all are through the barrier: how long that took."""
        for member in self._members:
            self.at(ONE_WAY, partial(self.serve, member, member.hello(), self._kernel))
        while self._due:
            self._now, _, act = heapq.heappop(self._due)
            act()
        assert self.through == len(self._members)
        return self._now

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._turn), act))

    def say(self, member: _Member, data: bytes, after: float = 0.0) -> None:
        """A member says something, so many seconds from now."""
        self.at(self._now + after + ONE_WAY, partial(self.serve, member, data))

    def serve(self, member: _Member, data: bytes, extra: float = 0.0) -> None:
        """The coordinator reads it, as soon as it has read all that came before."""
        start = time.process_time()
        member.connection.data_received(data)
        busy = time.process_time() - start
        self.busy += busy
        self._free = max(self._free, self._now) + busy + extra
        out, self._out = self._out, []
        for to, said in out:
            self.sent += len(said)
            self._sent_until = max(self._sent_until, self._free) + len(said) / BYTES_A_SECOND
            self.at(self._sent_until + ONE_WAY, partial(to.heard, said))

    def write(self, member: _Member, data: bytes) -> None:
        self._out.append((member, data))

    # What connections call.

    def opened(self, connection: Connection) -> None: ...

    def welcomed(self, connection: Connection) -> None: ...

    def closed(self, connection: Connection, reason: str) -> None:
        raise AssertionError(reason)

    def received(self, connection: Connection, request: int, message: Message) -> None:
        encoder = Encoder()
        for effect in self._machine.step(Received(connection.number, request, message), self._now):
            if isinstance(effect, SendMessage):
                to = self._members[effect.conn].connection
                to.send(encoder.frame(effect.message, effect.request))


class _Member:
    """A member, and the coordinator's end of its connection: all that is asked of a transport."""

    def __init__(self, simulation: Simulation, number: int, group: int, size: int) -> None:
        self._simulation = simulation
        self._ask = JoinRequest(
            group=f"group {group}",
            id=secrets.token_hex(16),
            size=size,
            pid=os.getpid(),
            host="127.0.0.1",
            host_id="of the benchmark",
            addresses=(f"tcp://127.0.0.1:{10_000 + secrets.randbelow(50_000)}",),
        )
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._decoder = Decoder(max_header=MAX_CONTROL_HEADER, max_payload=MAX_REPLY)
        sock = SimpleNamespace(family=socket.AF_UNIX)
        self.connection = Connection(simulation, number, cast(Any, sock))
        self.connection.connection_made(cast(Any, self))

    def hello(self) -> bytes:
        return encode_message(Hello(self._nonce))

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        self._simulation.write(self, data)

    def heard(self, data: bytes) -> None:
        """What it answers, and how long that takes it."""
        start = time.process_time()
        spent = 0.0
        for frame in self._decoder.feed(data):
            known = self._simulation.views.get(frame.payload)
            _, message = decode_message(frame) if known is None else (0, known[0])
            if isinstance(message, Challenge):
                mac = make_proof(TOKEN, "member", self._nonce, message.nonce)
                answer = encode_message(Proof(mac))
            elif isinstance(message, Welcome):
                answer = encode_message(self._ask, 1)
            elif isinstance(message, EpochView):
                answer = encode_message(Vote(message.context, 0, Purpose.AGREE), 2)
                if known is None:
                    known = message, time.process_time() - start
                    self._simulation.views[frame.payload] = known
                spent = known[1]
            else:
                assert isinstance(message, BallotResult), message
                self._simulation.through += 1
                return
            self._simulation.say(self, answer, max(spent, time.process_time() - start))


async def _simulated(members: int, size: int, kernel: float) -> Figures:
    """In a loop, for connections ask for timers there. It has no turn meanwhile."""
    simulation = Simulation(members, size, kernel)
    seconds = simulation.run()
    return Figures(members, size, seconds, simulation.busy, kernel, simulation.sent)


def simulate(members: int, size: int, real: float, real_size: int) -> Figures:
    """`real`: the processor time that a real coordinator takes a member, in groups of `real_size`:
    what it takes more than the simulated one is the kernel's."""
    groups = min(100, max(1, members // real_size))
    few = asyncio.run(_simulated(groups * real_size, real_size, 0.0))
    kernel = max(0.0, real - few.busy / few.members)
    return asyncio.run(_simulated(members, size, kernel))
