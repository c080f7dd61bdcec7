"""What a simulated network is made of below its sockets: hosts, time, chance, and faults.

A `Node` is a process on a host of its own. `Wires` know all of them, how long a packet takes, and
whether it gets through. They know sockets only as objects to tell when something breaks.
"""

from __future__ import annotations

import errno
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from aiodist.testing.virtual_loop import Process, VirtualLoop

FIRST_FILE = 1 << 24
"""Numbers of simulated files begin here, because no real one is as high."""

MOST_PACKETS = 8
"""About this many packets a write, at most. More would show nothing new, unless packets take time
to leave."""

IDLE_GIVES_UP = 20.0
"""Seconds after which a cut ends an idle connection, as keep-alive does. A connection with bytes on
their way goes on trying."""

Where = tuple[str, int]

END, RESET = object(), object()
"""The end of a way, behind all bytes: an orderly end, or a broken connection."""


@dataclass(frozen=True)
class Conditions:
    """How a network behaves. Times in seconds, sizes in bytes.

    `delay`: one way, from and to. `loss`: how often a packet has to be sent again, which takes
    `again`. `room`: how much a connection takes before its peer reads, from and to. `largest`: the
    largest packet. `short`: how often a write takes less than there is room for. `rate`: the most
    bytes per second that a host sends, and that it gets; 0: no limit. `control`: the congestion
    control that the systems claim to have. It does not change how packets travel, but with "reno"
    or "cubic" links to distant hosts have several connections.
    """

    delay: tuple[float, float] = (20e-6, 1e-3)
    loss: float = 0.01
    again: float = 0.2
    room: tuple[int, int] = (4096, 1 << 18)
    largest: int = 1 << 16
    short: float = 0.05
    rate: float = 0.0
    control: str = "bbr"

    def __post_init__(self) -> None:
        """Raise ValueError for a network that could never carry anything."""
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss is at least 0 and less than 1, not {self.loss}")
        if not 0 <= self.delay[0] <= self.delay[1] < math.inf:
            raise ValueError(f"delay is two numbers of seconds, the lower first, not {self.delay}")
        if not 0 <= self.again < math.inf:
            raise ValueError(f"again is a number of seconds, at least 0, not {self.again}")
        if not 0 <= self.rate < math.inf:
            raise ValueError(f"rate is bytes per second, or 0 for no limit, not {self.rate}")
        if not 1 <= self.room[0] <= self.room[1] or self.largest < 1:
            raise ValueError(
                f"room is two numbers of bytes, the lower first, and largest one more, each at "
                f"least 1, not {self.room} and {self.largest}"
            )


class Port:
    """One end of a line, one way: packets leave it one after the other. No I/O here."""

    def __init__(self, rate: float, room: float) -> None:
        self._rate = rate
        self._room = room  # bytes that may wait
        self._free = 0.0  # when the last packet that was taken has left
        self.carried = 0
        """Bytes that were taken."""
        self.dropped = 0
        """Packets that were dropped."""

    def take(self, now: float, nbytes: int) -> float | None:
        """Return when a packet that comes `now` has left; None: it is dropped, because the queue is
        full."""
        begins = max(now, self._free)
        if (begins - now) * self._rate + nbytes > self._room:
            self.dropped += 1
            return None
        self._free = begins + nbytes / self._rate
        self.carried += nbytes
        return self._free


