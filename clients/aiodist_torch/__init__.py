"""The torch.distributed backend: ``dist.init_process_group("aiodist")``.

torch finds it by itself where aiodist is installed; elsewhere ``import aiodist_torch`` makes it
known. `ProcessGroup` is what torch's calls then go to, `Store` a torch Store kept by a coordinator,
`last_error` what went wrong last in a group, for programs that hear of it through torch, and
`codec_hook` averages the gradients of DistributedDataParallel in fewer bytes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aiodist_torch.registration import register

if TYPE_CHECKING:
    from aiodist_torch.errors import last_error
    from aiodist_torch.hooks import codec_hook
    from aiodist_torch.process_group import ProcessGroup
    from aiodist_torch.store import Store

__all__ = ["ProcessGroup", "Store", "codec_hook", "last_error", "register"]

_HOMES = {
    "ProcessGroup": "aiodist_torch.process_group",
    "Store": "aiodist_torch.store",
    "codec_hook": "aiodist_torch.hooks",
    "last_error": "aiodist_torch.errors",
}


def __getattr__(name: str) -> Any:
    # Not before they are asked for: torch imports this package while it is imported itself.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
