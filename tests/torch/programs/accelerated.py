"""Hugging Face accelerate on processors takes the process group that is there."""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator

dist.init_process_group("aiodist")
accelerator = Accelerator(cpu=True)
assert dist.get_backend() == "aiodist"
assert accelerator.num_processes == dist.get_world_size()
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
for _ in range(3):
    loss = model(torch.full((2, 4), accelerator.process_index + 1.0)).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
weights = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
every = accelerator.gather(weights).reshape(accelerator.num_processes, -1)
assert all(torch.equal(each, weights) for each in every)
accelerator.wait_for_everyone()
dist.destroy_process_group()
print("accelerated")
