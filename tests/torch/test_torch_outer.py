"""DiLoCo and LocalSGD, of members in one loop."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
import torch

import aiodist
import aiodist_torch
from aiodist.codecs import int8

EVERY = 3


def model(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Linear(4, 2)


def outer_of(net):
    return torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def inner(net, member, step):
    """One inner step, which depends on the member."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.cos(parameter * (member + 1) + step) / 10)


def flat(net):
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach()


def reference(weights, rounds):
    """The parameters of synchronous DiLoCo, by hand."""
    whole = model()
    outer = outer_of(whole)
    for turn in range(rounds):
        total = [torch.zeros_like(each) for each in whole.parameters()]
        for member, weight in enumerate(weights):
            net = model()
            net.load_state_dict(whole.state_dict())
            for step in range(EVERY):
                inner(net, member, turn * EVERY + step)
            for sum_, began, own in zip(total, whole.parameters(), net.parameters(), strict=True):
                sum_ += weight * (began.detach() - own.detach())
        for parameter, sum_ in zip(whole.parameters(), total, strict=True):
            parameter.grad = sum_ / sum(weights)
        outer.step()
    return flat(whole)


class Members:
    def __init__(self, stack, address, **options):
        self.stack, self.address = stack, address
        self.options = {"grace": 30.0, "op_timeout": 30.0, **options}

    async def enter(self, name, quorum=2):
        return await self.stack.enter_async_context(
            aiodist.averager(
                "outer", address=self.address, name=name, quorum=quorum, **self.options
            )
        )


async def train(diloco, net, member, rounds, weight=1.0, start=0):
    for step in range(start * EVERY, (start + rounds) * EVERY):
        inner(net, member, step)
        found = await diloco.step(weight=weight)
        assert (found is not None) == (step % EVERY == EVERY - 1)


def test_members_do_what_one_process_would(run):
    async def main():
        async with aiodist.Coordinator() as coordinator, AsyncExitStack() as stack:
            members = Members(stack, coordinator.address)
            averagers = [await members.enter(name) for name in "ab"]
            nets = [model(), model()]
            both = [
                aiodist_torch.DiLoCo(net, outer_of(net), averager, every=EVERY)
                for net, averager in zip(nets, averagers, strict=True)
            ]
            await asyncio.gather(
                *[train(both[m], nets[m], m, rounds=3, weight=m + 1.0) for m in range(2)]
            )
            assert torch.equal(flat(nets[0]), flat(nets[1]))
            torch.testing.assert_close(flat(nets[0]), reference([1.0, 2.0], 3))

    run(main())


def test_a_new_member_begins_where_the_others_are(run):
    async def main():
        async with aiodist.Coordinator() as coordinator, AsyncExitStack() as stack:
            members = Members(stack, coordinator.address)
            first = await members.enter("a", quorum=1)
            net = model()
            diloco = aiodist_torch.DiLoCo(net, outer_of(net), first, every=EVERY)
            await train(diloco, net, 0, rounds=2)
            second = await members.enter("b", quorum=1)
            other = model(seed=2)
            joined = aiodist_torch.DiLoCo(other, outer_of(other), second, every=EVERY)
            await joined.join()
            assert torch.equal(flat(other), flat(net))
            # Their outer optimizers have the same momentum: so they stay together.
            await asyncio.gather(
                train(diloco, net, 0, rounds=2, start=2), train(joined, other, 1, rounds=2, start=2)
            )
            assert torch.equal(flat(other), flat(net))
            third = await members.enter("c", quorum=1)
            wrong = torch.nn.Linear(3, 2)
            with pytest.raises(ValueError, match="another model"):
                await aiodist_torch.DiLoCo(wrong, outer_of(wrong), third, every=1).join()

    run(main())


@pytest.mark.parametrize("codec", [None, int8()])
def test_local_sgd_has_the_mean(run, codec):
    async def main():
        async with aiodist.Coordinator() as coordinator, AsyncExitStack() as stack:
            members = Members(stack, coordinator.address, codec=codec)
            averagers = [await members.enter(name) for name in "ab"]
            nets = [model(), model()]
            wanted = []
            for member in range(2):
                alone = model()
                for step in range(EVERY):
                    inner(alone, member, step)
                wanted.append(flat(alone))
            both = [
                aiodist_torch.LocalSGD(net, averager, every=EVERY)
                for net, averager in zip(nets, averagers, strict=True)
            ]
            await asyncio.gather(*[train(both[m], nets[m], m, rounds=1) for m in range(2)])
            assert torch.equal(flat(nets[0]), flat(nets[1]))
            most = 1e-6 if codec is None else 5e-3
            torch.testing.assert_close(flat(nets[0]), sum(wanted) / 2, rtol=0, atol=most)

    run(main())


def test_arguments_that_are_refused():
    net = model()
    with pytest.raises(ValueError, match="every is an int"):
        aiodist_torch.LocalSGD(net, None, every=0)
    with pytest.raises(ValueError, match="other parameters"):
        aiodist_torch.DiLoCo(net, outer_of(model()), None, every=1)
