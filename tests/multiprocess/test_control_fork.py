"""After a fork: the child's copies hold no membership, no port and no state file."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, os, sys, tempfile
from aiodist.errors import GroupClosedError
from aiodist.control.client import ControlClient
from aiodist.control.events import CoordinatorGone
from aiodist.wire.messages import JoinRequest
from aiodist.coordinator.actor import Coordinator
from aiodist.wire.messages import MemberLost


async def main():
    folder = tempfile.TemporaryDirectory()
    state = os.path.join(folder.name, "state")
    coordinator = Coordinator(state=state)
    await coordinator.start()
    address = coordinator.address
    clients = [await ControlClient.open(address) for _ in range(2)]
    lost = asyncio.Queue()
    clients[1].on_event = lost.put_nowait
    await asyncio.gather(
        *(c.join(JoinRequest(group="g", id=str(r), rank=r, size=2, pid=r), 30)
          for r, c in enumerate(clients))
    )
    read, write = os.pipe()
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(write)
            for client in clients:
                client.close_fds_after_fork()
            try:
                clients[0]._check_open()
            except GroupClosedError:
                try:
                    coordinator.address
                except RuntimeError as error:  # it does not listen
                    code = 0 if "was inherited over a fork" in str(error) else 2
            os.write(tell, b"x")
            os.read(read, 1)  # lives on until the parent is done
        finally:
            os._exit(code)
    os.close(read)
    os.read(ready, 1)
    # The parent still works ...
    assert (await clients[1].status(30))["groups"][0]["lost"] == {}
    # ... its end is noticed though the child lives, and so is the coordinator's.
    clients[0].abort()
    event = await asyncio.wait_for(lost.get(), 30)
    assert isinstance(event, MemberLost) and event.ranks == (0,), event
    await coordinator.stop()
    assert isinstance(await asyncio.wait_for(lost.get(), 30), CoordinatorGone)
    async with Coordinator(address, state=state):  # both are free, though the child lives
        pass
    os.close(write)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    folder.cleanup()
    print("ok")


if sys.argv[1] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""


LISTENING = """
import asyncio, os, sys
import aiodist


def listening():
    with open("/proc/net/unix") as unix, open("/proc/net/tcp") as tcp:
        inodes = {line.split()[6] for line in unix if "@aiodist-" in line and "00010000" in line}
        inodes |= {line.split()[9] for line in tcp if line.split()[3] == "0A"}
    mine = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")]
    return sum(f"socket:[{inode}]" in mine for inode in inodes)


async def main():
    async with aiodist.Coordinator() as coordinator:
        joining = [aiodist.connect(coordinator.address, rank=r, size=2) for r in range(2)]
        groups = await asyncio.gather(*joining)
        before = listening()
        assert before > 2, before  # the coordinator's, and at least one of each rank
        pid = os.fork()
        if pid == 0:
            os._exit(listening())
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert listening() == before
        await asyncio.gather(*[group.close() for group in groups])
    print("ok")


if sys.argv[1] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""


def run(loop: str, program: str = PROGRAM) -> None:
    done = subprocess.run(
        # A forking process with threads is what is tested: newer Pythons warn of it.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, loop],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_a_forked_child_on_the_stock_loop() -> None:
    run("asyncio")


def test_a_forked_child_on_uvloop() -> None:
    run("uvloop")


def test_a_forked_child_does_not_listen_for_its_parent() -> None:
    """Else peers would connect to it after the parent's death, and wait for an answer."""
    run("asyncio", LISTENING)
    run("uvloop", LISTENING)
