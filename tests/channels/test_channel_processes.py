"""Channels between real processes of one host: memory is mapped, and whoever is killed or stopped
holds up nobody."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import asynccontextmanager

import numpy as np
from processes import heard

import aiodist

PROGRAM = """
import asyncio, json, sys
import numpy as np
import aiodist

address, role = sys.argv[1:]


def say(**what):
    with open("/proc/self/maps") as lines:
        inodes = {line.split()[4] for line in lines if "memfd:aiodist-weights" in line}
    print(json.dumps({**what, "maps": sorted(inodes)}), flush=True)


async def publish():
    async with aiodist.publisher("policy", address=address, patience=2.0) as out:
        version = 7
        params = {"w": np.full(1 << 20, version, np.float32), "step": version}
        await out.publish(params, version=version)
        say(version=version)
        await asyncio.sleep(1000)


async def subscribe():
    async with aiodist.subscriber("policy", address=address, patience=2.0) as weights:
        say(version=None)
        async for version, got in weights:
            assert got["step"] == version
            assert (got["w"] == version).all()
            say(version=version)


async def take(first, last):
    own = np.zeros(last - first, np.float32)
    async with aiodist.subscriber("policy", address=address, patience=2.0) as weights:
        part = aiodist.Shard(own, (slice(first, last),), (1 << 20,))
        version = await weights.latest(into={"w": part})
        assert (own == version).all()
        say(version=version)
        await asyncio.sleep(1000)


if role == "publish":
    asyncio.run(publish())
elif role == "subscribe":
    asyncio.run(subscribe())
else:
    asyncio.run(take(*map(int, role.split(":"))))
"""


def tree(version):
    return {"w": np.full(1 << 20, version, np.float32), "step": version}


@asynccontextmanager
async def started(address, *roles):
    """A process for each; what still runs at the end is killed."""
    running = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, address, role),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        for role in roles
    ]
    try:
        yield running
    finally:
        for process in running:
            if process.returncode is None:
                process.kill()
            await process.communicate()


async def has(process, version):
    """The memory that a process maps when it says that it has that version."""
    while (said := await heard(process))["version"] != version:
        pass
    return {*said["maps"]}


def mapped_here():
    with open("/proc/self/maps") as lines:
        return {line.split()[4] for line in lines if "memfd:aiodist-weights" in line}


def test_memory_is_mapped_and_the_dead_and_the_stopped_hold_up_nobody(run):
    async def main():
        async with (
            aiodist.Coordinator() as coordinator,
            aiodist.publisher("policy", address=coordinator.address, patience=2.0) as out,
            started(coordinator.address, *["subscribe"] * 3) as servers,
        ):
            for process in servers:
                await has(process, None)
            await out.publish(tree(1), version=1)
            for process in servers:
                # The one copy on this host is that of the publisher.
                assert await has(process, 1) == mapped_here()
            killed, stopped, well = servers
            killed.send_signal(signal.SIGKILL)
            stopped.send_signal(signal.SIGSTOP)
            for version in (2, 3):
                await out.publish(tree(version), version=version)
                await has(well, version)
            stopped.send_signal(signal.SIGCONT)
            await has(stopped, 3)
            assert out.bytes_sent < tree(1)["w"].nbytes

    run(main())


def test_the_publisher_is_killed_and_another_one_comes(run):
    """One subscriber has mapped the version: others of the host get the same memory from it."""

    async def main():
        async with aiodist.Coordinator() as coordinator:
            address = coordinator.address
            async with started(address, "publish", "subscribe") as (trainer, first):
                memory = await has(trainer, 7)
                assert await has(first, 7) == memory
                trainer.send_signal(signal.SIGKILL)
                async with started(address, "subscribe") as (late,):
                    assert await has(late, 7) == memory
                    async with aiodist.publisher("policy", address=address) as out:
                        assert out.newest == 7
                        await out.publish(tree(8), version=8)
                        for process in (first, late):
                            await has(process, 8)

    run(main())


def test_slices_cross_to_a_host_once_and_lie_there_once_for_all_who_want_the_same(run):
    async def main():
        async with (
            aiodist.Coordinator() as coordinator,
            # It seems to be on another host.
            aiodist.publisher("policy", address=coordinator.address, transports=("tcp",)) as out,
        ):
            await out.publish(tree(1), version=1)
            roles = "0:600000", "0:600000", "400000:1000000"
            async with started(coordinator.address, *roles) as servers:
                first, same, other = [await has(process, 1) for process in servers]
            assert len(first) == 1
            assert same == first
            assert len(other) == 1
            assert other != first
            pairs = out._participant.meetings._pairs  # those that it has not left yet
            sent = out.bytes_sent + sum(pair.bytes_moved[0] for pair in pairs)
        assert 4 * 1000000 < sent < 4 * 1000000 + 60000

    run(main())
