"""Training with gradients that go by a codec, each rank on a host of its own by name."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import aiodist_torch
from aiodist.codecs import Codec, bf16, int8, topk
from aiodist.transports import registry

HOST = f"host {os.environ['RANK']}"
registry.host_id = lambda: HOST
torch.manual_seed(0)
IMAGES = torch.randn(400, 64)
DIGITS = (IMAGES @ torch.randn(64, 10)).argmax(1)


def train(
    codec: Codec | None, group: dist.ProcessGroup | None = None
) -> tuple[float, torch.Tensor]:
    """The loss over all images in the end, and the parameters."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.004)
    if codec is not None:
        wrapped.register_comm_hook(group, aiodist_torch.codec_hook(codec))
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(12):
        own = torch.arange(32 * step, 32 * (step + 1))[rank::size] % len(DIGITS)
        model.zero_grad()
        nn.functional.cross_entropy(wrapped(IMAGES[own]), DIGITS[own]).backward()
        with torch.no_grad():  # without torch.optim, whose first step imports a compiler
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(IMAGES), DIGITS)
    return float(loss), nn.utils.parameters_to_vector(model.parameters()).detach()


dist.init_process_group("aiodist")
plain, _ = train(None)
for codec, most in (
    (int8(error_feedback=True), 0.02),
    (topk(0.2, error_feedback=True), 0.3),
):
    loss, parameters = train(codec, dist.group.WORLD)
    assert loss != plain and abs(loss - plain) <= most * plain, (codec, loss, plain)
    first = parameters.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, parameters), codec  # the same bits on all ranks
train(bf16())  # without a state: the default group
try:
    train(bf16(), dist.new_group(backend="gloo"))
except (TypeError, RuntimeError) as error:
    assert "codec_hook needs a process group of aiodist" in str(error), error
else:
    raise AssertionError("another process group was taken")
dist.destroy_process_group()
print("trained")
