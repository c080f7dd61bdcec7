"""Simulated stream sockets, and their network: what TCP does, as far as a user of sockets can tell.

A socket here has the methods of `socket.socket` that asyncio and the library call. Each direction
of a connection is a `Direction`: bytes are cut, delayed and delivered in order, a limited number
at a time. Its network decides how long that takes, and whether anything gets through. Lost packets
are sent again, so a lossy network is a slow one. A cut holds everything back until it heals, or
until the connection is given up.
"""

from __future__ import annotations

import errno
import selectors
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

from aiodist.testing.virtual_loop import VirtualLoop, current_process
from aiodist.testing.wires import END, RESET, Conditions, Node, Where, Wires

_TRIP = struct.Struct("=148xI")
"""`tcpi_min_rtt` of Linux's `struct tcp_info`, in microseconds."""

SYN_AGAIN = 1.0
"""Seconds after which an unanswered connection is tried again, doubled each time."""


class Direction:
    """One direction of a connection."""

    # The way of a byte, from `send` at one end to `recv` at the other::
    #
    #     sendmsg ── put ──> queue ──────── _arrive ──> arrived ── take ──> recv
    #                        (time, packet)             bytearray
    #             |<------------------- room -------------------->|
    #
    # Unread bytes take room, on both hosts together. If the peer does not read, a sender runs out
    # of it: `sendmsg` takes less, then nothing, and the socket cannot be written until the peer has
    # read. So a simulation tries back-pressure. A cut holds `_arrive` back: everything under way
    # waits in the queue until `Wires.heal`.

    def __init__(self, network: Wires, source: SimSocket, target: SimSocket, room: int) -> None:
        self.network = network  # decides how long everything takes
        self.source = source
        self.target = target
        self.arrived = bytearray()  # bytes that were not read yet
        self.ended = False  # whether no more will come
        # What is on its way, with the time of its arrival, and whether it is only coming in.
        self.queue: deque[tuple[float, object, bool]] = deque()
        self._room = room  # bytes that the system holds between the two
        self._travelling = 0  # bytes in `queue`
        self._last = 0.0  # when the last of `queue` arrives, because nothing overtakes
        self._scheduled = False  # whether the loop will call `_arrive`

    @property
    def room(self) -> int:
        return self._room - self._travelling - len(self.arrived)

    @property
    def travelling(self) -> int:
        """Bytes that were sent and have not arrived."""
        return self._travelling

    def put(self, data: bytes) -> None:
        """Send bytes, maybe in several packets."""
        self._travelling += len(data)
        for packet in self.network.cut(data):
            self._queue(packet)
        self.network.passes(self, len(data), arrived=False)

    def finish(self, how: object) -> None:
        self._queue(how)

    def _queue(self, item: object) -> None:
        network, source = self.network, self.source.node
        due = network.leave(source, len(item)) if isinstance(item, bytes) else network.loop.time()
        self._last = max(self._last, due + network.delay(source, self.target.node))
        self.queue.append((self._last, item, False))
        self.schedule()

    def schedule(self) -> None:
        if self.queue and not self._scheduled:
            self._scheduled = True
            self.network.at(self.queue[0][0], self._arrive)

    def _arrive(self) -> None:
        self._scheduled = False
        network = self.network
        if not self.queue or network.holds(self):  # continued when the network heals
            return
        _, item, comes_in = self.queue.popleft()
        target = self.target
        if isinstance(item, bytes) and target.node.ends is not None and not comes_in:
            self.queue.appendleft((network.come_in(target.node, len(item)), item, True))
            self.schedule()
            return
        # An end that has closed in order still takes the end of the other.
        if target._over if item is END else target.is_over and item is not RESET:
            # The system of the target knows no such connection, so it answers by a reset.
            self.clear()
            network.later(self.source.node, target.node, self.source.broken_by_peer)
            return
        if isinstance(item, bytes):
            self._travelling -= len(item)
            self.arrived += item
            network.passes(self, len(item), arrived=True)
        elif item is END:
            self.ended = True
        else:
            target.broken_by_peer()
            return
        target.changed()
        self.schedule()

    def clear(self) -> None:
        """Drop what is on its way."""
        self.queue.clear()
        self._travelling = 0

    def take(self, limit: int) -> bytes:
        data = bytes(self.arrived[:limit])
        del self.arrived[:limit]
        if data:
            self.source.changed()
        return data


