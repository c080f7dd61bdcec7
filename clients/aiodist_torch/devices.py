"""Groups of several backends, such as ``cpu:aiodist,cuda:nccl``: each device has its own.

torch uses a process group written in Python for all devices, and makes no other backend beside it.
So we make a group of torch's for each further device, when its first tensor comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Mixed(Protocol):
    """Has groups for other devices beside itself."""

    def beside(self, device: torch.device) -> Any:
        """Return the group for tensors of `device`; itself if it takes them."""
        ...

    def forgo(self, error: Exception, x: Tensor | None) -> None:
        """Use up the turn of a collective of `x` that was not called because of `error`."""
        ...


def first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor in nested sequences. All tensors of one call are on one device."""
    if isinstance(value, (tuple, list)):  # first, because torch checks types of tensors in Python
        for item in value:
            if (found := first_tensor(item)) is not None:
                return found
        return None
    return value if isinstance(value, Tensor) else None


def are_plain(values: Sequence[Any]) -> bool:
    """Tell whether no tensor in nested sequences is of a class derived from torch's."""
    for value in values:
        kind = value.__class__
        if kind is Tensor:
            continue
        if isinstance(value, (tuple, list)):
            if not are_plain(value):
                return False
        elif isinstance(value, Tensor):
            return False
    return True


def awaited(value: Any) -> Any:
    """Return nested sequences with results in the place of tensors that wait for theirs.

    Functional collectives of torch return such tensors. Raises the error of a collective that has
    failed.
    """
    if isinstance(value, (tuple, list)):
        return [awaited(each) for each in value]
    wait = getattr(value, "trigger_wait", None)
    return value if wait is None else wait()


def backends_of(group: Any) -> dict[str, str]:
    """Return the backends of a process group of aiodist, by type of device. "cpu" is always
    aiodist's."""
    # torch has no entry for a group while it makes it, nor for groups that it has not made.
    config = dist.distributed_c10d._world.pg_backend_config.get(group, "cpu:aiodist")
    # The entry holds the names that the program gave. They may differ from ours, because a process
    # can make aiodist answer for Gloo (see `replacing`).
    return dict(pair.split(":") for pair in config.split(",")) | {"cpu": "aiodist"}


def backend_for(group: Any, device: torch.device) -> str:
    """Return the name of the backend for tensors of `device`. Raises RuntimeError if there is
    none."""
    backends = backends_of(group)
    if device.type in backends:
        return backends[device.type]
    named = ",".join(f"{kind}:{backend}" for kind, backend in backends.items())
    raise RuntimeError(
        f"this process group ({named}) has no backend for tensors of {device}: move them to the "
        f'CPU, or make the group with backend="{named},{device.type}:…"'
    )


def group_beside(group: Any, device: torch.device, timeout: timedelta) -> Any:
    """Make a new group of the same ranks for tensors of `device`; `group` if it takes them itself.

    Raises RuntimeError if there is no backend for `device`.
    """
    name = backend_for(group, device)
    if name == "aiodist":
        return group
    return dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timeout,
        backend=f"{device.type}:{name}",
        use_local_synchronization=True,
        group_desc=f"{group.group_desc}:{device.type}",
    )
