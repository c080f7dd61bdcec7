"""Ray Train with DistributedDataParallel over aiodist.

Run it with ``pip install 'ray[train]' torch``::

    python examples/ray/train.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def train() -> dict[str, Any]:
    """What each worker does: fit a line, on points of its own."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(rank)
    x = torch.rand(64, 1)
    model = prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(200):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), 3 * x + 1)
        loss.backward()
        optimizer.step()
    line = torch.cat([parameter.detach().reshape(1) for parameter in model.parameters()])
    everywhere = [torch.zeros(2) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, line)
    alike = all(torch.equal(line, other) for other in everywhere)
    return {"backend": dist.get_backend(), "line": line.round(decimals=3).tolist(), "alike": alike}


def main(storage: str) -> dict[str, Any]:
    trainer = TorchTrainer(
        train_loop_per_worker=train,
        torch_config=TorchConfig(backend="aiodist"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=storage),
    )
    result: dict[str, Any] = trainer.fit().return_value
    return result


if __name__ == "__main__":
    ray.init()
    with tempfile.TemporaryDirectory() as folder:
        print(main(folder))
