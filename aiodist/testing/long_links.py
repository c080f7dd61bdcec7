"""Distant hosts on this machine: network namespaces joined by lines with bandwidth, delay and a
queue.

Each namespace has a TUN device. A thread of this process takes each packet that its kernel sends
there, and gives it to the receiver's kernel when the line would have brought it. So TCP is that of
the kernels, with their windows, acknowledgements and losses. A proxy would end each connection: TCP
would see a peer as near as the proxy, and only an answer would show its distance.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple

from aiodist.testing.owned_namespaces import remove, remove_left_over, this_process
from aiodist.testing.wires import Port

NETWORK: Final = "10.231.9"
"""The hosts have addresses of this network, from .1 on."""

MTU: Final = 9000
"""Bytes of a packet: large, because each costs this machine some processor time."""

_BUFFERS: Final = "4096 131072 67108864"
"""Least, first and most bytes of the buffers of a connection. Most systems allow 4 MiB that is sent
and not acknowledged, of which a third or more is overhead. That is less than what is on a line of
50 MB/s and 100 ms."""

_ATTACH, _TUN, _PLAIN = 0x400454CA, 0x0001, 0x1000  # TUNSETIFF, IFF_TUN, IFF_NO_PI


@dataclass(frozen=True, slots=True)
class LongLine:
    """A line from a host to all others, each way.

    `rate` is in bytes per second, and `delay` in seconds from host to host. `queue` is how many
    bytes wait before it; more is dropped. Of the rest, the share `loss` of the packets is lost,
    chosen by `seed`.
    """

    rate: float
    delay: float
    queue: int = 0
    """0: as much as is on the way there and back, as is usual for routers, but at least 1 MiB."""
    loss: float = 0.0
    seed: int = 0

    @property
    def room(self) -> int:
        """The bytes that its queue takes."""
        return self.queue or max(1 << 20, round(2 * self.delay * self.rate))


class _Event(NamedTuple):
    when: float
    order: int
    to: int
    """The receiving host."""
    packet: bytes
    arrives: bool
    """It has also passed the port of its receiver."""


class Switch:
    """Carries packets between the TUN devices `files`, through a port for each direction of each
    host.

    Time goes by only through the arguments.
    """

    def __init__(self, line: LongLine, files: Sequence[int]) -> None:
        self._line = line
        self._files = files
        # One for each host, so that a host's losses do not depend on what others send.
        self._chances = [Random(f"{line.seed} {src}") for src in range(len(files))]
        self.lost = 0
        """Packets that the lines have lost, without those that found their queue full."""
        self.up = [Port(line.rate, line.room) for _ in files]
        self.down = [Port(line.rate, line.room) for _ in files]
        self._events: list[_Event] = []  # a heap
        self._order = 0

    def due(self) -> float | None:
        """Return when the next packet comes to a port; None: there is none."""
        return self._events[0].when if self._events else None

    def send(self, src: int, packet: bytes, now: float) -> None:
        """Take a packet of the host `src`. Packets for unknown hosts, or not IPv4, are dropped."""
        to = packet[19] - 1
        if packet[0] >> 4 == 4 and 0 <= to < len(self._files):
            left = self.up[src].take(now, len(packet))
            if left is not None and self._chances[src].random() < self._line.loss:
                self.lost += 1
            elif left is not None:
                self._push(left + self._line.delay, to, packet, arrives=False)

    def turn(self, now: float) -> None:
        """Do what was due by `now`."""
        while self._events and self._events[0].when <= now:
            when, _, to, packet, arrives = heapq.heappop(self._events)
            if arrives:
                with contextlib.suppress(OSError):  # its host is gone
                    os.write(self._files[to], packet)
            elif (left := self.down[to].take(when, len(packet))) is not None:
                self._push(left, to, packet, arrives=True)

    def _push(self, when: float, to: int, packet: bytes, *, arrives: bool) -> None:
        self._order += 1
        heapq.heappush(self._events, _Event(when, self._order, to, packet, arrives))


@dataclass(frozen=True, slots=True)
class FarHost:
    """A host: its network namespace, its address, and the device that leads to the others."""

    namespace: str
    address: str
    device: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """The beginning of a command that runs there."""
        return (shutil.which("ip") or "ip", "netns", "exec", self.namespace)


@contextlib.contextmanager
def far_hosts(count: int, line: LongLine) -> Iterator[tuple[list[FarHost], Switch]]:
    """Make hosts, each joined to the others by a `line` of its own. They are removed afterwards.

    Raises OSError if that is impossible: it needs root, /dev/net/tun, and `ip` of iproute2.
    """
    if shutil.which("ip") is None:
        raise OSError("network namespaces need `ip` of the package iproute2")
    remove_left_over()
    own, numbers = os.getpid() % 1_000_000, range(1, count + 1)
    hosts = [
        FarHost(name, f"{NETWORK}.{number}", f"af{own}x{number}")
        for number, name in zip(numbers, this_process().names("far", numbers), strict=True)
    ]
    with contextlib.ExitStack() as stack:
        files = [_host(stack, host) for host in hosts]
        switch = Switch(line, files)
        wake, stop = os.pipe()
        stack.callback(os.close, wake)
        thread = threading.Thread(target=_carry, args=(switch, files, wake), daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(os.close, stop)
        yield hosts, switch


def _host(stack: contextlib.ExitStack, host: FarHost) -> int:
    """Make a host, and return the file of its TUN device."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    stack.callback(os.close, file)
    fcntl.ioctl(file, _ATTACH, struct.pack("16sH22x", host.device.encode(), _TUN | _PLAIN))
    name, device = host.namespace, host.device
    _ip("netns", "add", name)
    stack.callback(remove, [name])
    _ip("link", "set", device, "netns", name)
    _ip("-n", name, "addr", "add", f"{host.address}/24", "dev", device)
    _ip("-n", name, "link", "set", device, "mtu", str(MTU), "txqueuelen", "10000", "up")
    _ip("-n", name, "link", "set", "lo", "up")
    for buffers in ("tcp_rmem", "tcp_wmem"):
        path = f"/proc/sys/net/ipv4/{buffers}"
        _ip("netns", "exec", name, "sh", "-c", f"echo {_BUFFERS} > {path}")
    return file


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)
    except subprocess.CalledProcessError as error:
        raise OSError(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from error


def _carry(switch: Switch, files: Sequence[int], stop: int) -> None:
    """Carry packets until `stop` is at its end."""
    # A line does not wait for a core. If this thread did, queues would fill that otherwise would
    # not.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_RR, os.sched_param(1))
    poll = select.epoll()
    with poll:
        poll.register(stop, select.EPOLLIN)
        sources = {file: src for src, file in enumerate(files)}
        for file in files:
            poll.register(file, select.EPOLLIN)
        while True:
            due = switch.due()
            # A wait is at least one tick. What is due sooner leaves with what follows.
            ready = poll.poll(-1 if due is None else max(0.001, due - time.monotonic()))
            for file, _ in ready:
                if file == stop:
                    return
                _read_all(switch, sources[file], file)
            switch.turn(time.monotonic())


def _read_all(switch: Switch, src: int, file: int) -> None:
    now = time.monotonic()
    with contextlib.suppress(BlockingIOError):
        while True:
            switch.send(src, os.read(file, MTU), now)
