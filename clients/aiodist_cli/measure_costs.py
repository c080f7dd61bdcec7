"""Measures the cost of messages on a network, for `aiodist.connect(costs=FILE)`.

    aiodist run -n 4 -m aiodist_cli.measure_costs costs.toml

This is a program of ranks, so any launcher can start it. Start one rank on each of several hosts.
The ranks run all-reduces of several sizes by each algorithm for large arrays, over TCP. Groups of
2, 4, 8, … and all ranks take part. Rank 0 writes the constants with which the cost model fits these
times best.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import aiodist
from aiodist.launching import spawn
from aiodist.schedules.choose_reductions import Shape, choose_all_reduce
from aiodist.schedules.costs import ONE_HOST_TCP, Costs, Tally, written
from aiodist_cli.errors import unwritable

SIZES = ((64 << 10) + 8, 256 << 10, 1 << 20, 4 << 20)
"""Bytes of the arrays. None fits into one frame, because one algorithm serves those."""
DEAR = {"alpha": 1.0, "grant": 1.0, "connection": 1.0}
"""Prices that select algorithms: if one of these costs so much, the algorithm with the least of it
is chosen."""
WARM, BLOCKS, CALLS = 2, 3, 3
"""Calls before those that count; then the number of blocks, and of calls in each."""
CALLS_OF_A_PROGRAM = 50
"""The cost of a connection is divided by so many calls: see `Costs.connection`."""
TOWARDS = 1e-4
"""The weight of keeping constants in proportion to the built-in ones. It decides if the samples
cannot tell constants apart."""
LOWEST = 0.1
"""The least value of a constant, as a part of the built-in one. Without it, a constant that the
samples do not show would become 0, and ratios would be useless."""
SWEEPS = 2000


class Sample(NamedTuple):
    """The measured time of a plan."""

    tally: Tally
    seconds: float


def fit(samples: Sequence[Sample], connection: float) -> Costs:
    """The constants with the least error, relative to the time of each sample."""
    built_in = np.array([ONE_HOST_TCP.alpha, ONE_HOST_TCP.frame, ONE_HOST_TCP.grant,
                         ONE_HOST_TCP.beta, ONE_HOST_TCP.gamma])  # fmt: skip
    counts = np.array([_counts(sample.tally) for sample in samples], float)
    shares = counts * built_in / np.array([[sample.seconds] for sample in samples])
    # First find one factor for all constants, then a factor for each.
    whole = shares.sum(axis=1)
    scale = float(whole.sum() / (whole @ whole))
    factors = _factors(shares * scale, LOWEST / scale)
    alpha, frame, grant, beta, gamma = (built_in * scale * factors).tolist()
    return Costs(alpha, frame, grant, connection, beta, gamma)


def _counts(tally: Tally) -> tuple[float, ...]:
    """The factors of the constants, as in `Tally.seconds`."""
    further = max(0, tally.frames - tally.rounds)
    return tally.rounds, further, tally.grants, tally.nbytes, tally.reduced


def _factors(shares: NDArray[np.float64], lowest: float) -> NDArray[np.float64]:
    """Find `f`, none below `lowest`, with ``shares @ f`` closest to 1, by coordinate descent."""
    count = shares.shape[1]
    square = shares.T @ shares + TOWARDS * len(shares) * np.eye(count)
    due = shares.sum(axis=0) + TOWARDS * len(shares)
    factors = np.ones(count)
    for _ in range(SWEEPS):
        for at in range(count):
            rest = due[at] - square[at] @ factors + square[at, at] * factors[at]
            factors[at] = max(lowest, rest / square[at, at])
    return factors


def error_of(costs: Costs, samples: Sequence[Sample]) -> float:
    """The median relative error of the model."""
    return statistics.median(abs(_model(costs, sample) / sample.seconds - 1) for sample in samples)


def _model(costs: Costs, sample: Sample) -> float:
    # The measured groups have their connections already.
    return sample.tally._replace(connections=0).seconds(costs)


async def measured(group: aiodist.Group) -> AsyncIterator[Sample]:
    """All samples that this rank takes part in."""
    sizes = sorted({group.size, *(1 << k for k in range(1, group.size.bit_length()))})
    for size in sizes:
        if group.rank < size:
            part = await group.subgroup(range(size))
            for nbytes in SIZES:
                seen = set()
                for name, seconds in DEAR.items():
                    prices = ONE_HOST_TCP._replace(**{name: seconds})
                    chosen = choose_all_reduce(Shape(nbytes // 4, 4, 4), size, prices)
                    if chosen.name not in seen:
                        seen.add(chosen.name)
                        yield Sample(chosen.tally, await _time(part, nbytes, prices))
            await part.close()


async def _time(part: aiodist.Group, nbytes: int, prices: Costs) -> float:
    """Seconds of an all_reduce by the algorithm chosen at these prices, at the slowest rank."""
    group = await part.dup()
    group._context.costs = prices  # on all ranks alike, before anything is chosen
    x = np.zeros(nbytes // 4, np.float32)
    for _ in range(WARM):
        await group.all_reduce(x)
    blocks = []
    for _ in range(BLOCKS):
        await group.barrier()
        start = time.perf_counter()
        for _ in range(CALLS):
            await group.all_reduce(x)
        blocks.append((time.perf_counter() - start) / CALLS)
    longest = await group.all_reduce(np.array(blocks), aiodist.ReduceOp.MAX)
    await group.close()
    found: list[float] = longest.tolist()
    return statistics.median(found)


async def _connection(group: aiodist.Group) -> float:
    """The cost of a connection for one call of a program. `group` must not have any yet."""
    await group.agree()  # through the coordinator, so that all ranks are there
    times = []
    for _ in range(2):
        start = time.perf_counter()
        await group.barrier()
        times.append(time.perf_counter() - start)
    first, again = times
    links = [group._context.link(peer) for peer in range(group.size)]
    made = sum(link is not None for link in links)
    return max(0.0, first - again) / max(1, made) / CALLS_OF_A_PROGRAM


async def profile(group: aiodist.Group) -> str:
    """Measure with `group`, which has no connections yet. The result is at rank 0, else ""."""
    if group.size < 2:
        raise SystemExit("one rank cannot communicate: expected at least 2")
    connection = await _connection(group)
    samples = [sample async for sample in measured(group)]
    if group.rank != 0:
        return ""
    costs = fit(samples, connection)
    hosts = len({member.host for member in group.members})
    how = (
        f"What messages cost, in seconds: measured by {group.size} ranks, hosts: {hosts}.\n"
        f"In the median the model misses a time by {error_of(costs, samples):.0%} of it."
    )
    return written(costs, how)


async def main(file: Path) -> None:
    """Join the group that the environment names, and write its profile."""
    async with aiodist.connect(transports="tcp") as group:
        if group.rank == 0 and (why := unwritable(file)) is not None:
            raise SystemExit(why)
        found = await profile(group)
    if found:
        await asyncio.to_thread(file.write_text, found)
        print(f"{file}:\n{found}", end="")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="aiodist run … -m aiodist_cli.measure_costs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="what rank 0 writes (TOML)")
    with asyncio.Runner(loop_factory=spawn.new_event_loop) as runner:
        runner.run(main(parser.parse_args().file))
