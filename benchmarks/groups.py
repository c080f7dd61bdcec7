"""``make members``, the second part: what large groups cost, and how long they take to form.

A coordinator (the command, with a token) and members that speak as ranks do: they greet, join, and
vote. All members are in one other process, where those of a group share what they have decoded of
the view; the coordinator does all for each of them. Seconds are those of this machine.

* One group is formed; then one member dies, and the others vote to go on, as `shrink` has them do.
* Many members form groups, and have a barrier each: `agree`, which the coordinator decides, so
  that nobody hears the outcome before all of the group have voted.
* The same for more members than a machine has ports, simulated: see `benchmarks.simulated_members`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from aiodist.wire.codec import encode_message
from aiodist.wire.messages import MemberLost, Message
from aiodist.wire.recovery import BallotResult, NextView, Purpose, Vote
from benchmarks.members import (
    AT_ONCE,
    SPARE_FILES,
    TOKEN,
    Member,
    Process,
    allow_files,
    coordinator,
)
from benchmarks.simulated_members import simulate

LEASE = 120.0
"""Seconds: nobody renews."""


class Rank(Member):
    """A member that votes. `lost`: it was told of a loss."""

    def __init__(self, group: str, size: int) -> None:
        super().__init__(group, size, LEASE)
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = loop.create_future()
        self._outcome: asyncio.Future[Message] = loop.create_future()

    def told(self, message: Message) -> None:
        if isinstance(message, MemberLost):
            self.lost.set_result(None)
        elif isinstance(message, BallotResult):
            self._outcome.set_result(message)
        elif isinstance(message, NextView):
            self._outcome.set_result(message.after(self.joined.result()))
        else:
            super().told(message)

    async def vote(self, purpose: Purpose) -> Message:
        """The outcome."""
        self._outcome = asyncio.get_running_loop().create_future()
        context = self.joined.result().context
        self.transport.write(encode_message(Vote(context, 0, purpose), 2))
        return await self._outcome


@dataclass(frozen=True, slots=True)
class Step:
    """What something took. `seconds`; processor time of the coordinator, and of all members, which
    is what counts where other programs run on the machine. `sent`: bytes, by the coordinator."""

    what: str
    seconds: float
    busy: float
    members_busy: float
    sent: int

    def __str__(self) -> str:
        return (
            f"{self.what:53} {self.seconds:6.2f} s (of a processor: coordinator {self.busy:5.2f} s,"
            f" members {self.members_busy:5.2f} s), {self.sent / 1e6:6.1f} MB sent"
        )


class Site:
    """Members of one coordinator, and how long they take for what."""

    def __init__(self, address: str, pid: int) -> None:
        host, _, port = address.rpartition("/")[2].rpartition(":")
        self._door = host, int(port)
        self._coordinator = Process(pid)
        self.ranks: list[Rank] = []
        self._gone = 0
        self._since = 0.0, 0.0, 0.0, 0

    def begin(self) -> None:
        """What `done` tells of begins now."""
        self._since = self._now()

    def done(self, what: str) -> Step:
        """What has happened since `begin`."""
        start, busy, members_busy, sent = self._since
        now, busy_now, members_now, sent_now = self._now()
        spent = busy_now - busy, members_now - members_busy
        step = Step(what, now - start, *spent, sent_now - sent)
        print(step, flush=True)
        return step

    def kill(self, rank: Rank) -> None:
        """Without a word, as by a crash."""
        self._gone += rank.received
        self.ranks.remove(rank)
        rank.transport.abort()

    def _now(self) -> tuple[float, float, float, int]:
        received = self._gone + sum([rank.received for rank in self.ranks])
        return time.monotonic(), self._coordinator.seconds(), time.process_time(), received

    async def join(self, count: int, size: int) -> None:
        """`count` members join groups of `size`, until all groups have formed."""
        loop = asyncio.get_running_loop()
        room = asyncio.Semaphore(AT_ONCE)

        async def join(number: int) -> None:
            async with room:
                _, rank = await loop.create_connection(
                    lambda: Rank(f"{size}: {number // size}", size), *self._door
                )
                self.ranks.append(rank)
                await rank.welcomed
            await rank.joined

        await asyncio.gather(*[join(number) for number in range(count)])

    def close(self) -> None:
        for rank in self.ranks:
            rank.transport.abort()


async def one_group(token: Path, size: int) -> list[Step]:
    """A group that forms, and loses a member."""
    async with coordinator(token) as (address, pid):
        site = Site(address, pid)
        try:
            site.begin()
            await site.join(size, size)
            formed = site.done(f"one group of {size:,}: first join to last view")
            site.begin()
            site.kill(site.ranks[0])
            await asyncio.gather(*[rank.lost for rank in site.ranks])
            await asyncio.gather(*[rank.vote(Purpose.SHRINK) for rank in site.ranks])
            gone_on = site.done(f"one group of {size:,}: a death to the next epoch at all")
            return [formed, gone_on]
        finally:
            site.close()


async def many_groups(token: Path, count: int, size: int) -> Step:
    """Groups that form, and have their first barrier."""
    async with coordinator(token) as (address, pid):
        site = Site(address, pid)
        try:
            site.begin()
            await site.join(count, size)
            await asyncio.gather(*[rank.vote(Purpose.AGREE) for rank in site.ranks])
            return site.done(f"{count:,} members in groups of {size:,}: joins and a barrier")
        finally:
            site.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.groups", description=__doc__)
    parser.add_argument("--single", default="2000,4000", help="sizes of one group, in turn")
    parser.add_argument("--many", type=int, default=10_000, help="members of many groups")
    parser.add_argument("--sizes", default="10,100,1000,2500", help="of these groups, in turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON as well")
    parser.add_argument("--simulated", type=int, default=96_000, help="members, simulated")
    parser.add_argument("--simulated-size", type=int, default=4000, help="of their groups")
    options = parser.parse_args(arguments)
    single, sizes = (
        [int(one) for one in text.split(",")] for text in (options.single, options.sizes)
    )
    if options.simulated % options.simulated_size or any(options.many % size for size in sizes):
        parser.error("members are a multiple of the size of their groups")
    allow_files(max(options.many, *single) + SPARE_FILES)
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder, "token")
        token.write_bytes(TOKEN)
        alone = [step for size in single for step in asyncio.run(one_group(token, size))]
        steps = {size: asyncio.run(many_groups(token, options.many, size)) for size in sizes}
    # What the simulation does not carry out is what the kernel does for each connection.
    real = steps[sizes[0]].busy / options.many
    simulated = simulate(options.simulated, options.simulated_size, real, sizes[0])
    print(simulated)
    if options.json:
        found = [*alone, *steps.values(), simulated]
        options.json.write_text(json.dumps([asdict(one) for one in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
