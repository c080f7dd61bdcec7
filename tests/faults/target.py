"""A coordinator and a group of two ranks over TCP, in a process of their own, to be attacked.

It says where it listens, as JSON, on its first line. For each line on stdin it checks that the
group works, in good time, and answers with its memory: MiB now, and at most since the last answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

import aiodist

TOKEN = "the token of the target"


def memory() -> dict[str, float]:
    """MiB of this process: present and peak; the peak begins anew."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found = {name: int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")}
    Path("/proc/self/clear_refs").write_text("5")
    return found


async def main() -> None:
    logging.getLogger("aiodist").setLevel(logging.CRITICAL)
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with aiodist.Coordinator(token=TOKEN) as coordinator:
        joining = [
            asyncio.ensure_future(join(coordinator.address, rank, loop)) for rank in range(2)
        ]
        groups = await asyncio.gather(*joining)
        doors = [coordinator.address]
        for group in groups:
            own = group._seat.view.members[group.rank]
            doors += [one for one in own.addresses if one.startswith("tcp://")]
        print(json.dumps(doors), flush=True)
        while await lines.readline():
            async with asyncio.timeout(30):
                assert await asyncio.gather(*(group.all_reduce(1) for group in groups)) == [2, 2]
                assert await groups[0].store.add("n") > 0
            print(json.dumps(memory()), flush=True)
        await asyncio.gather(*(group.close() for group in groups))


async def join(address: str, rank: int, loop: asyncio.AbstractEventLoop) -> aiodist.Group:
    return await aiodist.connect(
        address, group="hidden", rank=rank, size=2, token=TOKEN, transports=("tcp",)
    )


asyncio.run(main())
