"""`DiLoCo` and `LocalSGD`: inner steps alone, outer steps with all members of an averager."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from aiodist.averaging.averager import Averaged, Averager


class DiLoCo:
    """Train a model for `every` inner steps alone, then take an outer step with all members.

    The outer gradient is the mean, by weight, of how far members have moved from where they all
    began. `outer_optimizer` takes a step with it from there. All members that are in the round, and
    all that get its result, then have the same parameters.

    Source: Douillard et al., "DiLoCo: Distributed low-communication training of language models",
    2023, which uses SGD with Nesterov momentum 0.9 and a rate of 0.7.

    Args:
        model: its parameters that require gradients, on the CPU, are averaged. They must be the
            same on all members at first: use one seed, or call `join`.
        outer_optimizer: an optimizer of the parameters of `model`. The inner optimizer is yours.
        averager: an `aiodist.Averager` for this model alone, of `ReduceOp.AVG`.
        every: how many inner steps an outer step is made of.

    For example::

        async with aiodist.averager("outer", address=address, quorum=3, carry=True) as averager:
            outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            diloco = aiodist_torch.DiLoCo(model, outer, averager, every=500)
            for batch in batches:
                train(model, batch)  # with an inner optimizer
                await diloco.step(weight=len(batch))
    """

    def __init__(
        self,
        model: nn.Module,
        outer_optimizer: torch.optim.Optimizer,
        averager: Averager,
        *,
        every: int,
    ) -> None:
        if type(every) is not int or every < 1:
            raise ValueError(f"every is an int from 1 on, not {every!r}")
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        held = {id(each) for group in outer_optimizer.param_groups for each in group["params"]}
        if held != {id(each) for each in self._parameters}:
            raise ValueError(
                "outer_optimizer has other parameters than those of model that require gradients: "
                "make it of model.parameters()"
            )
        self._optimizer = outer_optimizer
        self._averager = averager
        self._every = every
        self._begun = self._copied()  # where all members began
        self._steps = 0  # inner steps since then
        self._weight = 0.0  # of these steps

    async def step(self, *, weight: float = 1.0) -> Averaged | None:
        """Call this after each inner step. The outer step is taken within the last call of `every`.

        `weight`: how much this inner step counts, such as its number of tokens. Returns what the
        round gave, or None if there was no outer step. If the call raises, the model is as it was,
        and the next call tries the outer step again.

        Raises what `aiodist.Averager.average` raises.
        """
        self._steps += 1
        self._weight += weight
        if self._steps < self._every:
            return None
        moved = [
            begun - own.detach() for begun, own in zip(self._begun, self._parameters, strict=True)
        ]
        found = await self._averager.average(moved, weight=self._weight)
        self._take(found.value)
        await self._averager.publish_state(self._state())
        return found

    async def join(self, *, timeout: float | None = None) -> None:
        """Begin where the other members are: with their parameters and the state of their outer
        optimizer. Call this in a new member, before its first step. It waits until a member has
        taken an outer step.

        Raises what `aiodist.Averager.state` raises, and ValueError if the state is that of another
        model.
        """
        tree = (await self._averager.state(timeout=timeout)).tree
        parameters = tree["parameters"]
        if [tuple(each.shape) for each in parameters] != [
            tuple(each.shape) for each in self._parameters
        ]:
            raise ValueError("the other members average another model: shapes differ")
        self._set([torch.as_tensor(each) for each in parameters])
        state = self._optimizer.state_dict()
        state["state"] = {int(index): each for index, each in tree["optimizer"].items()}
        self._optimizer.load_state_dict(state)
        self._begin()

    def _take(self, gradients: list[Any]) -> None:
        """Take an outer step from where all began."""
        self._set(self._begun)
        for own, gradient in zip(self._parameters, gradients, strict=True):
            own.grad = torch.as_tensor(gradient)
        self._optimizer.step()
        for own in self._parameters:
            own.grad = None
        self._begin()

    def _begin(self) -> None:
        self._begun = self._copied()
        self._steps, self._weight = 0, 0.0

    def _state(self) -> dict[str, Any]:
        state = self._optimizer.state_dict()["state"]
        kept = {str(index): dict(each) for index, each in state.items()}
        return {"parameters": self._begun, "optimizer": kept}

    def _copied(self) -> list[Tensor]:
        return [each.detach().clone() for each in self._parameters]

    def _set(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for own, value in zip(self._parameters, values, strict=True):
                own.copy_(value)


class LocalSGD(DiLoCo):
    """Train a model for `every` inner steps alone, then average it over all members.

    This is `DiLoCo` whose outer step goes to the mean of the parameters.

    Source: Stich, "Local SGD converges fast and communicates little", 2019.

    Args:
        model, averager, every: as for `DiLoCo`.

    For example::

        async with aiodist.averager("model", address=address, quorum=2, carry=True) as averager:
            local = aiodist_torch.LocalSGD(model, averager, every=100)
            for batch in batches:
                train(model, batch)  # with an optimizer of its own
                await local.step()
    """

    def __init__(self, model: nn.Module, averager: Averager, *, every: int) -> None:
        outer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1.0)
        super().__init__(model, outer, averager, every=every)
