"""A state_dict by a channel, and into the parameters of a module."""

from __future__ import annotations

import torch

import aiodist


def test_a_state_dict(run):
    async def main():
        torch.manual_seed(0)
        learned, served = torch.nn.Linear(300, 100), torch.nn.Linear(300, 100)
        state = {**learned.state_dict(), "half": torch.ones(3, dtype=torch.bfloat16)}
        into = {**served.state_dict(), "half": torch.zeros(3, dtype=torch.bfloat16)}
        async with (
            aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
            aiodist.publisher("policy", address=coordinator.address) as out,
            aiodist.subscriber("policy", address=coordinator.address) as weights,
        ):
            await out.publish(state, version=1)
            version, tree = await weights.latest()
            assert version == 1
            assert all(torch.equal(tree[name], state[name]) for name in state)
            tree["weight"] += 1  # it is a copy: nobody else sees that
            assert await weights.latest(into=into) == 1
            assert all(torch.equal(into[name], state[name]) for name in state)
            assert torch.equal(served.weight, learned.weight)
            streamed = {name: tensor async for name, tensor in weights.stream(1)}
            assert list(streamed) == list(state)
            assert torch.equal(streamed["half"], state["half"])

    run(main())
