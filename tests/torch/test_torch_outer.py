"""DiLoCo and LocalSGD, of members in one loop."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import torch

import aiodist
import aiodist_torch
from aiodist.codecs import int8
from aiodist.membership import histories

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


class Fragments:
    """Streaming DiLoCo of some members, by hand: `turn` is what each boundary does to all."""

    def __init__(self, weights):
        self.weights = weights
        self.nets = [model() for _ in weights]
        whole = model()
        self.begun = list(whole.parameters())  # where all began, and their outer optimizer
        self.outer = outer_of(whole)
        self.sent = None  # the fragment, and the parameters of each member
        self.next = 0

    def turn(self):
        if self.sent is not None:
            at, values = self.sent
            total = sum(self.weights)
            means = [
                w / total * (self.begun[at].detach() - v)
                for w, v in zip(self.weights, values, strict=True)
            ]
            self.begun[at].grad = sum(means)
            self.outer.step()
            self.begun[at].grad = None
            with torch.no_grad():
                for net, value in zip(self.nets, values, strict=True):
                    own = list(net.parameters())[at]
                    own.copy_(self.begun[at] + (own - value))
        at = self.next
        self.sent = (at, [list(net.parameters())[at].detach().clone() for net in self.nets])
        self.next = 1 - at


def test_fragments_are_averaged_while_steps_go_on(run):
    async def main():
        async with aiodist.Coordinator() as coordinator, AsyncExitStack() as stack:
            members = Members(stack, coordinator.address, parts=("weights", "biases"))
            averagers = [await members.enter(name) for name in "ab"]
            nets = [model(), model()]
            both = [
                aiodist_torch.DiLoCo(net, outer_of(net), averager, every=4, fragments=2)
                for net, averager in zip(nets, averagers, strict=True)
            ]
            hand = Fragments([1.0, 2.0])

            async def member(m):
                found = []
                for step in range(12):
                    inner(nets[m], m, step)
                    found.append(await both[m].step(weight=m + 1.0))
                return [one for one in found if one is not None]

            first, second = await asyncio.gather(member(0), member(1))
            for step in range(12):
                for m, net in enumerate(hand.nets):
                    inner(net, m, step)
                if step % 2:
                    hand.turn()
            assert len(first) == 5  # the sixth is under way
            for one, other in zip(first, second, strict=True):
                assert [leaf.tolist() for leaf in one.value] == [
                    leaf.tolist() for leaf in other.value
                ]
            # Fragments that are sent for the first time have two steps less behind them.
            assert [one.weights for one in first[:3]] == [(2.0, 4.0), (4.0, 8.0), (4.0, 8.0)]
            for net, wanted in zip(nets, hand.nets, strict=True):
                torch.testing.assert_close(flat(net), flat(wanted))
            tree = (await stack.enter_async_context(newcomer(members))).tree
            for at, (begun,) in enumerate(tree["fragments"]):
                torch.testing.assert_close(torch.as_tensor(begun), hand.begun[at].detach())

    run(main())


@asynccontextmanager
async def newcomer(members):
    """What a new member begins with."""
    yield await (await members.enter("new")).state()


def test_a_new_member_begins_with_the_fragment_whose_turn_it_is(run):
    async def main():
        async with aiodist.Coordinator() as coordinator, AsyncExitStack() as stack:
            members = Members(stack, coordinator.address, parts=("weights", "biases"), grace=0.0)
            net, other = model(), model(seed=2)
            diloco = aiodist_torch.DiLoCo(
                net, outer_of(net), await members.enter("a", quorum=1), every=2, fragments=2
            )
            for step in range(4):
                inner(net, 0, step)
                await diloco.step()
            averager = await members.enter("b", quorum=1)
            joined = aiodist_torch.DiLoCo(other, outer_of(other), averager, every=2, fragments=2)
            await joined.join()
            # Three outer steps are taken, and the fourth is under way: the second of the biases.
            assert averager.rounds == {"weights": 2, "biases": 1}
            await joined.step()
            late = await joined.step()
            assert late.late
            assert len(late.value) == 1
            assert late.value[0].shape == (2,)  # of the biases
            # What is under way does not keep it from joining again.
            await joined.join()
            assert (await joined.step()) is None

    run(main())


def test_a_member_that_is_late_takes_fewer_steps(run):
    async def main():
        async with aiodist.Coordinator() as coordinator, AsyncExitStack() as stack:
            members = Members(stack, coordinator.address, grace=0.0)
            averagers = [await members.enter(name, quorum=1) for name in "ab"]
            nets = [model(), model()]
            one, other = [
                aiodist_torch.LocalSGD(net, averager, every=4)
                for net, averager in zip(nets, averagers, strict=True)
            ]

            async def steps_of(diloco):
                """How many inner steps it takes to an outer step, and whether that is late."""
                count = 1
                while (found := await diloco.step()) is None:
                    count += 1
                return count, found.late

            assert await steps_of(one) == (4, False)
            await other.join()
            assert await steps_of(other) == (4, False)
            assert await steps_of(one) == (4, True)
            assert await steps_of(other) == (4, False)
            assert await steps_of(one) == (2, True)
            assert await steps_of(one) == (1, False)
            assert await steps_of(one) == (2, False)
            assert await steps_of(one) == (4, False)
            with pytest.raises(aiodist.StaleError):
                await steps_of(other)
            await other.join()
            assert torch.equal(flat(nets[0]), flat(nets[1]))
            assert await steps_of(other) == (2, False)

    run(main())


def test_a_late_fragment_is_followed_at_once_by_the_next(run):
    """What was late counts in the next round of its fragment, with the weight of both."""

    async def main():
        async with aiodist.Coordinator() as coordinator, AsyncExitStack() as stack:
            options = {"parts": ("weights", "biases"), "grace": 0.0, "carry": True}
            members = Members(stack, coordinator.address, **options)
            averagers = [await members.enter(name, quorum=1) for name in "ab"]
            one, other = [
                aiodist_torch.DiLoCo(net, outer_of(net), averager, every=4, fragments=2)
                for net, averager in zip([model(), model()], averagers, strict=True)
            ]
            for _ in range(6):  # then the second round of the weights is under way
                await one.step()
            await one._sent.work
            await other.join()
            found = []
            for _ in range(6):
                found.append(await other.step())
                await asyncio.wait({other._sent.work})
            rounds = [one and (one.round, one.late, one.weights) for one in found]
            # The weights are late, and the biases take their turn. After two inner steps more, the
            # weights take theirs.
            assert rounds[:4] == [None, (2, True, (4.0,)), None, (2, False, (2.0,))]
            assert rounds[4:] == [None, (3, False, (4.0,))]
            assert found[-1].contributors == ("b",)

    run(main())


def test_a_member_that_misses_the_first_round_joins_by_itself(run):
    async def main():
        async with aiodist.Coordinator() as coordinator, AsyncExitStack() as stack:
            members = Members(stack, coordinator.address, grace=0.0)
            averagers = [await members.enter(name, quorum=1) for name in "ab"]
            nets = [model(), model()]
            one, other = [
                aiodist_torch.DiLoCo(net, outer_of(net), averager, every=EVERY)
                for net, averager in zip(nets, averagers, strict=True)
            ]
            await train(one, nets[0], 0, rounds=2)
            await train(other, nets[1], 1, rounds=1)  # its contribution is round 3
            assert torch.equal(flat(nets[0]), flat(nets[1]))
            assert averagers[1].rounds == {"": 2}
            await train(one, nets[0], 0, rounds=1)
            await train(other, nets[1], 1, rounds=1)
            assert averagers[0].rounds == averagers[1].rounds == {"": 3}
            assert torch.equal(flat(nets[0]), flat(nets[1]))

    run(main())


KILLED = """
import asyncio, os, sys
import numpy as np
import aiodist

