"""vLLM's side: each worker subscribes to the channel, and loads the version that the trainer names.

The workers of one host share one copy of a version in memory, and load from it. If a worker fails
during an update, its model is mixed of two versions, as with vLLM's own backends. vLLM reports that
to the trainer, and the next update repairs it, because it loads everything.

A layer in which nothing changed is not loaded again. vLLM makes one parameter of several arrays,
such as q, k and v, and loads such a parameter as a whole or not at all. So layers are left out as a
whole, and arrays outside of numbered layers are always loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

import aiodist
from aiodist.threads.engine import EngineStream, engine


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The trainer's first message.

    It has no token, because each worker reads AIODIST_TOKEN. `timeout`: seconds to wait for the
    next tensor.
    """

    channel: str
    address: str
    timeout: float = 300.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The trainer's message for each update. It names a version, because all workers of a server
    must load the same one, and a newer one may exist."""

    version: int


def layer_of(name: str) -> str | None:
    """The layer of an array, up to its number: "model.layers.3"; None: it is in none."""
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: at + 1])
    return None


class ChannelEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The engine that vLLM makes in each worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _weights: aiodist.Subscriber | None = None
    _timeout = 0.0
    _received: int | None = None
    """The version that was given to the model in this update."""
    _loaded: int | None = None
    """The version that the model has; None: it may be a mixture."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        weights = aiodist.subscriber(init_info.channel, address=init_info.address)
        engine().wait_for(weights.__aenter__())
        engine().at_exit(self._leave)
        self._weights, self._timeout = weights, init_info.timeout
        self._received = self._loaded = None

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._received = None
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._loaded = self._received

    def receive_weights(self, update_info: UpdateInfo) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        if self._weights is None:
            raise RuntimeError("init_transfer_engine has to be called first")
        version, base = update_info.version, self._loaded
        self._loaded = None  # until all of it is loaded
        layers = None if base is None else self._changed_layers(self._weights, version, base)
        with disable_mtp_completeness_check():
            self.model.load_weights(self._tensors(self._weights, version, layers))
        self._received = version

    def _changed_layers(
        self, weights: aiodist.Subscriber, version: int, base: int
    ) -> set[str | None]:
        async def changed() -> set[str]:
            async with asyncio.timeout(self._timeout):
                return await weights.changed(version, since=base)

        return {None, *map(layer_of, engine().wait_for(changed()))}

    def _tensors(
        self, weights: aiodist.Subscriber, version: int, layers: set[str | None] | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of some layers (None: of all), each as soon as it is here, while others
        are in flight."""
        arrays = EngineStream(weights.stream(version))
        try:
            while (found := engine().wait_for(arrays.next(self._timeout))) is not None:
                name, tensor = found
                if layers is None or layer_of(name) in layers:
                    yield name, tensor.to(self.device)
        finally:
            engine().wait_for(arrays.close())

    def shutdown(self) -> None:
        if self._weights is not None:
            engine().forget(self._leave)
            engine().wait_for(self._leave())

    async def _leave(self) -> None:
        weights, self._weights = self._weights, None
        if weights is not None:
            await weights.__aexit__(None, None, None)


__all__ = ["ChannelEngine", "InitInfo", "UpdateInfo"]
