"""A call that is refused on one rank alone: the calls after it stay in step, whatever the name is
under which the program knows the backend."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import aiodist
from aiodist_torch.devices import backend_for, backends_of, group_beside


def check(group: Any) -> None:
    rank = dist.get_rank()
    first = torch.ones(1)
    try:
        if rank == 0:
            group.allreduce([first], "no operator")
        else:
            dist.all_reduce(first, group=group)
        raise AssertionError(f"done: {first}")
    except TypeError:
        assert rank == 0
    except aiodist.AiodistError as error:
        assert rank == 1
        assert "no operator" in str(error) or "rank 0" in str(error), error
    for step in range(3):
        x = torch.full((1,), 10.0**step)
        dist.all_reduce(x, group=group)
        assert float(x) == 2 * 10**step, (step, x)


def check_devices(group: Any, kinds: list[str]) -> None:
    """What is asked of a group's devices is answered with what carries out the operations."""
    cpu = torch.device("cpu")
    assert [device.type for device in group._device_types] == kinds
    assert backends_of(group)["cpu"] == backend_for(group, cpu) == "aiodist"
    assert group_beside(group, cpu, group._timeout) is group
    try:
        group.allreduce([torch.empty(1, device="meta")])
        raise AssertionError("there is a backend for meta tensors")
    except RuntimeError as error:
        assert "cpu:aiodist" in str(error), error


ASKED = {
    "gloo": ["cpu", "cuda"],
    "cpu:gloo": ["cpu"],
    "cuda:nccl,cpu:gloo": ["cuda", "cpu"],
    None: ["cpu"],
    "aiodist": ["cpu"],
}
for asked, kinds in ASKED.items():
    dist.init_process_group(asked)
    for group in (dist.group.WORLD, dist.new_group(backend=asked)):
        check(group)
        check_devices(group, kinds)
    dist.destroy_process_group()
print("in step")
