"""`dist.shrink_group`: torch takes the smaller group that aiodist has made for the group itself.

torch asks a backend to shrink, makes a process group of its own in C++, and registers there what
the backend gave. That takes backends in C++ alone, but what aiodist gives is the process group
itself. So this one step of torch is replaced, for aiodist's groups only.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed.distributed_c10d as torch_groups

from aiodist_torch.methods import Methods


@cache
def expect_shrunk_groups() -> None:
    """Have `dist.shrink_group` of this process take groups of aiodist as they are. Idempotent."""
    module: Any = torch_groups
    create = module._create_shrunk_process_group

    def create_shrunk_process_group(
        new_backend: Any, remaining_ranks: list[int], metadata: dict[str, Any], is_default: bool
    ) -> Any:
        """The process group that torch registers in the place of the one that was shrunk."""
        if not isinstance(new_backend, Methods):
            return create(new_backend, remaining_ranks, metadata, is_default)
        # The names that torch gives its own.
        group: Any = new_backend
        shrunk = f"{metadata['original_group_name']}:shrunk"
        group._set_group_name(metadata["new_group_name"])
        group._set_group_desc("default:shrunken" if is_default else shrunk)
        return group

    module._create_shrunk_process_group = create_shrunk_process_group
