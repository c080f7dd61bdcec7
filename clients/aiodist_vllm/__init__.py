"""aiodist as a backend of weight transfer in vLLM: versions of weights through a channel.

`register` is a plugin of vLLM (the entry point `vllm.general_plugins`), so vLLM calls it in each of
its processes. A trainer calls it itself.
"""

import functools
import logging

BACKEND = "aiodist"
"""The name of the backend in vLLM."""

log = logging.getLogger("aiodist.vllm")


@functools.cache  # vLLM may load plugins more than once
def register() -> None:
    """Make ``"aiodist"`` a backend of weight transfer in this process. Idempotent."""
    try:
        from vllm.distributed.weight_transfer.factory import (
            WeightTransferEngineFactory,
            WeightTransferTrainerFactory,
        )
    except ImportError as error:
        # Only log this, because every process with both packages runs this, and may not need it.
        log.info("no backend of weight transfer: this vLLM is older than 0.33: %s", error)
        return
    WeightTransferEngineFactory.register_engine(BACKEND, "aiodist_vllm.worker", "ChannelEngine")
    WeightTransferTrainerFactory.register_engine(BACKEND, "aiodist_vllm.trainer", "ChannelTrainer")


__all__ = ["BACKEND", "register"]
