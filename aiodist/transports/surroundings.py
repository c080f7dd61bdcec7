"""What an event loop may replace: the loop of `aiodist.testing` brings time, sockets and hosts.

**Why the loop, and not a parameter.** Simulated ranks run the library as it is, through its public
calls. Parameters for sockets and clocks would pass through each constructor on the way, only for
tests. The loop is known everywhere and already brings the time. So the few things that a simulation
replaces are asked of it, here.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from aiodist.compiled import core


class ProcessIdentity(NamedTuple):
    """The identity of a process and event loop.

    `process` and `host` are ids of the process with its loop, and of the host with its network
    namespace. `user` is the user there. `pid` and `name` are for people.
    """

    process: str
    host: str
    pid: int
    name: str
    user: str


running_loop: Callable[[], asyncio.AbstractEventLoop | None] = asyncio._get_running_loop
"""Returns the loop that runs in this thread, or None."""

if core is not None and sys.version_info < (3, 12):  # that of later versions is as fast
    running_loop = core.running_loop
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=core.forget_running_loop)


def is_virtual(loop: asyncio.AbstractEventLoop) -> bool:
    """Tell whether the time of `loop` is simulated. Nothing then uses threads, or polls by the
    clock."""
    return getattr(loop, "is_virtual", False)


def tell_time_exactly(loop: asyncio.AbstractEventLoop) -> None:
    """Make `loop` tell the exact time, for measuring.

    Most loops do. uvloop's time is that of the beginning of its turn, in milliseconds, on the same
    clock.
    """
    if type(loop).__module__.partition(".")[0] == "uvloop":
        loop.time = time.monotonic  # type: ignore[method-assign]


def exact_time(loop: asyncio.AbstractEventLoop) -> float:
    """Return the exact time, on the clock of `tell_time_exactly`."""
    return loop.time() if is_virtual(loop) else time.monotonic()


def call_in_thread(
    loop: asyncio.AbstractEventLoop, delay: float, callback: Callable[..., object], *args: Any
) -> None:
    """On a simulated loop, call after `delay` seconds what a thread does, though the loop may be
    busy."""
    getattr(loop, "call_in_thread", loop.call_later)(delay, callback, *args)


class Closable(Protocol):
    """Something to close once it is not needed any more."""

    def close(self) -> None: ...


@contextmanager
def closed_on_error(made: Closable) -> Iterator[None]:
    """Close `made` if the body fails or is cancelled."""
    try:
        yield
    except BaseException:
        made.close()
        raise


async def ready(
    sock: socket.socket, begin: Callable[..., object], end: Callable[[int], object]
) -> None:
    """Wait until `sock` is ready, as the loop reports from `begin` to `end`.

    With `add_reader` and `remove_reader`: until it can be read, or has ended.
    """
    is_ready = asyncio.Event()
    begin(sock.fileno(), is_ready.set)
    try:
        await is_ready.wait()
    finally:
        end(sock.fileno())


def new_socket(family: int, kind: int = socket.SOCK_STREAM, proto: int = 0) -> socket.socket:
    """Make a socket for use on the running loop."""
    make = getattr(asyncio.get_running_loop(), "new_socket", socket.socket)
    made: socket.socket = make(family, kind, proto)
    return made


async def look_up(host: str, port: int, flags: int = 0) -> list[Any]:
    """Return what `socket.getaddrinfo` returns for stream sockets. Raises OSError."""
    loop = asyncio.get_running_loop()
    try:
        return list(await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags))
    except RuntimeError:
        # A thread looks it up, and there may be none any more once the process or the loop is about
        # to end. The coordinator may have to be found again even then, to leave groups in order.
        # Blocking is harmless then.
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)


def identity_on(
    loop: asyncio.AbstractEventLoop, process: str, host: str, user: str
) -> ProcessIdentity:
    """Return the identity of `loop`: the given one, unless the loop has its own."""
    own = getattr(loop, "identity", None)
    if own is not None:
        return ProcessIdentity(*own())
    pid = os.getpid()
    return ProcessIdentity(process, host, pid, f"{socket.gethostname()}:{pid}", user)


def chooser_on(loop: asyncio.AbstractEventLoop) -> random.Random:
    """Return the source of random numbers of `loop`."""
    own: random.Random | None = getattr(loop, "chooser", None)
    return random.SystemRandom() if own is None else own