class Node(Process):
    """A process on a host of its own. `host` is its address."""

    def __init__(self, network: Wires, host: str) -> None:
        super().__init__(network.loop, host)
        self.host = host
        self.network = network
        self.sockets: dict[Any, None] = {}  # those that it has not closed, in order
        self.died = 0.0  # when it was killed
        self.silent = False
        """Whether it was unplugged, so that peers hear nothing from it, not even that a connection
        broke."""
        self.ports = itertools.count(40000)  # the local ports of its connections
        rate = network.conditions.rate
        self.ends = [Port(rate, math.inf) for _ in "io"] if rate else None
        """Ports through which packets come in, and go out, one after the other."""
        self.on_end: list[Callable[[], None]] = []  # called when it is killed
        self._quota: int | None = None  # bytes that it may send before it is killed; None: no limit

    def kill(self, how: str = "reset") -> None:
        """End the process: "reset" breaks its connections, "silent" is a power failure without a
        word.

        "close" ends the connections as a process does that has read everything.
        """
        if not self.alive:
            return
        endings = {"reset": RESET, "close": END, "silent": None}
        # The system of the dead process decides how its end looks: with unread bytes it resets the
        # connection, and without it ends it in order. A host without power says nothing, and peers
        # learn it by a lease, or by keep-alive. The library has to do the same in all cases.
        ending = endings[how]
        self.end()
        self.died = self.loop.time()
        self.silent = how == "silent"
        for sock in list(self.sockets):
            sock.vanish(ending)
        if self.silent:
            self.network.expect_silence(self)
        for tell in self.on_end:
            tell()

    def kill_after(self, nbytes: int, how: str = "reset") -> None:
        """Kill it once it has sent so many more bytes, most likely in the middle of a frame."""
        self._quota = nbytes
        self._how = how

    def has_sent(self, nbytes: int) -> None:
        if self._quota is not None:
            self._quota -= nbytes
            if self._quota <= 0:
                self._quota = None
                self.kill(self._how)

    def _end_stops(self, stops: Iterable[object]) -> None:
        super()._end_stops(stops)
        for sock in self.sockets:
            sock.changed()


