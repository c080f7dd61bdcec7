"""Ranks that go silent, come back, or compute for long: leases, with real processes.

The fixture `run` is the loop of their coordinator alone.
"""

from __future__ import annotations

import os
import signal

import pytest
from processes import heard, processes

HEAD = """
import asyncio, json, sys, time, aiodist
import numpy as np

def say(what):
    print(json.dumps(what), flush=True)

async def outcome(call):
    try:
        result = await call()  # a call in a group that has ended raises at once
        return ["done", list(map(float, np.ravel(result)))]
    except aiodist.PeerLostError as error:
        return ["PeerLostError", list(error.ranks)]
    except aiodist.AiodistError as error:
        return [type(error).__name__, str(error)]

async def main():
    address, rank, transport, *leases = sys.argv[1:]
    group = await aiodist.connect(
        address, rank=int(rank), size=3, transports=transport, lease=float(leases[int(rank)]),
        op_timeout=200,
    )
    await program(group)

"""
TAIL = "\nasyncio.run(main())\n"


STOPPED = """
async def program(group):
    for _ in range(3):
        await group.all_reduce(np.ones(10))
    say("ready")
    if group.rank == 2:
        sys.stdin.readline()  # is stopped in here
        say(await outcome(lambda: group.all_reduce(np.ones(10))))
        say(await outcome(group.shrink))
        say(await outcome(lambda: group.agree(True)))
        await group.close()
        return
    for work in (
        group.all_reduce(np.ones(10)), group.recv(src=2), group.send(np.ones(1_000_000), 2),
    ):
        say(await outcome(lambda: work))
    assert await group.agree(True)
    group = await group.shrink()
    say([group.rank, group.size, group.epoch, await group.all_reduce(1)])
    sys.stdin.readline()
    say(await group.all_reduce(2))
    await group.close()
"""


@pytest.mark.long
@pytest.mark.strength(1)
@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_a_rank_that_comes_back_after_its_lease(run, transport):
    async def main():
        async with processes(HEAD + STOPPED + TAIL, 3, transport, 60, 60, 3) as ranks:
            for process in ranks:
                assert await heard(process) == "ready"
            os.kill(ranks[2].pid, signal.SIGSTOP)
            ranks[2].stdin.write(b"\n")
            for rank, process in enumerate(ranks[:2]):
                for _ in range(3):
                    assert await heard(process) == ["PeerLostError", [2]]
                assert await heard(process) == [rank, 2, 2, 2]
            os.kill(ranks[2].pid, signal.SIGCONT)
            kind, value = await heard(ranks[2])
            # What the others gave before they gave up may be all there.
            assert kind in ("PeerLostError", "GroupClosedError") or value == [3.0] * 10
            for _ in range(2):
                kind, text = await heard(ranks[2])
                assert kind == "GroupClosedError"
                assert "ruled this rank lost: no sign of life for 3 s" in text
            assert await ranks[2].wait() == 0
            for process in ranks[:2]:
                process.stdin.write(b"\n")
            for process in ranks[:2]:
                assert await heard(process) == 4
                assert await process.wait() == 0

    run(main())


BUSY = """
async def program(group):
    await group.barrier()
    end = time.monotonic() + 5.5
    while group.rank == 0 and time.monotonic() < end:
        pass  # computes, and never lets the event loop have a turn
    say(await group.all_reduce(1))
    await group.close()
"""


@pytest.mark.parametrize("run", ["uvloop"], indirect=True)
@pytest.mark.long
def test_computing_for_longer_than_the_lease_loses_nobody(run):
    async def main():
        async with processes(HEAD + BUSY + TAIL, 3, "shm", 5, 60, 60) as ranks:
            for process in ranks:
                assert await heard(process) == 3
                assert await process.wait() == 0

    run(main())


LEAVES_A_CHILD = """
async def program(group):
    import os
    await group.all_reduce(np.ones(10))
    if group.rank == 2:
        if os.fork() == 0:
            os.read(0, 1)  # lives on with all that it inherited
            os._exit(0)
        say("ready")
        await asyncio.Event().wait()
    say("ready")
    say(await outcome(lambda: group.all_reduce(np.ones(10))))
    # Who closes is gone as well: nobody does before all have heard of the one that was killed.
    await asyncio.to_thread(sys.stdin.readline)
    await group.close()
"""


@pytest.mark.strength(1)
@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
@pytest.mark.sample(2)
def test_a_child_that_was_forked_holds_nobody_alive(run, transport):
    async def main():
        async with processes(HEAD + LEAVES_A_CHILD + TAIL, 3, transport, 60, 60, 60) as ranks:
            for process in ranks:
                assert await heard(process) == "ready"
            os.kill(ranks[2].pid, signal.SIGKILL)
            for process in ranks[:2]:
                assert await heard(process) == ["PeerLostError", [2]]
            for process in ranks[:2]:
                process.stdin.write(b"\n")
                assert await process.wait() == 0
            ranks[2].stdin.write(b"\n")  # the child ends

    run(main())
