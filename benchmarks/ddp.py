"""A step of DistributedDataParallel: how much of it is communication, with each backend.

That is what it takes longer than the same step with a hook in place of the communication, which
leaves the buckets of gradients as they are. What DistributedDataParallel itself does with buckets,
which is the same with any backend, is told apart by steps without any (`no_sync`).

Run as a script it is one rank: ``python -m benchmarks.ddp BACKEND RANK SIZE FILE``.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiodist_cli.bench_cases import format_seconds
from aiodist_cli.bench_run import Effort
from benchmarks.asked import Fact, Outcome

SIZE = 2
WIDTH, LAYERS = 2500, 4
"""Of the perceptron: 25 million parameters."""
BATCH = 8
"""Few examples, so that a step is not all computation."""
WARM_UP, STEPS = 3, 10
SHARE = 0.25
"""Of Gloo's time for communication."""


async def steps(name: str, effort: Effort, progress: Callable[[str], None]) -> Outcome:
    """The time for communication in a step, beside Gloo's."""
    outcome = Outcome(name)
    times: dict[str, list[dict[str, float]]] = {"aiodist": [], "gloo": []}
    curves: dict[str, list[float]] = {}
    for number in range(effort.rounds):
        for backend, found in times.items():
            progress(f"{name}: {backend}, round {number + 1} of {effort.rounds}")
            try:
                answer = await _run(backend)
            except RuntimeError as error:
                outcome.notes.append(f"{name}: {error}")
                return outcome
            found.append(answer["costs"])
            curves[backend] = answer["losses"]

    def compared(what: str) -> tuple[str, float]:
        own, gloo = (
            statistics.median(costs[what] for costs in times[backend])
            for backend in ("aiodist", "gloo")
        )
        text = f"{format_seconds(own)}, Gloo {format_seconds(gloo)}: {own / gloo:.0%}"
        return text, own / gloo

    step = f"DDP step of {LAYERS * WIDTH * WIDTH / 1e6:.0f} million parameters, n={SIZE}"
    shown, share = compared("communication")
    apart = max(abs(a - b) for a, b in zip(curves["aiodist"], curves["gloo"], strict=True))
    outcome.facts += [
        Fact(f"{step}: communication", shown, f"at most {SHARE:.0%} of Gloo's", share <= SHARE),
        Fact(f"{step}: with what DDP does with buckets", compared("buckets")[0]),
        Fact("losses of the same steps: farthest apart", f"{apart:.1e}", "1e-4", apart <= 1e-4),
    ]
    return outcome


async def _run(backend: str) -> dict[str, Any]:
    """What rank 0 of a fresh job says. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.ddp", backend, str(rank), str(SIZE)),
                str(Path(folder) / "meeting"),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            for rank in range(SIZE)
        ]
        try:
            ends = await asyncio.gather(*(rank.communicate() for rank in ranks))
        finally:
            for rank in ranks:
                if rank.returncode is None:
                    rank.kill()
    for rank, (_, said) in zip(ranks, ends, strict=True):
        if rank.returncode:
            raise RuntimeError(f"{backend}: {said.decode(errors='replace').strip()[-500:]}")
    answer: dict[str, Any] = json.loads(ends[0][0])
    return answer


def main(backend: str, rank: str, size: str, file: str) -> None:
    """One rank: alternate steps with and without communication, and tell what it costs."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{file}", rank=int(rank), world_size=int(size)
    )

    def perceptron() -> DistributedDataParallel:
        torch.manual_seed(0)
        layers = ((nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(LAYERS))
        return DistributedDataParallel(nn.Sequential(*(part for layer in layers for part in layer)))

    def as_it_is(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model, silent = perceptron(), perceptron()
    silent.register_comm_hook(None, lambda _, bucket: as_it_is(bucket))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(BATCH, WIDTH)

    def timed(model: nn.Module) -> float:
        model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        took = time.perf_counter() - start
        losses.append(float(loss.detach()))
        return took

    losses: list[float] = []
    found: dict[str, list[float]] = {"alone": [], "silent": [], "together": []}
    for _ in range(WARM_UP + STEPS):
        with model.no_sync():
            found["alone"].append(timed(model))
        found["silent"].append(timed(silent))
        found["together"].append(timed(model))
        optimizer.step()
    if rank == "0":
        median = {kind: statistics.median(times[WARM_UP:]) for kind, times in found.items()}
        costs = {
            "communication": median["together"] - median["silent"],
            "buckets": median["together"] - median["alone"],
        }
        print(json.dumps({"costs": costs, "losses": losses}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