class Wires:
    """The nodes of a network, and what is between them."""

    def __init__(self, loop: VirtualLoop, seed: int | str, conditions: Conditions | None) -> None:
        self.loop = loop
        self.conditions = conditions or Conditions()  # delays and losses
        self.nodes: dict[str, Node] = {}  # by host
        self.bytes_carried = 0  # by all connections
        self._chooser = Random(f"network {seed}")  # decides all that is random
        self.numbers = itertools.count(FIRST_FILE)  # of files
        self.listeners: dict[Where, Any] = {}  # the sockets that listen, by address
        # Partitions that go on, with the pairs of hosts that do not reach each other.
        self._cuts: dict[object, set[frozenset[str]]] = {}
        self._held: dict[Any, None] = {}  # ways with bytes that wait for a cut to end
        # Connections to break: between which hosts, and after how many bytes.
        self._breaks: dict[tuple[frozenset[str], bool], int] = {}
        self.broken = 0
        """How many connections were broken by `break_links` and `break_after`."""

    def node(self, host: str) -> Node:
        """Return the node with that address, made when first asked for."""
        if host not in self.nodes:
            self.nodes[host] = Node(self, host)
        return self.nodes[host]

    def another(self, host: str) -> Node:
        """Make a new process on the host of one that has ended.

        Peers that still have a connection to the old one, because its host was silent, learn that
        it is broken.
        """
        # As with TCP: the host is there again, does not know that connection, and answers its next
        # packet by a reset.
        before = self.nodes[host]
        assert not before.alive
        node = self.nodes[host] = Node(self, host)
        for other in self.nodes.values():
            for sock in other.sockets:
                if sock.outgoing is not None and sock.outgoing.target.node is before:
                    self.later(node, other, sock.broken_by_peer)
        return node

    # ---- faults ----

    def partition(self, some: Iterable[Node], others: Iterable[Node]) -> Callable[[], None]:
        """Let nothing through between `some` and `others`, until `heal`.

        Returns a function that ends this partition alone. Two hosts reach each other if no
        partition is left between them.
        """
        cut, others = object(), list(others)
        self._cuts[cut] = {frozenset((a.host, b.host)) for a in some for b in others if a is not b}

        def are_apart(a: Node, b: Node) -> bool:
            return frozenset((a.host, b.host)) in self._cuts.get(cut, ())

        self.later_by(IDLE_GIVES_UP, self._give_up_idle, are_apart)
        return partial(self._end_cuts, [cut])

    def expect_silence(self, node: Node) -> None:
        """End idle connections of a host that is cut off for good after a while."""
        # Not of its host, where another process may have begun meanwhile.
        self.later_by(IDLE_GIVES_UP, self._give_up_idle, lambda *two: node in two)

    def heal(self) -> None:
        """End all partitions. What was held back goes on."""
        self._end_cuts(list(self._cuts))

    def _end_cuts(self, cuts: Iterable[object]) -> None:
        for cut in cuts:
            self._cuts.pop(cut, None)
        held, self._held = self._held, {}
        for way in held:
            if way.queue and not way.target.node.silent:
                way.schedule()  # it is held again if another partition is left

    def break_links(self, a: Node, b: Node) -> int:
        """Break all connections between `a` and `b`, as a firewall that forgets them. Returns how
        many."""
        broken = 0
        for sock in list(a.sockets):
            way = sock.outgoing
            if way is not None and way.target.node is b:
                sock.broken_by_peer()
                way.target.broken_by_peer()
                broken += 1
        self.broken += broken
        return broken

    def break_after(self, a: Node, b: Node, nbytes: int, *, arrived: bool = False) -> None:
        """Break the connections between `a` and `b` once so many more bytes were sent, both ways
        together.

        `arrived`: once so many have arrived, and may have been read.
        """
        self._breaks[frozenset((a.host, b.host)), arrived] = nbytes

    def passes(self, way: Any, nbytes: int, *, arrived: bool) -> None:
        """Count bytes that were sent by `way`, or have arrived."""
        a, b = way.source.node, way.target.node
        key = frozenset((a.host, b.host)), arrived
        if key in self._breaks:
            self._breaks[key] -= nbytes
            if self._breaks[key] <= 0:
                del self._breaks[key]
                self.at(self.loop.time(), self.break_links, a, b)

    def is_cut(self, a: Node, b: Node) -> bool:
        return (
            a.silent
            or b.silent
            or any(frozenset((a.host, b.host)) in pairs for pairs in self._cuts.values())
        )

    def _give_up_idle(self, are_apart: Callable[[Node, Node], bool]) -> None:
        for node in self.nodes.values():
            for sock in list(node.sockets):
                way = sock.outgoing
                if way is not None and not way.queue and are_apart(node, way.target.node):
                    sock.fail(errno.ETIMEDOUT)

    # ---- what happens to packets on their way ----

    def leave(self, node: Node, nbytes: int) -> float:
        """Return when a packet that `node` sends now has left it."""
        return self._through(node, 1, nbytes)

    def come_in(self, node: Node, nbytes: int) -> float:
        """Return when a packet that has come to `node` now has come in as a whole."""
        return self._through(node, 0, nbytes)

    def _through(self, node: Node, end: int, nbytes: int) -> float:
        now = self.loop.time()
        return now if node.ends is None else node.ends[end].take(now, nbytes) or now

    def delay(self, a: Node, b: Node) -> float:
        """Return the seconds that the next packet takes."""
        conditions = self.conditions
        # A lost packet is sent again after a while, repeatedly. For a stream that is a delay, and
        # everything behind waits as well, because `Way` lets nothing overtake.
        seconds = self._chooser.uniform(*conditions.delay)
        while self._chooser.random() < conditions.loss:
            seconds += conditions.again
        return seconds

    def cut(self, data: bytes) -> Iterator[bytes]:
        """Cut `data` into packets."""
        # A reader must not depend on the cuts of a stream. So now and then a size is odd, from one
        # byte on, which cuts headers and lengths.
        self.bytes_carried += len(data)
        at = 0
        while at < len(data):
            size = self.conditions.largest
            if not self.conditions.rate:
                size = max(size, len(data) // MOST_PACKETS)
            if self._chooser.random() < 0.2:
                size = self._chooser.randint(1, size)
            yield data[at : at + size]
            at += size

    def room(self) -> int:
        """Return how many bytes a new connection takes one way before its peer reads."""
        return self._chooser.randint(*self.conditions.room)

    def shorten(self, room: int) -> int:
        """Return how much of `room` a write takes."""
        if room > 1 and self._chooser.random() < self.conditions.short:
            return self._chooser.randint(1, room)
        return room

    def flip(self) -> bool:
        return self._chooser.random() < 0.5

    def holds(self, way: Any) -> bool:
        """Tell whether what arrives now is held back. It waits then."""
        if not self.is_cut(way.source.node, way.target.node):
            return False
        self._held[way] = None
        return True

    # ---- time of the network, which belongs to no process ----

    def at(self, when: float, callback: Callable[..., object], *args: Any) -> None:
        if not self.loop.is_closed():
            self.loop.call_at(when, callback, *args, context=Context())

    def later_by(self, seconds: float, callback: Callable[..., object], *args: Any) -> None:
        self.at(self.loop.time() + seconds, callback, *args)

    def later(self, a: Node, b: Node, callback: Callable[..., object], *args: Any) -> None:
        """Call it after the time of a packet from `a` to `b`."""
        self.later_by(self.delay(a, b), callback, *args)
