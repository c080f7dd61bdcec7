"""The trainer's side: rank 0 publishes what all ranks gather, and tells vLLM to load it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

import aiodist
from aiodist.threads.engine import engine
from aiodist_vllm import BACKEND


@dataclass
class TrainerInfo(TrainerInitInfo):
    """The options of a trainer.

    `channel` and `address` (of the coordinator) are sent to vLLM, but `options` of
    `aiodist.publisher`, such as `keep` and `token`, are not. Without a token, AIODIST_TOKEN is
    used. `timeout`: seconds that vLLM waits for the next tensor.
    """

    backend: ClassVar[str] = BACKEND

    channel: str
    address: str
    timeout: float = 300.0
    options: dict[str, Any] = field(default_factory=dict)


class ChannelTrainer(TrainerWeightTransferEngine[TrainerInfo]):
    """Make one on every rank of the trainer, by vLLM's `WeightTransferTrainerFactory`."""

    init_info_cls = TrainerInfo
    _out: aiodist.Publisher | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: TrainerInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> ChannelTrainer:
        if source is None or not source.implements_iter_full():
            raise ValueError("aiodist publishes full tensors: expected a source with `iter_full`")
        trainer = cls(
            client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank
        )
        if trainer.is_sender:
            trainer._enter(init_info)
            say = {name: getattr(init_info, name) for name in ("channel", "address", "timeout")}
            try:
                client.init_weight_transfer_engine(say)
            except BaseException:
                trainer.shutdown()  # so that the caller can try again
                raise
        return trainer

    def _enter(self, info: TrainerInfo) -> None:
        out = aiodist.publisher(info.channel, address=info.address, **info.options)
        engine().wait_for(out.__aenter__())
        engine().at_exit(self._leave)
        self._out = out

    def send_weights(self) -> None:
        assert self.source is not None
        # All ranks must iterate, because gathering a tensor is a collective of all of them.
        tensors = {
            name: tensor.detach().cpu()
            for name, tensor in self.source.iter_full()
            if self.is_sender
        }
        if self._out is None:
            return
        # Higher than any version that vLLM has had, even after a restart.
        version = 0 if self._out.newest is None else self._out.newest + 1
        engine().wait_for(self._out.publish(tensors, version=version))
        self.client.start_weight_update()
        self.client.update_weights({"version": version})
        self.client.finish_weight_update(weight_version=str(version))

    def shutdown(self) -> None:
        if self._out is not None:
            engine().forget(self._leave)
            engine().wait_for(self._leave())

    async def _leave(self) -> None:
        out, self._out = self._out, None
        if out is not None:
            await out.__aexit__(None, None, None)