class SimSocket:
    """A stream socket of a process."""

    family = socket.AF_INET
    type = socket.SOCK_STREAM
    proto = socket.IPPROTO_TCP

    def __init__(self, network: Wires, node: Node) -> None:
        self.network = network  # connects it, and carries its bytes
        self.node = node  # the process that it is a file of
        self.closed = False  # by its process
        self.own: Where = (node.host, 0)  # its address
        self.peer: Where | None = None  # the address at the other end; None: not connected
        self.incoming: Direction | None = None  # what comes from there
        self.outgoing: Direction | None = None  # what goes there
        self.pending: deque[SimSocket] | None = None  # of a listener: connections to accept
        self.backlog = 0  # of a listener: how many connections may wait to be accepted
        self._error: OSError | None = None  # raised by the next call that looks at the connection
        self._over = False  # nothing can be sent or received any more
        self._shut = False  # nothing can be sent any more
        self._number = next(network.numbers)  # the result of `fileno`
        node.sockets[self] = None
        network.loop.selector.follow(self)

    def __repr__(self) -> str:
        return f"<SimSocket {self.own} to {self.peer}{' closed' if self.closed else ''}>"

    @property
    def is_over(self) -> bool:
        """Whether its system has forgotten the connection."""
        return self.closed or self._over

    # ---- what the network does to it ----

    def changed(self) -> None:
        if not self.closed:
            self.network.loop.selector.touch(self)

    def connected(self, own: Where, peer: Where, incoming: Direction, outgoing: Direction) -> None:
        self.own, self.peer = own, peer
        self.incoming, self.outgoing = incoming, outgoing
        self.changed()

    def fail(self, number: int) -> None:
        """End the connection. The next call that looks at it raises this error."""
        if self._over or self.closed:
            return
        self._over = True
        self._error = OSError(number, errno.errorcode[number])
        if self.outgoing is not None:
            self.outgoing.clear()  # what is coming in is answered by a reset
        self.changed()

    def broken_by_peer(self) -> None:
        # A reset overtakes unread bytes. Whether a reader still gets them depends on its system, so
        # both are tried.
        if self.incoming is not None and self.network.flip():
            self.incoming.arrived.clear()  # a system may drop unread bytes, or keep them
        self.fail(errno.ECONNRESET)

    # ---- being connected ----

    def _syn(self, where: Where, again: float) -> None:
        """Ask for a connection. If nothing comes back, ask again after `again` seconds."""
        network, own, node = self.network, self.node, self.network.nodes.get(where[0])
        if self.closed or not own.alive:
            return
        if node is None:
            network.later(own, own, self.fail, errno.EHOSTUNREACH)
        elif network.is_cut(own, node):
            network.later_by(again, self._syn, where, again * 2)
        else:
            network.later(own, node, self._ask, node, where, again)

    def _ask(self, node: Node, where: Where, again: float) -> None:
        """Handle the request at `node`."""
        network = self.network
        listener: SimSocket | None = network.listeners.get(where)
        if self.closed or node.silent:
            return
        if listener is None or listener.pending is None:
            network.later(node, self.node, self.fail, errno.ECONNREFUSED)
            return
        if len(listener.pending) >= listener.backlog:
            network.later_by(again, self._syn, where, again * 2)
            return
        accepted = SimSocket(network, node)
        there = Direction(network, self, accepted, network.room())
        back = Direction(network, accepted, self, network.room())
        accepted.connected(where, self.own, incoming=there, outgoing=back)
        listener.pending.append(accepted)
        listener.changed()
        network.later(node, self.node, self._answer, accepted, there, back)

    def _answer(self, accepted: SimSocket, there: Direction, back: Direction) -> None:
        if self.closed or not self.node.alive:
            accepted.broken_by_peer()
        else:
            self.connected(self.own, accepted.own, incoming=back, outgoing=there)

    # ---- what a selector asks ----

    def events(self) -> int:
        if self.closed or not self.node.runs:
            return 0
        if self.pending is not None:
            return selectors.EVENT_READ if self.pending else 0
        if self._over:
            return selectors.EVENT_READ | selectors.EVENT_WRITE
        found = 0
        if self.incoming is not None and (self.incoming.arrived or self.incoming.ended):
            found |= selectors.EVENT_READ
        if self.outgoing is not None and (self._shut or self.outgoing.room > 0):
            found |= selectors.EVENT_WRITE
        return found

    # ---- methods of `socket.socket` ----

    def fileno(self) -> int:
        return self._number if not self.closed or not self.node.alive else -1

    def setblocking(self, flag: bool) -> None:
        if flag:
            raise ValueError("a simulated socket does not block")

    def gettimeout(self) -> float:
        return 0.0

    def setsockopt(self, *option: Any) -> None: ...

    def getsockopt(self, level: int, name: int, size: int = 0) -> Any:
        if name == getattr(socket, "TCP_INFO", None) and size >= _TRIP.size:
            trip = 2 * self.network.conditions.delay[0]
            return _TRIP.pack(round(trip * 1e6)).ljust(size, b"\0")
        if name == getattr(socket, "TCP_CONGESTION", None):
            return self.network.conditions.control.encode().ljust(size, b"\0")
        if size:
            return bytes(size)
        if (level, name) == (socket.SOL_SOCKET, socket.SO_ERROR):
            error, self._error = self._error, None
            return 0 if error is None else error.errno
        return 0

    def getsockname(self) -> Where:
        return self.own

    def getpeername(self) -> Where:
        if self.peer is None:
            raise OSError(errno.ENOTCONN, "not connected")
        return self.peer

    def bind(self, where: Where) -> None:
        host, port = where[:2]
        if host in ("0.0.0.0", ""):
            host = self.node.host
        if host not in (self.node.host, "127.0.0.1"):
            raise OSError(errno.EADDRNOTAVAIL, f"{host} is no address of {self.node}")
        own = self.node.host, port or next(self.node.ports)
        if own in self.network.listeners:
            raise OSError(errno.EADDRINUSE, f"{own} is in use")
        self.own = own
        self.network.listeners[own] = self

    def listen(self, backlog: int = 128) -> None:
        self.backlog = backlog
        if self.pending is None:
            self.pending = deque()

    def accept(self) -> tuple[SimSocket, Where]:
        if not self.pending:
            raise BlockingIOError(errno.EAGAIN, "no connection is waiting")
        sock = self.pending.popleft()
        assert sock.peer is not None
        return sock, sock.peer

    def connect(self, where: Where) -> None:
        if self.peer is None:
            self.own = self.node.host, next(self.node.ports)
            self.peer = where
            self._syn(where, SYN_AGAIN)
        raise BlockingIOError(errno.EINPROGRESS, "on its way")

    def send(self, data: Any, flags: int = 0) -> int:
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Sequence[Any]) -> int:
        self._raise_error()
        if self._over or self._shut:
            raise BrokenPipeError(errno.EPIPE, "the connection is over")
        way = self.outgoing
        if way is None:
            raise BlockingIOError(errno.EAGAIN, "not connected yet")
        room = self.network.shorten(way.room)
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, "no room")
        taken: list[bytes] = []
        for buffer in buffers:
            view = memoryview(buffer).cast("B") if len(buffer) else memoryview(b"")
            part = bytes(view[:room])
            taken.append(part)
            room -= len(part)
            if not room:
                break
        data = b"".join(taken)
        if data:
            way.put(data)
            self.node.has_sent(len(data))
        return len(data)

    def recv(self, limit: int, flags: int = 0) -> bytes:
        self._raise_error()
        way = self.incoming
        if way is not None and way.arrived:
            return bytes(way.arrived[:limit]) if flags & socket.MSG_PEEK else way.take(limit)
        if self._over or (way is not None and way.ended):
            return b""
        raise BlockingIOError(errno.EAGAIN, "nothing has come")

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        data = self.recv(nbytes or len(view), flags)
        view[: len(data)] = data
        return len(data)

    def recvmsg_into(self, buffers: Sequence[Any]) -> tuple[int, list[Any], int, Where | None]:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        data = self.recv(sum(len(view) for view in views))
        at = 0
        for view in views:
            part = data[at : at + len(view)]
            view[: len(part)] = part
            at += len(part)
        return len(data), [], 0, self.peer

    def _raise_error(self) -> None:
        if self.closed:
            raise OSError(errno.EBADF, "the socket is closed")
        if self._error is not None and not (self.incoming is not None and self.incoming.arrived):
            error, self._error = self._error, None
            raise error

    def shutdown(self, how: int) -> None:
        if self._over or self.outgoing is None:
            raise OSError(errno.ENOTCONN, "not connected")
        if how in (socket.SHUT_WR, socket.SHUT_RDWR) and not self._shut:
            self._shut = True
            self.outgoing.finish(END)

    def close(self) -> None:
        if self.closed:
            return
        # Linux resets a connection that is closed with unread bytes, because its peer would take
        # them for read. A goodbye behind such bytes is lost, as in reality.
        unread = self.incoming is not None and len(self.incoming.arrived) > 0
        self._end(END if not unread else RESET)

    def vanish(self, how: object | None) -> None:
        """Handle that its process was killed: the peer sees END, RESET or (None) nothing."""
        if not self.closed:
            self._end(how)
            # What the dead process may still be doing in this turn of the loop must not fail.
            self.network.loop.selector.follow(self)

    def _end(self, how: object | None) -> None:
        self.node.sockets.pop(self, None)
        self.network.loop.selector.drop(self)
        if self.network.listeners.get(self.own) is self:
            del self.network.listeners[self.own]
        self.closed = True
        if self.pending is not None:
            for sock in self.pending:
                sock.vanish(None if how is None else RESET)
            self.pending.clear()
        if self.incoming is not None:
            self.incoming.arrived.clear()
        open_end = self.outgoing if not self._over else None
        if open_end is not None and (how is RESET or (how is END and not self._shut)):
            open_end.finish(how)


class Network(Wires):
    """The network of a virtual loop. `seed` decides delays, losses and sizes of packets."""

    def __init__(
        self, loop: VirtualLoop, seed: int | str = 0, conditions: Conditions | None = None
    ) -> None:
        super().__init__(loop, seed, conditions)
        loop.make_socket = self._socket

    def _socket(self, family: int, kind: int, proto: int) -> Any:
        process = current_process()
        if not isinstance(process, Node):
            raise OSError(
                errno.ENETDOWN, "no node has called this: run it by node.spawn(coroutine)"
            )
        if not process.alive:
            raise OSError(errno.ENETDOWN, f"{process} is dead")
        return cast(Any, SimSocket(self, process))
