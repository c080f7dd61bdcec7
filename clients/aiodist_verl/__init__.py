"""aiodist as a checkpoint engine of verl: versions of weights through a channel.

verl imports this package if its configuration has ``custom_backend_module: aiodist_verl``. The
import registers ``"aiodist"`` as a backend of `CheckpointEngineRegistry`.
"""

from aiodist_verl.checkpoint_engine import ChannelCheckpointEngine

__all__ = ["ChannelCheckpointEngine"]
