"""What an event loop may bring of its own in place of the operating system's: the loop of
`aiodist.testing` brings time, sockets and hosts. Everywhere else it is what one expects.

**Why the loop, and not a parameter.** Simulated ranks run the library as it is, through its public
calls. Were sockets and clocks handed down by parameters, each constructor on the way would take
them and pass them on, for the sake of tests alone. The loop is known everywhere, and is already
what brings time; so the few things that a simulation has to replace are asked of it, here.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol


class Identity(NamedTuple):
    """`process` names a process and event loop, `host` its host and network namespace, `user` its
    user there; `pid` and `name` are for people."""

    process: str
    host: str
    pid: int
    name: str
    user: str


def is_virtual(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the time of `loop` is simulated: then nothing is done by threads, and nothing polled
    for by the clock of the machine."""
    return getattr(loop, "is_virtual", False)


def tell_time_exactly(loop: asyncio.AbstractEventLoop) -> None:
    """Have `loop` tell the time as it is, for who measures with it. Most do; that of uvloop is the
    time at which its present turn began, in milliseconds, of the same clock."""
    if type(loop).__module__.partition(".")[0] == "uvloop":
        loop.time = time.monotonic  # type: ignore[method-assign]


def exact_time(loop: asyncio.AbstractEventLoop) -> float:
    """The time as `tell_time_exactly` has it told."""
    return loop.time() if is_virtual(loop) else time.monotonic()


def call_in_thread(
    loop: asyncio.AbstractEventLoop, delay: float, callback: Callable[..., object], *args: Any
) -> None:
    """Where the time of `loop` is simulated: call what a thread beside it does after `delay`
    seconds, though the loop may be busy."""
    getattr(loop, "call_in_thread", loop.call_later)(delay, callback, *args)


class Closable(Protocol):
    """What is to be closed once it is not needed any more."""

    def close(self) -> None: ...


@contextmanager
def closed_on_error(made: Closable) -> Iterator[None]:
    """Closes what was made, if what else it takes to use it fails, or is cancelled."""
    try:
        yield
    except BaseException:
        made.close()
        raise


async def ready(
    sock: socket.socket, begin: Callable[..., object], end: Callable[[int], object]
) -> None:
    """Wait until `sock` is ready, as the loop says from `begin` to `end`: to be read, which its
    end is as well, from `add_reader` to `remove_reader`."""
    is_ready = asyncio.Event()
    begin(sock.fileno(), is_ready.set)
    try:
        await is_ready.wait()
    finally:
        end(sock.fileno())


def new_socket(family: int, kind: int = socket.SOCK_STREAM, proto: int = 0) -> socket.socket:
    """A socket for use on the running loop."""
    make = getattr(asyncio.get_running_loop(), "new_socket", socket.socket)
    made: socket.socket = make(family, kind, proto)
    return made


async def look_up(host: str, port: int, flags: int = 0) -> list[Any]:
    """What `socket.getaddrinfo` says of them, for stream sockets. Raises OSError."""
    loop = asyncio.get_running_loop()
    try:
        return list(await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags))
    except RuntimeError:
        # A thread looks it up, and there are none to be had any more once the process, or the loop,
        # is about to end. Even then groups are left in good order, and the coordinator may have to
        # be found again for that. There is not much else to do, so that it blocks is no harm.
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)


def identity_on(loop: asyncio.AbstractEventLoop, process: str, host: str, user: str) -> Identity:
    """Who runs on `loop`, which is of `process` and `user` on `host` unless it knows better."""
    own = getattr(loop, "identity", None)
    if own is not None:
        return Identity(*own())
    pid = os.getpid()
    return Identity(process, host, pid, f"{socket.gethostname()}:{pid}", user)


def chooser_on(loop: asyncio.AbstractEventLoop) -> random.Random:
    """Where what nobody can guess comes from."""
    own: random.Random | None = getattr(loop, "chooser", None)
    return random.SystemRandom() if own is None else own
