"""A checkpoint engine of verl: actor rank 0 publishes, and all workers of the rollout subscribe.

verl makes a topology for each update, with the participants and the version. There is no process
group to rebuild when replicas come and go, and none that hangs when one dies. Channels stay open
between updates. They run on aiodist's event loop in a thread of its own, because verl's workers
call from several loops.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

import aiodist
from aiodist.threads.engine import EngineStream, engine

T = TypeVar("T")

PUBLISHER_ONLY = frozenset({"keep", "restart", "deltas"})
SUBSCRIBER_ONLY = frozenset({"max_bytes"})
"""Options of one side, because verl gives both sides the same ones."""

IDLE = -1
"""The rank of an actor that does not send."""

Tensors = Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]]


@CheckpointEngineRegistry.register("aiodist")
class ChannelCheckpointEngine(CheckpointEngine):
    """The engine that verl makes in each worker.

    Its arguments come from `engine_kwargs` of verl's configuration: `channel`, `address`, and
    further options of `aiodist.publisher` and `aiodist.subscriber`, each of which goes to the side
    that has it. The defaults are AIODIST_ADDRESS and AIODIST_TOKEN. `device`: where the rollout
    gets tensors (None: on the accelerator, if there is one). `timeout`: seconds to wait for the
    next tensor.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        channel: str = "verl",
        address: str | None = None,
        device: str | None = None,
        timeout: float = 300.0,
        **options: Any,
    ) -> None:
        self._is_master = is_master
        self._channel = channel
        self._options = {"address": address, **options}
        self._device = device or _accelerator()
        self._timeout = timeout
        self._out: aiodist.Publisher | None = None
        self._weights: aiodist.Subscriber | None = None
        self._version = 0

    def prepare(self) -> dict[str, Any]:
        if not self._is_master:
            return {}
        if self._out is None:
            out = aiodist.publisher(self._channel, **self._without(SUBSCRIBER_ONLY))
            self._enter(out)
            self._out = out
        newest = self._out.newest
        return {"version": 0 if newest is None else newest + 1}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        def told(ranks: Iterable[int]) -> dict[str, list[Any]]:
            listed = list(ranks)
            return {"rank": listed, "version": [metadata[0]["version"]] * len(listed)}

        actors = told([0] + [IDLE] * (actor_wg_world_size - 1))
        return actors, told(range(1, rollout_world_size + 1))

    def init_process_group(self, rank: int, version: int) -> None:
        self._version = version
        if rank > 0 and self._weights is None:
            weights = aiodist.subscriber(self._channel, **self._without(PUBLISHER_ONLY))
            self._enter(weights)
            self._weights = weights

    def finalize(self) -> None:
        """Nothing, because the channel stays open and frees old versions itself."""

    async def send_weights(self, weights: Tensors, global_steps: int | None = None) -> None:
        # All actors must iterate, because making each tensor is a collective of all of them.
        tensors = {
            name: tensor.detach().cpu()
            async for name, tensor in _each(weights)
            if self._out is not None
        }
        if self._out is not None:
            await _on_engine(self._out.publish(tensors, version=self._version))

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        if self._weights is None:
            raise RuntimeError("init_process_group has to be called first, with a rank from 1 on")
        # verl calls senders and receivers at the same time.
        before = self._version - 1
        await _on_engine(self._weights.wait(newer_than=before, timeout=self._timeout))
        arrays = EngineStream(self._weights.stream(self._version))
        try:
            while (found := await _on_engine(arrays.next(self._timeout))) is not None:
                name, tensor = found
                yield name, tensor.to(self._device)
        finally:
            await _on_engine(arrays.close())

    def _without(self, names: frozenset[str]) -> dict[str, Any]:
        return {name: value for name, value in self._options.items() if name not in names}

    def _enter(self, one: aiodist.Publisher | aiodist.Subscriber) -> None:
        engine().wait_for(one.__aenter__())
        engine().at_exit(self._leave)

    def close(self) -> None:
        """Leave the channel. verl does not call this, so the end of the process does it, too."""
        engine().forget(self._leave)
        engine().wait_for(self._leave())

    async def _leave(self) -> None:
        out, weights = self._out, self._weights
        self._out = self._weights = None
        for one in (out, weights):
            if one is not None:
                await one.__aexit__(None, None, None)


async def _each(weights: Tensors) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if isinstance(weights, AsyncIterator):
        async for one in weights:
            yield one
    else:
        for one in weights:
            yield one


async def _on_engine(work: Coroutine[Any, Any, T]) -> T:
    """Run on aiodist's loop, and wait on this one."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, engine().loop))


def _accelerator() -> str:
    found = torch.accelerator.current_accelerator()
    return "cpu" if found is None else found.type
