"""Watching the process at the other end of a Unix socket."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aiodist.links.process_watch import ProcessWatch
from aiodist.transports import processes
from aiodist.transports.processes import open_behind

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="there are no pidfds here")

OTHER = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0" + sys.argv[1])
print("connected", flush=True)
while line := sys.stdin.readline():
    sock.close()
    print("closed", flush=True)
"""


@contextmanager
def connected() -> Iterator[tuple[socket.socket, Any]]:
    """A Unix socket whose other end is another process'. That says "closed" when it was told to
    close its end, and ends with its input."""
    name = f"aiodist-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-c", OTHER, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "connected\n"
                sock, _ = listener.accept()
                with sock:
                    yield sock, process
            finally:
                process.kill()


def watched(sock: socket.socket) -> io.FileIO:
    file = open_behind(sock)
    assert file is not None
    assert not os.get_inheritable(file.fileno())
    return file


def test_the_end_of_a_process_is_told_once(run):
    async def main():
        loop = asyncio.get_running_loop()
        told = []
        ended = asyncio.Event()
        with connected() as (sock, process):

            def end() -> None:
                told.append(process.poll())
                ended.set()

            file = watched(sock)
            watch = ProcessWatch(loop, file, end)
            process.stdin.write("close\n")
            process.stdin.flush()
            assert process.stdout.readline() == "closed\n"
            await asyncio.sleep(0)
            assert not told  # it lives, though its connection is closed
            process.stdin.close()
            await ended.wait()
            assert file.closed
            watch.close()
        assert told == [0]

    run(main())


def test_nobody_is_told_once_it_is_closed(run):
    async def main():
        loop = asyncio.get_running_loop()
        told = []
        with connected() as (sock, process):
            file = watched(sock)
            watch = ProcessWatch(loop, file, lambda: told.append("closed"))
            in_time = asyncio.Event()
            other = ProcessWatch(loop, watched(sock), in_time.set)
            watch.close()
            watch.close()
            assert file.closed
            process.stdin.close()
            await in_time.wait()
            await asyncio.sleep(0)
            other.close()
        assert not told

    run(main())


def in_child(call: Callable[[], None], file: io.FileIO) -> bool:
    """Whether `call` closes `file` in a forked child."""
    child = os.fork()
    if not child:
        call()
        os._exit(0 if file.closed else 1)
    return os.waitpid(child, 0)[1] == 0


def test_a_forked_child_closes_its_copy(run):
    async def main():
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        with connected() as (sock, process):
            file = watched(sock)
            watch = ProcessWatch(loop, file, ended.set)
            assert in_child(watch.close_in_child, file)
            process.stdin.close()
            await ended.wait()

    run(main())


def test_where_nobody_can_tell(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert open_behind(ours) is None  # this process
    with socket.socket() as tcp:
        assert open_behind(tcp) is None
    with connected() as (sock, process):
        with monkeypatch.context() as patch:
            # In a pid namespace that this one does not see into.
            patch.setattr(processes, "credentials", lambda sock: (0, os.getuid()))
            assert open_behind(sock) is None
        for error in (ProcessLookupError, PermissionError, OSError):
            with monkeypatch.context() as patch:

                def refuse(pid: int, error: type[OSError] = error) -> int:
                    assert pid == process.pid
                    raise error

                patch.setattr(os, "pidfd_open", refuse)
                assert open_behind(sock) is None
        with monkeypatch.context() as patch:
            patch.delattr(os, "pidfd_open")
            assert open_behind(sock) is None
        watched(sock).close()
        process.stdin.write("close\n")
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n"
        assert open_behind(sock) is None  # the number might be another process' by now
    assert open_behind(sock) is None  # closed
