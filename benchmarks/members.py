"""``make members``: what live members cost a coordinator, and how that grows with their number.

A coordinator (the command, with a token) serves more and more members in groups of a fixed size.
Members are connections that greet, join, renew their lease and read what they are told, as ranks
do; many of them in one process, which has a processor core to itself where there are two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiodist.errors import ProtocolError
from aiodist.wire.codec import decode_message, encode_message
from aiodist.wire.frames import Decoder
from aiodist.wire.limits import MAX_CONTROL_HEADER, MAX_REPLY
from aiodist.wire.messages import (
    Challenge,
    EpochView,
    Hello,
    JoinRequest,
    Message,
    Proof,
    Renew,
    Welcome,
)
from aiodist.wire.proof import NONCE_BYTES, make_proof

TOKEN = b"of this benchmark"
AT_ONCE = 100
"""Members that are joining at a time, at least those of a group."""
SPARE_FILES = 200
RENEWAL = encode_message(Renew())


class Member(asyncio.Protocol):
    """One connection. `joined`: the view has come. `received`: bytes."""

    def __init__(self, group: str, size: int, lease: float) -> None:
        self._ask = JoinRequest(
            group=group,
            id=secrets.token_hex(16),
            size=size,
            lease=lease,
            pid=os.getpid(),
            host="127.0.0.1",
            host_id="of the benchmark",
            addresses=(f"tcp://127.0.0.1:{10_000 + secrets.randbelow(50_000)}",),
        )
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._decoder = Decoder(max_header=MAX_CONTROL_HEADER, max_payload=MAX_REPLY)
        self.is_welcome = self.is_over = False
        self.received = 0
        loop = asyncio.get_running_loop()
        self.welcomed: asyncio.Future[None] = loop.create_future()
        self.joined: asyncio.Future[EpochView] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(encode_message(Hello(self._nonce)))

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        for frame in self._decoder.feed(data):
            _, message = decode_message(frame)
            if isinstance(message, Challenge):
                mac = make_proof(TOKEN, "member", self._nonce, message.nonce)
                self.transport.write(encode_message(Proof(mac)))
            elif isinstance(message, Welcome):
                self.transport.write(encode_message(self._ask, 1))
                self.is_welcome = True
                self.welcomed.set_result(None)
            elif isinstance(message, EpochView):
                self.joined.set_result(message)
            else:
                self.told(message)

    def told(self, message: Message) -> None:
        """Anything else that the coordinator says."""
        self._over(ProtocolError(f"the coordinator says {message}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._over(error or ConnectionError("the coordinator closed the connection"))

    def _over(self, error: Exception) -> None:
        self.is_over = True
        for future in (self.welcomed, self.joined):
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen: who waits for the other one need not ask


@dataclass(frozen=True, slots=True)
class Figures:
    """What `members` cost. `joins`: a second. `memory`: bytes each, and `files` that are open for
    each. `traffic`: leases renewed a second. `load`: the coordinator's processor time a second, all
    members being idle."""

    members: int
    joins: float
    memory: float
    files: float
    traffic: float
    load: float

    def __str__(self) -> str:
        return (
            f"{self.members:6} members: {self.joins:6.0f} joins/s, {self.memory / 1024:5.1f} KiB "
            f"and {self.files:.2f} files a member, {self.traffic:5.0f} renewals/s, "
            f"{100 * self.load:5.1f} % of a core "
            f"({1e6 * self.load / self.traffic:.1f} µs a renewal)"
        )


class Process:
    """What the system says of a process (Linux)."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")

    def memory(self) -> int:
        """Resident, in bytes."""
        return int((self._folder / "statm").read_text().split()[1]) * resource.getpagesize()

    def files(self) -> int:
        """That are open."""
        return len(list((self._folder / "fd").iterdir()))

    def seconds(self) -> float:
        """Of processor time."""
        fields = (self._folder / "stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(
    address: str, pid: int, counts: Sequence[int], size: int, lease: float
) -> list[Figures]:
    """Add members until there are as many as each of `counts`, in groups of `size`."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    loop = asyncio.get_running_loop()
    served = Process(pid)
    before, files = served.memory(), served.files()
    members: list[Member] = []
    room = asyncio.Semaphore(max(AT_ONCE, size))
    due = iter(range(sys.maxsize))
    renewed = 0

    async def join(number: int) -> None:
        async with room:
            _, member = await loop.create_connection(
                lambda: Member(f"group {number // size}", size, lease), host, int(port)
            )
            members.append(member)
            await member.joined

    async def renew() -> None:
        nonlocal renewed
        while True:  # in small parts, as members that do not know of each other do
            part = next(due) % 100
            for member in members[part::100]:
                if member.is_welcome:
                    member.transport.write(RENEWAL)
                    renewed += 1
            await asyncio.sleep(lease / 3 / 100)  # three times in a lease, as ranks do

    renewing = asyncio.create_task(renew())
    found = []
    try:
        for count in counts:
            there, start = len(members), time.monotonic()
            await asyncio.gather(*(join(number) for number in range(there, count)))
            joining = time.monotonic() - start
            renewed, spent, start = 0, served.seconds(), time.monotonic()
            await asyncio.sleep(lease)
            idle = time.monotonic() - start
            if lost := sum(member.is_over for member in members):
                raise RuntimeError(f"{lost} members were lost")
            figures = Figures(
                count,
                (count - there) / joining,
                (served.memory() - before) / count,
                (served.files() - files) / count,
                renewed / idle,
                (served.seconds() - spent) / idle,
            )
            print(figures, flush=True)
            found.append(figures)
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        for member in members:
            member.transport.abort()
    return found


def allow_files(count: int) -> None:
    """Raises SystemExit where this process must not have so many files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise SystemExit(f"{count} open files are needed, {hard} are allowed: raise ulimit -Hn")
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


@asynccontextmanager
async def coordinator(token: Path) -> AsyncIterator[tuple[str, int]]:
    """The command, which reads its token from a file: its address, and its process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aiodist_cli", "coordinator"),
        *("--listen", "tcp://127.0.0.1:0", "--token-file", str(token), "--drain", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        yield (await process.stdout.readline()).decode().split()[-1], process.pid
    finally:
        process.terminate()
        await process.wait()


async def run(token: Path, counts: Sequence[int], size: int, lease: float) -> list[Figures]:
    """With a coordinator of its own."""
    async with coordinator(token) as (address, pid):
        return await measure(address, pid, counts, size, lease)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.members", description=__doc__)
    parser.add_argument(
        "--counts", default="1000,2000,5000,10000", help="how many, one after other"
    )
    parser.add_argument("--size", type=int, default=10, help="members of a group (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON as well")
    parser.add_argument("--lease", type=float, default=15.0, help="seconds (default: 15)")
    options = parser.parse_args(arguments)
    counts = [int(count) for count in options.counts.split(",")]
    if counts != sorted(set(counts)) or any(count % options.size for count in counts):
        parser.error("counts grow, and are multiples of the size of a group")
    allow_files(counts[-1] + SPARE_FILES)
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder, "token")
        token.write_bytes(TOKEN)
        found = asyncio.run(run(token, counts, options.size, options.lease))
    if options.json:
        fields = [{name: getattr(one, name) for name in Figures.__slots__} for one in found]
        options.json.write_text(json.dumps(fields))
    return 0


if __name__ == "__main__":
    sys.exit(main())
