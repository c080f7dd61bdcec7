"""A step of DistributedDataParallel: how much of it is communication, with each backend.

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
SHARE = 0.25
"""Of Gloo's time for communication."""


async def steps(name: str, effort: Effort, progress: Callable[[str], None]) -> Outcome:
    """The time that a step takes longer than one without communication, beside Gloo's."""
    outcome = Outcome(name)
    times: dict[str, list[float]] = {"aiodist": [], "gloo": []}
    curves: dict[str, list[float]] = {}
    for number in range(effort.rounds):
        for backend, found in times.items():
            progress(f"{name}: {backend}, round {number + 1} of {effort.rounds}")
            try:
                answer = await _run(backend)
            except RuntimeError as error:
                outcome.notes.append(f"{name}: {error}")
                return outcome
            found.append(answer["communication"])
            curves[backend] = answer["losses"]
    own, gloo = (statistics.median(times[backend]) for backend in ("aiodist", "gloo"))
    apart = max(abs(a - b) for a, b in zip(curves["aiodist"], curves["gloo"], strict=True))
    outcome.facts += [
        Fact(
            f"DDP step of {LAYERS * WIDTH * WIDTH / 1e6:.0f} million parameters, n={SIZE}: "
            "communication",
            f"{format_seconds(own)}, Gloo {format_seconds(gloo)}: {own / gloo:.0%}",
            f"at most {SHARE:.0%} of Gloo's",
            own <= SHARE * gloo,
        ),
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
    torch.manual_seed(0)
    dist.init_process_group(
        backend, init_method=f"file://{file}", rank=int(rank), world_size=int(size)
    )
    net = nn.Sequential(
        *(
            layer
            for _ in range(LAYERS)
            for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())
        )
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(BATCH, WIDTH)

    def step() -> float:
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return float(loss.detach())

    def timed() -> float:
        dist.barrier()
        start = time.perf_counter()
        losses.append(step())
        return time.perf_counter() - start

    losses: list[float] = []
    for _ in range(3):
        timed()
        optimizer.step()
        optimizer.zero_grad()
    together, alone = [], []
    for _ in range(10):
        with model.no_sync():
            alone.append(timed())
        optimizer.zero_grad()
        together.append(timed())
        optimizer.step()
        optimizer.zero_grad()
    if rank == "0":
        costs = statistics.median(together) - statistics.median(alone)
        print(json.dumps({"communication": costs, "losses": losses}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
