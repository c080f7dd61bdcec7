"""`DiLoCo` and `LocalSGD`: inner steps alone, outer steps with all members of an averager."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aiodist.averaging.averager import Averaged, Averager
from aiodist.errors import StaleError


@dataclass(slots=True)
class _Fragment:
    """Parameters that are averaged together, in a part of the averager. `begun`: where all members
    began with them. `weight`: of the inner steps since then that were not offered to a round."""

    part: str
    parameters: list[nn.Parameter] = field(default_factory=list)
    begun: list[Tensor] = field(default_factory=list)
    weight: float = 0.0

    @property
    def size(self) -> int:
        return sum(each.numel() for each in self.parameters)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A fragment that is being averaged: the parameters that were offered, with which weight."""

    fragment: _Fragment
    values: list[Tensor]
    weight: float
    work: asyncio.Future[Averaged]


class DiLoCo:
    """Train a model for `every` inner steps alone, then take an outer step with all members.

    The outer gradient is the mean, by weight, of how far members have moved from where they all
    began. `outer_optimizer` takes a step with it from there. All members that are in the round, and
    all that get its result, then have the same parameters.

    With `fragments`, the parameters are cut into as many fragments of about the same size. They
    take their outer steps in turn, each one once in `every` inner steps. A fragment is averaged
    while the next `every / fragments` inner steps run, so these do not wait for the line. What
    this member learns meanwhile is added to the result.

    A member whose result is late takes half as many inner steps before its next outer step. After
    a result in time it takes twice as many, at most those of `every`. So a slow member, and one
    that has joined, falls into step with the others. With `fragments`, it takes a late result
    within the next call, and sends the next fragment at once. It takes fewer steps only if it was
    late more than once for each fragment.

    Source: Douillard et al., "DiLoCo: Distributed low-communication training of language models",
    2023. It uses SGD with Nesterov momentum 0.9 and a rate of 0.7. Fragments are those of Douillard
    et al., "Streaming DiLoCo with overlapping communication", 2025. That mixes a result and the
    parameters of the member by halves, where this adds what was learned meanwhile.

    Args:
        model: its parameters that require gradients, on the CPU, are averaged. They must be the
            same on all members at first: use one seed, or call `join`. A member that misses the
            first round joins by itself.
        outer_optimizer: an optimizer of the parameters of `model`. The inner optimizer is yours.
        averager: an `aiodist.Averager` for this model alone, of `ReduceOp.AVG`, with as many
            `parts` as there are fragments.
        every: how many inner steps an outer step is made of.
        fragments: how many fragments there are. All members give the same.

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
        fragments: int = 1,
    ) -> None:
        if type(every) is not int or every < 1:
            raise ValueError(f"every is an int from 1 on, not {every!r}")
        if type(fragments) is not int or fragments < 1 or every % fragments:
            raise ValueError(
                f"fragments is an int from 1 on that divides every={every}, not {fragments!r}"
            )
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        held = {id(each) for group in outer_optimizer.param_groups for each in group["params"]}
        if held != {id(each) for each in self._parameters}:
            raise ValueError(
                "outer_optimizer has other parameters than those of model that require gradients: "
                "make it of model.parameters()"
            )
        if fragments > len(self._parameters):
            raise ValueError(
                f"fragments={fragments}, but the model has {len(self._parameters)} arrays: give"
                " fewer fragments"
            )
        if len(averager.parts) != fragments:
            names = tuple(map(str, range(fragments)))
            raise ValueError(
                f"fragments={fragments}, but the averager has {len(averager.parts)} parts: enter"
                f" it with as many, such as parts={names}"
            )
        self._optimizer = outer_optimizer
        self._averager = averager
        self._fragments = [_Fragment(part) for part in averager.parts]
        for each in sorted(self._parameters, key=Tensor.numel, reverse=True):
            min(self._fragments, key=lambda one: one.size).parameters.append(each)
        for fragment in self._fragments:
            fragment.begun = _copied(fragment.parameters)
        self._next = 0  # the fragment whose turn is next
        self._most = every // fragments
        self._pace = self._most  # inner steps of a turn, as this member can keep up
        self._wanted = self._most  # inner steps until the next turn
        self._steps = 0  # of these, how many were taken
        self._missed = 0  # rounds in a row that it was late for
        self._sent: _Sent | None = None
        self._is_apart = False  # the others have begun without this member

    async def step(self, *, weight: float = 1.0) -> Averaged | None:
        """Call this after each inner step. The outer step is taken within the last call of `every`.

        With `fragments`, a call takes the outer step of the fragment that is being averaged, and
        begins to average the next one, once in `every / fragments` calls. It waits only if the
        result is not here by then.

        `weight`: how much this inner step counts, such as its number of tokens. Returns what the
        round gave, or None if there was no outer step. If the call raises, the model is as it was,
        and the next call tries the outer step again.

        Raises what `aiodist.Averager.average` raises. After StaleError, call `join`.
        """
        self._steps += 1
        for fragment in self._fragments:
            fragment.weight += weight
        if self._steps < self._wanted and not self._is_behind:
            return None
        if self._is_apart:
            await self.join()
            return None
        if not self._overlaps:
            return await self._receive(self._sent or self._send())
        found = None if self._sent is None else await self._receive(self._sent)
        self._send()
        self._steps, self._wanted = 0, self._pace
        return found

    @property
    def _overlaps(self) -> bool:
        """Whether a fragment is averaged while inner steps run."""
        return len(self._fragments) > 1

    @property
    def _is_behind(self) -> bool:
        """Whether the fragment that is being averaged is too late for its round."""
        if self._sent is None or not self._sent.work.done():
            return False
        work = self._sent.work
        return not work.cancelled() and work.exception() is None and work.result().late

    def _slower(self) -> None:
        """This member does not keep up."""
        self._pace, self._missed = max(1, self._pace // 2), 0

    async def join(self, *, timeout: float | None = None) -> None:
        """Begin where the other members are: with their parameters and the state of their outer
        optimizer. Call this in a new member, before its first step. It waits until a member has
        taken an outer step.

        What this member has learned and not offered is lost.

        Raises what `aiodist.Averager.state` raises, and ValueError if the state is that of another
        model.
        """
        if self._sent is not None:
            self._sent.work.cancel()
            await asyncio.wait({self._sent.work})
            self._sent = None
        tree = (await self._averager.state(timeout=timeout)).tree
        begun = [[torch.as_tensor(each) for each in one] for one in tree["fragments"]]
        if [[each.shape for each in one] for one in begun] != [
            [each.shape for each in one.begun] for one in self._fragments
        ]:
            raise ValueError("the other members average another model: shapes differ")
        for fragment, values in zip(self._fragments, begun, strict=True):
            _set(fragment.parameters, values)
            fragment.begun, fragment.weight = _copied(fragment.parameters), 0.0
        state = self._optimizer.state_dict()
        state["state"] = {int(index): each for index, each in tree["optimizer"].items()}
        self._optimizer.load_state_dict(state)
        self._next = tree["next"]
        self._steps = 0
        # The others average the next fragment already, so this member hurries if it need not wait.
        self._wanted = 1 if self._overlaps else self._pace
        self._is_apart = False
        await self._averager.publish_state(self._state)  # the one that gave it may be lost

    def _send(self) -> _Sent:
        """Begin to average the fragment whose turn it is."""
        fragment = self._fragments[self._next]
        values = _copied(fragment.parameters)
        moved = [begun - own for begun, own in zip(fragment.begun, values, strict=True)]
        work = self._averager.average(moved, weight=fragment.weight, part=fragment.part)
        # A program that ends its training looks at no result of what is under way.
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._sent = sent = _Sent(fragment, values, fragment.weight, work)
        fragment.weight = 0.0
        return sent

    async def _receive(self, sent: _Sent) -> Averaged:
        """Take the outer step of a fragment."""
        is_first = sent.fragment.part not in self._averager.rounds
        try:
            found = await sent.work
        except BaseException as error:
            self._sent = None
            sent.fragment.weight += sent.weight
            if isinstance(error, StaleError):
                self._slower()
            raise
        if is_first and found.round != 1:  # the others have begun before, and are elsewhere
            self._is_apart = True
            await self.join()
            return found
        self._take(sent, found.value)
        self._sent = None  # only now, because the next call tries a step that failed again
        if found.late and self._averager._settings.carry:
            # The next contribution includes this one, so it counts for the steps of both.
            sent.fragment.weight += sent.weight
        self._steps = 0
        self._next = (self._next + 1) % len(self._fragments)
        if not found.late:
            self._missed, self._pace = 0, min(self._most, self._pace * 2)
        elif self._overlaps and self._missed < len(self._fragments):
            self._missed += 1
        else:
            self._slower()
        self._wanted = self._pace
        await self._averager.publish_state(self._state)
        return found

    def _take(self, sent: _Sent, gradients: list[Any]) -> None:
        """Take an outer step from where all began, and then the steps since this was offered.

        If it raises, everything is as it was.
        """
        fragment, state = sent.fragment, self._optimizer.state
        were = _copied(fragment.parameters)
        known: dict[Tensor, Any] = {
            each: deepcopy(state[each]) for each in fragment.parameters if each in state
        }
        kept = [each.grad for each in self._parameters]
        for each in self._parameters:
            each.grad = None
        try:
            _set(fragment.parameters, fragment.begun)
            for own, gradient in zip(fragment.parameters, gradients, strict=True):
                own.grad = torch.as_tensor(gradient)
            self._optimizer.step()
            begun = _copied(fragment.parameters)
            with torch.no_grad():
                for own, now, value in zip(fragment.parameters, were, sent.values, strict=True):
                    own.add_(now - value)
        except BaseException:
            _set(fragment.parameters, were)
            for each in fragment.parameters:
                state.pop(each, None)
            state.update(known)
            raise
        finally:
            for each, grad in zip(self._parameters, kept, strict=True):
                each.grad = grad
        fragment.begun = begun

    def _state(self) -> dict[str, Any]:
        state = self._optimizer.state_dict()["state"]
        kept = {str(index): dict(each) for index, each in state.items()}
        begun = [fragment.begun for fragment in self._fragments]
        return {"fragments": begun, "optimizer": kept, "next": self._next}


def _copied(values: Sequence[Tensor]) -> list[Tensor]:
    return [each.detach().clone() for each in values]


def _set(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for own, value in zip(parameters, values, strict=True):
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
