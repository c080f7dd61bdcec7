"""Run a coordinator until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import FrameType

from aiodist.coordinator.actor import Coordinator
from aiodist_server.config import Config
from aiodist_server.files import raise_file_limit
from aiodist_server.http import serving
from aiodist_server.logs import logging_to_stderr

if sys.platform == "win32":
    _run = asyncio.run
else:
    from uvloop import run as _run

logger = logging.getLogger("aiodist.daemon")

EXIT_OK = 0
EXIT_CANNOT_START = 1
EXIT_CANNOT_WRITE = 3


def serve(config: Config) -> int:
    """Run the coordinator until SIGTERM, SIGINT or SIGHUP. Returns the exit code.

    The first line on stdout is ``listening on ADDRESS``, with the port that it got. With `http`,
    the second is ``http on URL``. The first signal refuses new joins and waits at most `drain`
    seconds for the groups to end. A second one stops at once. systemd is told when it is ready, and
    when it stops.

    Exit codes: 0: stopped by a signal; 1: it could not start; 3: it could not write its state file
    any more. The log has the reason.
    """
    with logging_to_stderr(config):
        return _run(_serve(config))


async def _serve(config: Config) -> int:
    raise_file_limit()
    async with AsyncExitStack() as stack:
        try:
            coordinator = Coordinator(
                config.listen,
                token=config.read_token(),
                ssl=config.ssl_context(),
                state=config.state,
                force=config.force,
                recovery=config.recovery_seconds,
            )
            await coordinator.start()
            stack.push_async_callback(coordinator.stop)
            url = None
            if config.http_address is not None:
                url = await stack.enter_async_context(serving(coordinator, config.http_address))
        except (OSError, ValueError) as error:
            logger.error(
                "cannot start: %s", error, extra={"event": "cannot start", "error": str(error)}
            )
            return EXIT_CANNOT_START
        signals: asyncio.Queue[str] = asyncio.Queue()
        _on_signals(signals.put_nowait)
        print(f"listening on {coordinator.address}", flush=True)
        if url is not None:
            print(f"http on {url}", flush=True)
        _tell_systemd("READY=1")
        return await _until_stopped(coordinator, signals, config.drain)


async def _until_stopped(
    coordinator: Coordinator, signals: asyncio.Queue[str], drain: float
) -> int:
    failing = asyncio.create_task(coordinator.failed())
    signal_came = asyncio.create_task(signals.get())
    await asyncio.wait({failing, signal_came}, return_when=asyncio.FIRST_COMPLETED)
    if not failing.done():
        _tell_systemd("STOPPING=1")
        first, signal_came = signal_came.result(), asyncio.create_task(signals.get())
        groups = len(coordinator.status()["groups"])
        logger.info(
            "%s: waiting for %d groups to end, at most %g s; a second signal stops at once",
            first,
            groups,
            drain,
            extra={"event": "draining", "signal": first, "groups": groups},
        )
        draining = asyncio.create_task(coordinator.stop(drain=drain))
        await asyncio.wait({draining, signal_came}, return_when=asyncio.FIRST_COMPLETED)
        # After a second signal this closes all connections, which ends the drain. Otherwise it does
        # nothing.
        await coordinator.stop()
        await draining
        # A failure in the drain, up to its last write, counts like an earlier one, because the next
        # start must not be told that all was well. The task hears of it a moment later.
        await asyncio.wait({failing}, timeout=0)
    failed = failing.done()
    failing.cancel()
    signal_came.cancel()
    return EXIT_CANNOT_WRITE if failed else EXIT_OK


def _tell_systemd(state: str) -> None:
    """Tell the service manager that has started this process, if it asked for that:
    sd_notify(3)."""
    where = os.environ.get("NOTIFY_SOCKET", "")
    if where:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state.encode(), where.replace("@", "\0", 1) if where[0] == "@" else where)


def _on_signals(tell: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()

    def handler(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(tell, signal.Signals(number).name)

    numbers = [signal.SIGTERM, signal.SIGINT]
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)  # ignored by nohup
    for number in numbers:
        try:
            loop.add_signal_handler(number, tell, number.name)
        except NotImplementedError:  # Windows
            signal.signal(number, handler)
