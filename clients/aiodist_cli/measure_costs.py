"""Measures what messages cost on a network, for `aiodist.connect(costs=FILE)`.

    aiodist run -n 4 -m aiodist_cli.measure_costs costs.toml

It is a program of ranks, so any launcher starts it; best with one rank on each of some hosts. They
run all-reduces by each algorithm that there is for large arrays, of some sizes, among 2 ranks, 4,
8, … and all, over TCP. Rank 0 writes the constants with which the cost model comes closest to what
all of them took.
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

SIZES = ((64 << 10) + 8, 256 << 10, 1 << 20, 4 << 20)
"""Bytes of the arrays: none goes whole in one frame, for which there is but one algorithm."""
DEAR = {"alpha": 1.0, "grant": 1.0, "connection": 1.0}
"""Where one of these costs so much, the algorithm is chosen that has least of it: so each is."""
WARM, BLOCKS, CALLS = 2, 3, 3
"""Calls before those that count; how many blocks of how many calls count then."""
CALLS_OF_A_PROGRAM = 50
"""Among so many calls the cost of a connection is shared out: see `Costs.connection`."""
TOWARDS = 1e-4
"""How much it counts, beside samples that the model misses by all they took, if a constant is not
in proportion to the one that is built in: it decides where the samples cannot tell constants
apart."""
LOWEST = 0.1
"""Of what is built in, a constant is at least so much. What the samples do not show would come out
as nothing at all, and the ratios of such constants would say nothing, either."""
SWEEPS = 2000


class Sample(NamedTuple):
    """What a plan took."""

    tally: Tally
    seconds: float


def fit(samples: Sequence[Sample], connection: float) -> Costs:
    """The constants by which the model is least wrong, in proportion to what each sample took."""
    built_in = np.array([ONE_HOST_TCP.alpha, ONE_HOST_TCP.frame, ONE_HOST_TCP.grant,
                         ONE_HOST_TCP.beta, ONE_HOST_TCP.gamma])  # fmt: skip
    counts = np.array([_counts(sample.tally) for sample in samples], float)
    shares = counts * built_in / np.array([[sample.seconds] for sample in samples])
    # By how much all of them together would have to be multiplied, and each of them beside that.
    whole = shares.sum(axis=1)
    scale = float(whole.sum() / (whole @ whole))
    factors = _factors(shares * scale, LOWEST / scale)
    alpha, frame, grant, beta, gamma = (built_in * scale * factors).tolist()
    return Costs(alpha, frame, grant, connection, beta, gamma)


def _counts(tally: Tally) -> tuple[float, ...]:
    """What the constants are multiplied by, as in `Tally.seconds`."""
    further = max(0, tally.frames - tally.rounds)
    return tally.rounds, further, tally.grants, tally.nbytes, tally.reduced


def _factors(shares: NDArray[np.float64], lowest: float) -> NDArray[np.float64]:
    """`f`, none below `lowest`, for which ``shares @ f`` is closest to 1: by coordinate descent."""
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
    """By which part the model misses a sample, in the median."""
    return statistics.median(abs(_model(costs, sample) / sample.seconds - 1) for sample in samples)


def _model(costs: Costs, sample: Sample) -> float:
    # What is measured has its connections already.
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
    """Seconds of an all_reduce by the algorithm that is chosen at these prices, at the rank where
    it takes longest."""
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
    """What a connection costs one of the calls of a program. For a group that has none yet."""
    await group.agree()  # by the coordinator: then all are there
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
    """What `group`, which has no connections yet, finds: at rank 0; elsewhere nothing."""
    if group.size < 2:
        raise SystemExit("one rank has nobody to talk to: expected at least 2")
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
