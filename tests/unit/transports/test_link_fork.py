"""After a fork the child drops its copies, and the parent's links go on."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio, os, sys
from aiodist.testing.links import connected
from aiodist.transports.registry import make

async def main() -> None:
    async with connected(make(sys.argv[1])) as ends:
        large = bytes(1 << 22)
        ends.a.send(b"large", [memoryview(large)])  # under way: the loop watches for room
        child = os.fork()
        if not child:
            for link in (ends.a, ends.b):
                link.close_in_child()
                link.close_in_child()
                assert link.is_closed and not link.poll()
                link.send(b"nobody hears")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        ends.b.send(b"back")
        await ends.until(lambda: ends.at_b.frames == [(b"large", large)])
        await ends.until(lambda: ends.at_a.headers == [b"back"])

if sys.argv[2] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
print("fine")
"""


def forked(kind: str, loop: str) -> None:
    done = subprocess.run(
        # Python warns of threads there, from 3.12 on; this script's child only looks and ends.
        [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", SCRIPT, kind, loop],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("fine\n", "", 0)


def test_fork_with_tcp_links() -> None:
    forked("tcp", "asyncio")


def test_fork_with_unix_links() -> None:
    forked("unix", "asyncio")


def test_fork_with_unix_links_on_uvloop() -> None:
    forked("unix", "uvloop")


def test_fork_with_shm_links() -> None:
    forked("shm", "asyncio")


def test_fork_with_shm_links_on_uvloop() -> None:
    forked("shm", "uvloop")


def test_fork_with_inproc_links() -> None:
    forked("inproc", "asyncio")
