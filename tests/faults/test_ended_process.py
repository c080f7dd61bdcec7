"""A rank's process ends while somebody else holds its sockets and memory: a child that was forked
in C, past Python's hooks. The others notice at once, not after the lease."""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
from typing import Any

import pytest

import aiodist
from aiodist.buffers.segment import unsupported_reason

HEAD = """
import asyncio, ctypes, json, os, sys, aiodist
import numpy as np

def say(what):
    print(json.dumps(what), flush=True)

async def outcome(awaitable):
    try:
        return ["done", repr(await awaitable)]
    except aiodist.AiodistError as error:
        return [type(error).__name__, list(getattr(error, "ranks", ())), str(error)]

def leave_a_child():
    pid = ctypes.PyDLL(None).fork()  # unlike CDLL, it gives the child the GIL
    if pid == 0:
        os.read(0, 1)  # lives on with all that it inherited
        os._exit(0)
    return pid

def watched():
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[pidfd]"
        except OSError:
            pass  # the listing's own
    return count

async def main():
    address, rank, transport = sys.argv[2:5]
    group = await aiodist.connect(
        address, rank=int(rank), size=3, transports=transport, lease=3600.0, op_timeout=20
    )
    for other in range(3):  # links between all
        if other != group.rank:
            await group.sendrecv("hello", other, src=other)
    await group.all_reduce(np.ones(10))
    await program(group)

"""
TAIL = """
if sys.argv[1] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""

LAST = 40
"""Messages that are on their way when their sender dies."""

DIES = f"""
async def program(group):
    if group.rank == 0:
        for number in range({LAST}):
            for other in (1, 2):
                await group.send(np.full(100, number), other, tag="last")
        say(leave_a_child())
        os.kill(os.getpid(), 9)
    say("ready")
    sys.stdin.readline()  # whatever happens meanwhile, the loop sees it all at once
    others = 3 - group.rank
    works = [
        group.all_reduce(np.ones(10)), group.recv(src=0, tag="never"), group.barrier(tag="other"),
        group.send(np.ones(2_000_000), 0),
    ]
    for work in works:
        say(await outcome(work))
    say([int((await group.recv(src=0, tag="last"))[99]) for _ in range({LAST})])
    say(await group.sendrecv(group.rank, others, src=others))
    say(watched())
    group = await group.shrink()
    say([group.rank, group.size, await group.all_reduce(1)])
    await group.close()
    say(watched())
"""


BREAKS = """
async def program(group):
    if group.rank == 0:
        say(leave_a_child())
        os.kill(os.getpid(), 9)
    say("ready")
    sys.stdin.readline()
    # The child keeps the listener open as well: who calls is put through to nobody.
    group._actor.endpoint.peer(0).link.break_off(ConnectionResetError("cut"))
    say(await outcome(group.recv(src=0)))
    sys.stdin.readline()
    group = await group.shrink()
    say(await group.all_reduce(1))
    await group.close()
    say(watched())
"""


async def heard(process: Any) -> Any:
    line = await process.stdout.readline()
    return json.loads(line) if line else f"ended with status {await process.wait()}"


async def start(program: str, *arguments: str) -> Any:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        HEAD + program + TAIL,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


def wait_for_end(pid: int) -> None:
    """Not `Process.wait`, which waits for the pipes as well: the child holds them."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(30_000), f"process {pid} goes on"
    finally:
        os.close(fd)


async def end(processes: list[Any]) -> None:
    for process in processes:
        if process.returncode is None:
            process.kill()
        process.stdin.close()  # a child that it left ends
    for process in processes:
        await process.communicate()


@pytest.mark.timeout(60)
@pytest.mark.strength(1)
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("transport", ["shm", "unix"])
async def test_who_holds_its_sockets_does_not_keep_it_alive(transport: str, loop: str) -> None:
    if transport == "shm" and unsupported_reason() is not None:
        pytest.skip("ranks cannot share memory here")
    ranks: list[Any] = []
    try:
        async with aiodist.Coordinator() as coordinator:
            for rank in range(3):
                ranks += [await start(DIES, loop, coordinator.address, str(rank), transport)]
            child = await heard(ranks[0])
            wait_for_end(ranks[0].pid)
            for process in ranks[1:]:
                assert await heard(process) == "ready"
                process.stdin.write(b"\n")
            for rank, process in enumerate(ranks[1:], start=1):
                for _ in range(4):
                    kind, lost, text = await heard(process)
                    assert (kind, lost) == ("PeerLostError", [0])
                    assert "its process has ended" in text
                assert await heard(process) == [*range(LAST)]
                assert await heard(process) == 3 - rank
                assert await heard(process) == 1  # the other survivor's
                assert await heard(process) == [rank - 1, 2, 2]
                assert await heard(process) == 0
                assert await process.wait() == 0
            os.kill(child, 0)  # it has been there all the time
    finally:
        await end(ranks)


@pytest.mark.timeout(60)
async def test_a_dead_process_is_not_called_again() -> None:
    ranks: list[Any] = []
    try:
        async with aiodist.Coordinator() as coordinator:
            for rank in range(3):
                ranks += [await start(BREAKS, "asyncio", coordinator.address, str(rank), "unix")]
            child = await heard(ranks[0])
            wait_for_end(ranks[0].pid)
            for process in ranks[1:]:
                assert await heard(process) == "ready"
                process.stdin.write(b"\n")
            for process in ranks[1:]:
                kind, lost, text = await heard(process)
                assert (kind, lost) == ("PeerLostError", [0])
                # Not after some seconds of calling it in vain.
                assert "its process has ended" in text
            for process in ranks[1:]:
                process.stdin.write(b"\n")
            for process in ranks[1:]:
                assert await heard(process) == 2
                assert await heard(process) == 0
                assert await process.wait() == 0
            os.kill(child, 0)
    finally:
        await end(ranks)