async def main():
    options = {"address": sys.argv[1], "quorum": 2, "grace": 30.0}
    async with (
        aiodist.averager("outer", name="c", **options) as one,
        aiodist.averager("outer", name="d", **options) as other,
    ):
        tree = [np.zeros((2, 4), np.float32), np.zeros(2, np.float32)]
        await asyncio.gather(*(each.average(tree) for each in (one, other)))
        os._exit(0)

asyncio.run(main())
"""


def test_a_training_whose_members_were_all_killed_begins_anew(run, monkeypatch):
    """There is no member to begin from."""
    monkeypatch.setattr(histories, "RETURN_WINDOW", 0.1)

    async def main():
        async with aiodist.Coordinator() as coordinator, AsyncExitStack() as stack:
            killed = await asyncio.create_subprocess_exec(
                sys.executable, "-c", KILLED, coordinator.address
            )
            try:
                assert await asyncio.wait_for(killed.wait(), 60.0) == 0
            finally:
                with contextlib.suppress(ProcessLookupError):
                    killed.kill()
                await killed.wait()
            members = Members(stack, coordinator.address)
            averagers = [await members.enter(name) for name in "ab"]
            nets = [model(), model()]
            await asyncio.gather(
                *(
                    train(aiodist_torch.DiLoCo(net, outer_of(net), each, every=EVERY), net, m, 1)
                    for m, (net, each) in enumerate(zip(nets, averagers, strict=True))
                )
            )
            assert averagers[0].rounds == averagers[1].rounds == {"": 1}
            for net in nets:
                torch.testing.assert_close(flat(net), reference([1, 1], 1))

    run(main())


async def test_gradients_and_weights_outlive_an_outer_step_and_a_failure():
    async with aiodist.Coordinator() as coordinator, AsyncExitStack() as stack:
        members = Members(stack, coordinator.address)
        net = model()
        net.weight.grad = torch.ones_like(net.weight)
        averager = await members.enter("a")
        diloco = aiodist_torch.DiLoCo(net, outer_of(net), averager, every=2)
        begun = flat(net)
        for step in range(2):
            inner(net, 0, step)
            waiting = asyncio.ensure_future(diloco.step(weight=3.0))
            await asyncio.sleep(0)
            moved = flat(net)
            if waiting.done():
                continue
            waiting.cancel()  # there is no quorum
            await asyncio.wait({waiting})
        assert torch.equal(flat(net), moved)
        second = await members.enter("b")
        found, _ = await asyncio.gather(
            diloco.step(), second.average([torch.zeros(2, 4), torch.zeros(2)], weight=7.0)
        )
        assert found.weights == (7.0, 7.0)
        assert torch.equal(net.weight.grad, torch.ones_like(net.weight))
        wanted = begun + 0.7 * 1.9 * (moved - begun) / 2
        torch.testing.assert_close(flat(net), wanted)


async def test_arguments_that_are_refused():
    net = model()
    with pytest.raises(ValueError, match="every is an int"):
        aiodist_torch.LocalSGD(net, None, every=0)
    with pytest.raises(ValueError, match="divides every=5, not 2"):
        aiodist_torch.DiLoCo(net, outer_of(net), None, every=5, fragments=2)
    with pytest.raises(ValueError, match="the model has 2 arrays"):
        aiodist_torch.DiLoCo(net, outer_of(net), None, every=6, fragments=3)
    with pytest.raises(ValueError, match="other parameters"):
        aiodist_torch.DiLoCo(net, outer_of(model()), None, every=1)
    async with aiodist.Coordinator() as coordinator, AsyncExitStack() as stack:
        averager = await Members(stack, coordinator.address).enter("a")
        with pytest.raises(ValueError, match="enter it with as many, such as parts=\\('0', '1'"):
            aiodist_torch.DiLoCo(net, outer_of(net), averager, every=2, fragments=2)


async def test_an_outer_step_that_fails_is_tried_again(monkeypatch):
    async with aiodist.Coordinator() as coordinator, AsyncExitStack() as stack:
        net = model()
        averager = await Members(stack, coordinator.address).enter("a", quorum=1)
        outer = outer_of(net)
        diloco = aiodist_torch.DiLoCo(net, outer, averager, every=EVERY)
        await train(diloco, net, 0, rounds=1)
        for step in range(EVERY, 2 * EVERY):
            inner(net, 0, step)
            if step < 2 * EVERY - 1:
                await diloco.step()
        moved = flat(net)
        net.weight.grad = torch.ones_like(net.weight)

        def fails():
            type(outer).step(outer)
            raise MemoryError("for the momentum of the next array")

        with monkeypatch.context() as patch:
            patch.setattr(outer, "step", fails)
            with pytest.raises(MemoryError):
                await diloco.step()
        assert torch.equal(flat(net), moved)
        assert torch.equal(net.weight.grad, torch.ones_like(net.weight))
        found = await diloco.step()
        assert (found.round, averager.rounds) == (2, {"": 2})
        torch.testing.assert_close(flat(net), reference([1.0], 2))
