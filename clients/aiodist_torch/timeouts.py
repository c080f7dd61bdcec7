"""`_set_pg_timeout` of torch, for aiodist's groups, too.

torch sets the timeouts of its own backends only, and warns about all others. `dist.breakpoint`
sets a long one by it, and trainers a short one after their first step.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed.distributed_c10d as torch_groups

from aiodist_torch.methods import Methods


@cache
def expect_new_timeouts() -> None:
    """Make torch's function of this process set the timeouts of aiodist's groups. Idempotent."""
    module: Any = torch_groups
    set_of_others = module._set_pg_timeout

    def set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        """Set the deadline of later operations of `group`; None: of the default group."""
        asked: Any = torch_groups._get_default_group() if group is None else group
        is_ours = isinstance(asked, Methods)
        if is_ours:
            asked.set_timeout(timeout)
        if not is_ours or asked._beside:  # without these, torch would warn
            set_of_others(timeout, asked)

    module._set_pg_timeout = set_pg_timeout
