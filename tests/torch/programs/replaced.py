"""A program that asks torch for Gloo, in every way that there is, and gets aiodist."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from aiodist_torch import ProcessGroup


def total(group: dist.ProcessGroup | None) -> float:
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    return float(x)


def check(group: dist.ProcessGroup | None, backend: str) -> None:
    assert isinstance(group, ProcessGroup)
    assert dist.get_backend(group) == backend
    assert total(group) == dist.get_world_size(group)


ASKED = {
    "gloo": "gloo",
    "GLOO": "gloo",
    "cpu:gloo": "cpu:gloo",
    "cpu:gloo,cuda:nccl": "cpu:gloo,cuda:nccl",
    "cuda:nccl,cpu:gloo": "cuda:nccl,cpu:gloo",
    None: "undefined",
    "aiodist": "aiodist",
}
assert dist.is_gloo_available()
assert dist.is_backend_available("gloo")
assert dist.get_default_backend_for_device("cpu") == "gloo"
for asked, told in ASKED.items():
    dist.init_process_group(asked)
    check(dist.group.WORLD, told)
    check(dist.new_group(), told)
    check(dist.new_group(backend="gloo"), "gloo")
    if dist.get_rank() == 0:
        check(dist.new_group([0], backend="gloo", use_local_synchronization=True), "gloo")
    if told == "gloo":
        dist.monitored_barrier(timeout=timedelta(seconds=60))
        config = dist.get_backend_config()
        assert config == "cpu:gloo,cuda:gloo", config  # CUDA tensors stay Gloo's
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, os.environ["RANK"])
    assert found == [str(rank) for rank in range(dist.get_world_size())]
    dist.destroy_process_group()
print("replaced")
