"""`dist.shrink_group`: torch uses the smaller group that aiodist has made as the group itself.

torch asks a backend to shrink, then makes a process group of its own in C++, and registers the new
backend there. That works only for backends in C++, and aiodist gives a whole process group. So we
replace this one step of torch, for aiodist's groups only.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed.distributed_c10d as torch_groups

from aiodist_torch.methods import Methods


@cache
def expect_shrunk_groups() -> None:
    """Make `dist.shrink_group` of this process use groups of aiodist as they are. Idempotent."""
    module: Any = torch_groups
    create = module._create_shrunk_process_group

    def create_shrunk_process_group(
        new_backend: Any, remaining_ranks: list[int], metadata: dict[str, Any], is_default: bool
    ) -> Any:
        """Return the process group that torch registers in place of the one that was shrunk."""
        if not isinstance(new_backend, Methods):
            return create(new_backend, remaining_ranks, metadata, is_default)
        # The names that torch gives its own.
        group: Any = new_backend
        shrunk = f"{metadata['original_group_name']}:shrunk"
        group._set_group_name(metadata["new_group_name"])
        group._set_group_desc("default:shrunken" if is_default else shrunk)
        return group

    module._create_shrunk_process_group = create_shrunk_process_group
