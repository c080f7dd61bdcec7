"""The coordinator actor: the membership state machine behind a listening socket.

It carries control messages only; bulk data goes straight between members. One loop owns it, and
nothing in here is called from elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
import ssl as tls
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from aiodist.membership import (
    Close,
    Disconnected,
    Drain,
    Effect,
    Event,
    Membership,
    Note,
    Received,
    Tick,
)
from aiodist.runtime import inproc_names
from aiodist.runtime.coordinator_connection import Connection
from aiodist.runtime.listening import bind_tcp, bind_unix
from aiodist.wire.address import Address, parse_address
from aiodist.wire.limits import MAX_REPLY
from aiodist.wire.messages import Goodbye, Message, encode_message

logger = logging.getLogger("aiodist.coordinator")

LATE_SECONDS = 0.25
GRACE_SECONDS = 1.0
"""A timer that fires LATE_SECONDS too late shows that this loop was busy, so that signs of life may
lie unread: leases are judged GRACE_SECONDS later."""

GOODBYE_SECONDS = 1.0
"""How long `stop` waits for members to read the goodbye."""

_LEVELS = {"lost": logging.WARNING, "join refused": logging.WARNING, "formed": logging.INFO}


class Coordinator:
    """Keeps track of who is a member of which group. An async context manager.

    `address`: where to listen: ``tcp://host:port`` (port 0 picks a free one), ``tls://``,
    ``unix:///path``, ``inproc://name``. `token`: what members have to prove to have (it is never
    sent). `ssl`: a server-side context; makes ``tcp://`` the same as ``tls://``. `state`: a file
    that keeps epoch numbers growing over restarts.

    Bad bytes, a wrong token, a client that does not read: that connection is closed and logged to
    the logger ``aiodist.coordinator``; the others do not notice.
    """

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:0",
        *,
        token: str | bytes | None = None,
        ssl: tls.SSLContext | None = None,
        state: str | os.PathLike[str] | None = None,
    ) -> None:
        wanted = parse_address(address)
        if wanted.scheme == "tls" and ssl is None:
            raise ValueError(f"{address} needs ssl=, a server-side ssl.SSLContext")
        if ssl is not None:
            if wanted.scheme not in ("tcp", "tls"):
                raise ValueError(f"ssl= is for tcp:// and tls:// addresses, not for {address}")
            wanted = Address("tls", wanted.host, wanted.port)
        if token is not None and not token:
            raise ValueError("the token is empty: give a token, or None for no authentication")
        self.token = token.encode() if isinstance(token, str) else token
        self._wanted = wanted
        self._address: Address | None = None
        self._ssl = ssl
        self._state = None if state is None else Path(state)
        self._saved_epoch = 0
        self._machine: Membership
        self._loop: asyncio.AbstractEventLoop
        self._server: asyncio.Server | None = None
        self._connections: dict[int, Connection] = {}
        self._numbers = itertools.count(1)
        self._adopting: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._changed = asyncio.Event()

    @property
    def address(self) -> str:
        """Where it listens, with the port it got. Raises RuntimeError before `start`."""
        if self._address is None:
            raise RuntimeError("the coordinator does not listen: call start() first")
        return str(self._address)

    async def start(self) -> None:
        """Listen. Raises OSError (EADDRINUSE …), ValueError for a state file that is none."""
        if self._address is not None:
            raise RuntimeError(f"the coordinator listens already, on {self._address}")
        self._loop = asyncio.get_running_loop()
        if self._state is not None:
            self._saved_epoch = _read_epoch(self._state)
        self._machine = Membership(
            wall_offset=time.time() - self._loop.time(), epoch_floor=self._saved_epoch
        )
        wanted = self._wanted
        if wanted.scheme == "inproc":
            inproc_names.register(wanted.host, self._adopt_from_anywhere)
            self._address = wanted
        elif wanted.scheme == "unix":
            sock = bind_unix(wanted.path)
            self._server = await self._loop.create_unix_server(self._connection, sock=sock)
            self._address = wanted
        else:
            sock = await bind_tcp(wanted)
            self._server = await self._loop.create_server(
                self._connection, sock=sock, ssl=self._ssl
            )
            self._address = Address(wanted.scheme, wanted.host, sock.getsockname()[1])
        logger.info(
            "listening on %s",
            self._address,
            extra={"event": "listening", "address": str(self._address)},
        )

    async def stop(self, drain: float = 0.0) -> None:
        """Take no more joins, wait until all groups have ended but at most `drain` seconds, say
        goodbye and close. Idempotent; a second call while one waits does not wait."""
        if self._address is None:
            return
        if drain > 0:
            self._step(Drain())
            try:
                async with asyncio.timeout(drain):
                    while self._address is not None and not self._machine.is_empty:
                        self._changed.clear()
                        await self._changed.wait()
            except TimeoutError:
                pass
        address, self._address = self._address, None
        if address is None:  # a second call was faster
            return
        self._stop_listening(address)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._close_connections()
        self._changed.set()
        logger.info(
            "stopped listening on %s",
            address,
            extra={"event": "stopped", "address": str(address)},
        )

    async def __aenter__(self) -> Coordinator:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    def status(self) -> dict[str, Any]:
        """Groups with their epochs, members and who waits, as plain data.

        Keys: "address", "draining", and "groups", a list of dicts with "name", "run_id", "wanted"
        (size), "epoch", "size", "members", "waiting", "lost", "left", "store".
        """
        return {"address": self.address, **self._machine.status()}

    def close_fds_after_fork(self) -> None:
        """To be called in a forked child: gives up the child's copies of all sockets, so that
        neither the port nor a connection outlives the parent."""
        null = os.open(os.devnull, os.O_RDWR)
        for connection in self._connections.values():
            connection.detach_after_fork(null)
        for sock in self._server.sockets if self._server is not None else ():
            os.dup2(null, sock.fileno())
        os.close(null)

    # What connections call.

    def opened(self, connection: Connection) -> None:
        self._connections[connection.number] = connection

    def received(self, connection: Connection, request: int, message: Message) -> None:
        self._step(Received(connection.number, request, message))

    def closed(self, connection: Connection, reason: str) -> None:
        del self._connections[connection.number]
        self._step(Disconnected(connection.number, reason))

    # Inside.

    def _connection(self) -> Connection:
        return Connection(self, next(self._numbers))

    def _adopt_from_anywhere(self, sock: socket.socket) -> None:
        try:
            self._loop.call_soon_threadsafe(self._adopt, sock)
        except RuntimeError as error:  # the loop was closed without stopping the coordinator
            sock.close()
            raise ConnectionRefusedError(f"the coordinator's loop is closed: {error}") from None

    def _adopt(self, sock: socket.socket) -> None:
        if self._address is None:
            sock.close()
            return
        task = self._loop.create_task(self._loop.connect_accepted_socket(self._connection, sock))
        self._adopting.add(task)
        task.add_done_callback(self._adopting.discard)

    def _step(self, event: Event) -> None:
        effects = self._machine.step(event, self._loop.time())
        if self._state is not None and self._machine.highest_epoch > self._saved_epoch:
            # Before anyone is told of it.
            self._saved_epoch = self._machine.highest_epoch
            try:
                _write_epoch(self._state, self._saved_epoch)
            except OSError as error:
                logger.error(
                    "cannot write %s: %s",
                    self._state,
                    error,
                    extra={"event": "state not saved", "error": str(error)},
                )
        self._carry_out(effects)
        self._arm()
        self._changed.set()

    def _carry_out(self, effects: list[Effect]) -> None:
        said: tuple[Message, int] | None = None
        data = b""
        for effect in effects:
            if isinstance(effect, Note):
                _log(effect)
                continue
            connection = self._connections.get(effect.conn)
            if connection is None:
                continue
            if isinstance(effect, Close):
                connection.close(effect.reason)
            else:
                if said is None or said[0] is not effect.message or said[1] != effect.request:
                    said = (effect.message, effect.request)
                    data = encode_message(effect.message, effect.request, max_body=MAX_REPLY)
                connection.send(data)

    def _arm(self) -> None:
        """See to it that a tick comes in time. One that comes too early does no harm."""
        when = self._machine.deadline()
        if when is None or self._address is None:
            return
        if self._timer is None or when < self._due:
            self._set_timer(when)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = when
        self._timer = self._loop.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = self._loop.time()
        if now - self._due > LATE_SECONDS:
            self._set_timer(now + GRACE_SECONDS)
        else:
            self._step(Tick())

    def _stop_listening(self, address: Address) -> None:
        if address.scheme == "inproc":
            inproc_names.unregister(address.host)
        if self._server is not None:
            self._server.close()
            self._server = None
        if address.scheme == "unix":
            Path(address.path).unlink(missing_ok=True)

    async def _close_connections(self) -> None:
        await asyncio.gather(*self._adopting, return_exceptions=True)
        goodbye = encode_message(Goodbye())
        for connection in list(self._connections.values()):
            connection.send(goodbye)
            connection.close("the coordinator stopped")
        try:
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._until_no_connections()
        except TimeoutError:
            for connection in list(self._connections.values()):
                connection.abort()
            await self._until_no_connections()

    async def _until_no_connections(self) -> None:
        while self._connections:
            self._changed.clear()
            await self._changed.wait()


def _log(note: Note) -> None:
    level = _LEVELS.get(note.event, logging.DEBUG)
    if logger.isEnabledFor(level):
        said = ", ".join(f"{key}={value}" for key, value in note.fields.items())
        logger.log(level, "%s: %s", note.event, said, extra={"event": note.event, **note.fields})


def _read_epoch(path: Path) -> int:
    try:
        epoch = json.loads(path.read_text("utf-8"))["highest_epoch"]
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"highest_epoch is {epoch!r}")
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no state file of a coordinator ({error}): expected "
            '{"highest_epoch": N}; name another file, or delete it'
        ) from None
    return epoch


def _write_epoch(path: Path, epoch: int) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps({"highest_epoch": epoch}), "utf-8")
    new.replace(path)
