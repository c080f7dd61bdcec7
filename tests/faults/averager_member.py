"""A member of an averager in `chaos_averaging`. It says, as lines of JSON, what came of each of its
calls, what it found wrong, and in the end what is left of it. SIGUSR1 prints its tasks.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import os
import random
import signal
import sys
import threading
from contextlib import suppress

import numpy as np
from channel_member import dump, files, say

import aiodist

LEASE = 2.0
MEMBERS = 5_000
"""Elements that say which call of which member is in a sum. Call 1 of member 7 adds 1 to element 7.
"""
SIZE = 50_000
"""Elements in all. Each contribution adds the number of its call to all the others."""


def contribution(member: int, call: int) -> np.ndarray:
    x = np.full(SIZE, float(call))
    x[:MEMBERS] = 0
    x[member] = call
    return x


class Contributor:
    def __init__(self, averager: str, address: str, transports: str, seed: str) -> None:
        self.chooser = random.Random(seed)
        self.averager = averager
        self.address = address
        self.transports = (transports,) if transports else None

    async def average(self, member: int, quorum: int) -> None:
        """Average until it is cancelled."""
        slow = self.chooser.choice([1, 1, 1, 10])
        async with aiodist.averager(
            self.averager,
            address=self.address,
            name=f"member {member}",
            quorum=quorum,
            grace=0.3,
            op=aiodist.ReduceOp.SUM,
            max_stale=20,
            token="secret",
            lease=LEASE,
            timeout=600.0,  # to be let in: as long as it takes
            transports=self.transports,
        ) as avg:
            call = 0
            while True:
                call += 1
                await asyncio.sleep(slow * self.chooser.uniform(0.0, 0.1))
                await self.call(avg, member, call)

    async def call(self, avg: aiodist.Averager, member: int, call: int) -> None:
        timeout = self.chooser.choice([0.2, 600.0, 600.0, 600.0])
        work = avg.average(contribution(member, call), timeout=timeout)
        if self.chooser.random() < 0.05:
            await asyncio.sleep(self.chooser.uniform(0.0, 0.3))
            work.cancel()
        try:
            found = await work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return
        except aiodist.StaleError:
            say(member=member, call=call, contributes=False)
            tree, rounds = await avg.state(timeout=600.0)
            if tree["round"] != rounds[""]:
                say(problem="wrong", text=f"the state {tree} is of {rounds}")
            return
        except aiodist.CollectiveTimeoutError as error:
            if "the quorum is" in str(error):
                say(member=member, call=call, contributes=False)  # it is withdrawn
            return
        calls = found.value[:MEMBERS]
        counted = [[int(one), int(calls[one])] for one in np.flatnonzero(calls)]
        if (found.value[MEMBERS:] != calls.sum()).any():
            say(problem="mixed", text=f"round {found.round}: {np.unique(found.value[MEMBERS:])}")
        say(
            version=found.round,
            member=member,
            call=call,
            round=found.round,
            contributes=not found.late,
            bits=hashlib.sha256(found.value.tobytes()).hexdigest(),
            counted=counted,
            contributors=len(found.contributors),
        )
        await avg.publish_state({"round": found.round})


async def main(
    averager: str, address: str, _: str, transports: str, seed: str, member: str, quorum: str
) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, dump)

    def wait() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=wait, daemon=True).start()
    before = files()
    contributor = Contributor(averager, address, transports, seed)
    averaging = asyncio.create_task(contributor.average(int(member), int(quorum)))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([averaging, stopping], return_when=asyncio.FIRST_COMPLETED)
    averaging.cancel()
    stopping.cancel()
    with suppress(asyncio.CancelledError):
        await averaging
    await asyncio.gather(stopping, return_exceptions=True)
    await asyncio.sleep(0.1)
    gc.collect()  # what only a cycle kept open is no leak
    left = [file for number, file in files().items() if number not in before]
    tasks = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    say(over=True, left=[*left, *tasks])


if __name__ == "__main__":
    logging.getLogger("aiodist").setLevel(os.environ.get("CHAOS_LOG", "CRITICAL"))
    logging.basicConfig(format=f"{os.getpid()} %(asctime)s %(message)s")
    asyncio.run(main(*sys.argv[1:]))
