"""Raw speed of stream links between two processes: no loop, no engine, polled in line.

    python -m benchmarks links [--kinds tcp,unix] [--rounds 20000] [--mib 64]

Prints the round trip of an 8-byte frame in µs (median, 99th percentile, mean) and the rate of a
full-duplex stream of 256 KiB frames in GB/s each way (best and median of five).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence

from aiodist.transports.base import Landing, Link
from aiodist.transports.registry import make
from aiodist.wire.frames import MAX_PAYLOAD

LIMIT = 1 << 20


class Counter:
    """Receives all into one block, and counts."""

    def __init__(self, nbytes: int) -> None:
        self.block = memoryview(bytearray(max(nbytes, 8)))
        self.memory = self.block  # of the frame that came last
        self.at = 0
        self.frames = 0
        self.wanted = 0  # frames the peer will have sent so far

    def frame(self, link: Link, header: bytes, nbytes: int) -> Landing | None:
        at = self.at
        if at + nbytes > len(self.block):
            at = 0
        self.at = at + nbytes
        self.memory = self.block[at : self.at]
        return self

    def landed(self) -> None:
        self.frames += 1

    def closed(self, link: Link, error: BaseException | None) -> None:
        if error is not None:
            print(f"closed: {error}", file=sys.stderr)


def wait(link: Link, counter: Counter, frames: int) -> None:
    """Poll until `frames` more have come and all is sent."""
    counter.wanted += frames
    while counter.frames < counter.wanted or link.backlog:
        if not link.poll():
            if link.is_closed:
                raise SystemExit("the link broke")
            os.sched_yield()


def ping_pong(link: Link, counter: Counter, rounds: int, first: bool) -> list[float]:
    times = []
    views = [memoryview(bytes(8))]
    for _ in range(rounds):
        start = time.perf_counter()
        if first:
            link.send(b"\x95\x01\x02\x03\x04\x05", views)
            wait(link, counter, 1)
        else:
            wait(link, counter, 1)
            link.send(b"\x95\x01\x02\x03\x04\x05", views)
        times.append(time.perf_counter() - start)
    return times


def stream(link: Link, counter: Counter, block: memoryview) -> float:
    start = time.perf_counter()
    for at in range(0, len(block), MAX_PAYLOAD):
        link.send(b"\x95\x01\x02\x03\x04\x05", [block[at : at + MAX_PAYLOAD]])
        link.poll()
    wait(link, counter, -(-len(block) // MAX_PAYLOAD))
    return time.perf_counter() - start


async def work(kind: str, rounds: int, nbytes: int, address: int, first: bool) -> None:
    """One of the two processes; the address goes through the pipe `address`."""
    counter = Counter(nbytes)
    transport = make(kind)
    if first:
        accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()

        def accept(link: Link) -> None:
            link.receiver = counter
            link.max_payload = LIMIT
            accepted.set_result(link)

        listener = await transport.listen(accept, host="127.0.0.1")
        os.write(address, listener.address.encode())
        link = await accepted
        listener.close()
    else:
        link = await transport.dial(os.read(address, 200).decode(), counter)
        link.max_payload = LIMIT
    ping_pong(link, counter, rounds // 10, first)
    times = sorted(ping_pong(link, counter, rounds, first))
    block = memoryview(bytearray(b"\x01") * nbytes)
    spans = []
    for _ in range(7):
        ping_pong(link, counter, 10, first)
        spans.append(stream(link, counter, block))
    rates = sorted(nbytes / span / 1e9 for span in spans[2:])
    if first:
        print(
            f"{kind:6} 8 B round trip: median {times[rounds // 2] * 1e6:6.1f}"
            f"  p99 {times[rounds * 99 // 100] * 1e6:7.1f}"
            f"  mean {statistics.fmean(times) * 1e6:6.1f} µs"
            f"   {nbytes >> 20} MiB both ways: best {rates[-1]:5.2f}"
            f"  median {rates[len(rates) // 2]:5.2f} GB/s each way",
            flush=True,
        )
    await link.finish(10.0)


def main(arguments: Sequence[str]) -> int:
    """Measure each of the kinds in turn, in two processes."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks links",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kinds", default="tcp,unix")
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--mib", type=int, default=64)
    options = parser.parse_args(arguments)
    for kind in options.kinds.split(","):
        read, write = os.pipe()
        child = os.fork()
        asyncio.run(
            work(kind, options.rounds, options.mib << 20, write if child else read, bool(child))
        )
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
    return 0
