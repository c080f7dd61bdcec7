"""Communication hooks of DistributedDataParallel."""

# Annotations are not kept as text here, because torch looks at those of a hook.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future

from aiodist.codecs import Codec
from aiodist_torch.process_group import ProcessGroup

Hook = Callable[[Any, c10d.GradBucket], Future[Tensor]]


def codec_hook(codec: Codec, *, name: str = "ddp") -> Hook:
    """Make a hook for `DistributedDataParallel.register_comm_hook` that averages gradients by
    `codec`, which moves fewer bytes between hosts.

    The state of the hook is the process group of the model; None means the default group. It has to
    be one of aiodist. Gradients are of float32, float16 or bfloat16, on the CPU. With error
    feedback, what is lost belongs to the process group, `name` and the bucket: give each model that
    shares a process group another `name`.

    The hook raises what ``group.all_reduce(codec=…)`` raises, and TypeError for another process
    group.

    For example::

        model = DistributedDataParallel(Net())
        codec = aiodist.codecs.int8(error_feedback=True)
        model.register_comm_hook(None, aiodist_torch.codec_hook(codec))
    """

    def hook(state: Any, bucket: c10d.GradBucket) -> Future[torch.Tensor]:
        group = dist.group.WORLD if state is None else state
        if not isinstance(group, ProcessGroup):
            raise TypeError(
                f"codec_hook needs a process group of aiodist, not {group!r}: use the backend "
                "'aiodist'"
            )
        work = group.average_coded(bucket.buffer(), codec, f"{name} {bucket.index()}")
        return work.get_future().then(_first)

    return hook


def _first(future: Future[list[Tensor]]) -> Tensor:
    return future.value()[0]
