"""Tensor parallelism on a busy machine: tokens per second of a small decoder, with each backend.

A layer of such a model has two row-parallel projections, and an all_reduce of
``[batch, 1, hidden]`` after each. What differs from `benchmarks.torch` is the work in between: the
matrices and, on a busy machine, other programs push the code of the backend out of the caches. So
each call starts cold, and the processor time of the thread that calls is what counts: a scheduler
gives every thread the same share, and the threads of a backend have shares of their own.

The load is that of programs that compute all the time, so many for each core. The backends take
turns in blocks, and what counts is the median of the ratios of neighbours.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from aiodist_cli.bench_cases import turn
from aiodist_cli.bench_report import Fact, Report
from aiodist_cli.bench_run import Progress
from aiodist_cli.bench_team import Team
from aiodist_cli.bench_worker import Library

SIZE = 2
LAYERS, HIDDEN, INNER, VOCABULARY, CACHED = 4, 256, 704, 4000, 128
WARM_UP, TOKENS = 4, 16
"""Of a block."""
NEIGHBOURS = (0, 4, 8)
"""Programs for each core that compute beside the ranks."""
SHARE = 1.0
"""Of Gloo's tokens per second, at least."""


class Busy(Protocol):
    """Starts so many programs for each core that compute until the end of the context."""

    def __call__(self, each: int) -> AbstractContextManager[None]: ...


async def measure(report: Report, teams: Sequence[Team], progress: Progress, busy: Busy) -> None:
    """Add tokens per second at each load to `report`: of the first team, that of aiodist, beside
    the second, that of Gloo. Raises OrderError, TeamError."""
    for each in NEIGHBOURS:
        found: dict[str, list[dict[str, float]]] = {team.contender.name: [] for team in teams}
        with busy(each):
            for number in range(report.effort.rounds):
                for team in turn(teams, number):
                    name = team.contender.name
                    progress(f"{each} a core, {name}, {number + 1} of {report.effort.rounds}")
                    answers = await team.order("benchmarks.tensor_parallel:tokens")
                    found[name].append(answers[0])
        report.facts.append(compared(each, *found.values()))


def compared(each: int, own: Sequence[dict[str, float]], gloo: Sequence[dict[str, float]]) -> Fact:
    """What the blocks of aiodist and of Gloo, one beside the other, come to."""
    times = statistics.median(a["rate"] / b["rate"] for a, b in zip(own, gloo, strict=True))

    def shown(blocks: Sequence[dict[str, float]]) -> str:
        rate, call = (statistics.median(block[key] for block in blocks) for key in ("rate", "call"))
        return f"{rate:.1f} tokens/s, {call * 1e6:.0f} µs of processor time a call"

    return Fact(
        f"tensor parallelism, n={SIZE}, {each} busy programs a core",
        f"{times:.2f} × Gloo: {shown(own)}; Gloo {shown(gloo)}",
        f"at least {SHARE:g} × Gloo",
        times >= SHARE,
    )


def tokens(library: Library) -> dict[str, float]:
    """One rank: decode `TOKENS` tokens. Tokens per second, and the seconds of processor time that
    the calling thread spends in each all_reduce."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import layer_norm, silu

    torch.set_num_threads(1)
    torch.manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns) / rows**0.5

    half, inner = HIDDEN // SIZE, INNER // SIZE
    layers = [
        {
            "query": matrix(HIDDEN, half),
            "out": matrix(half, HIDDEN),
            "gate": matrix(HIDDEN, inner),
            "up": matrix(HIDDEN, inner),
            "down": matrix(inner, HIDDEN),
        }
        for _ in range(LAYERS)
    ]
    head, cached = matrix(HIDDEN, VOCABULARY), torch.randn(1, CACHED, half)
    calls: list[float] = []

    def reduced(part: torch.Tensor) -> torch.Tensor:
        before = time.thread_time()
        dist.all_reduce(part)
        calls.append(time.thread_time() - before)
        return part

    def token(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            query = layer_norm(x, (HIDDEN,)) @ layer["query"]
            seen = torch.softmax(query @ cached.transpose(1, 2) / half**0.5, -1) @ cached
            x = x + reduced(seen @ layer["out"])
            inner = layer_norm(x, (HIDDEN,))
            x = x + reduced((silu(inner @ layer["gate"]) * (inner @ layer["up"])) @ layer["down"])
        (x @ head).argmax(-1)
        return x / (1 + x.norm())

    x = torch.ones(1, 1, HIDDEN)
    with torch.inference_mode():
        for _ in range(WARM_UP):
            x = token(x)
        calls.clear()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(TOKENS):
            x = token(x)
        rate = TOKENS / (time.perf_counter() - start)
    return {"rate": rate, "call": sum(calls) / len(calls)}
