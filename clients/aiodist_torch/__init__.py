"""The torch.distributed backend: ``dist.init_process_group("aiodist")``.

torch finds it by itself if aiodist is installed. Otherwise ``import aiodist_torch`` registers it.
`ProcessGroup` receives torch's calls. `Store` is a torch Store that a coordinator keeps.
`last_error` returns the last error of a group, because torch shows only its text in some places.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aiodist_torch.registration import register

if TYPE_CHECKING:
    from aiodist_torch.errors import last_error
    from aiodist_torch.hooks import codec_hook
    from aiodist_torch.outer import DiLoCo, LocalSGD
    from aiodist_torch.process_group import ProcessGroup
    from aiodist_torch.store import Store

__all__ = ["DiLoCo", "LocalSGD", "ProcessGroup", "Store", "codec_hook", "last_error", "register"]

_HOMES = {
    "DiLoCo": "aiodist_torch.outer",
    "LocalSGD": "aiodist_torch.outer",
    "ProcessGroup": "aiodist_torch.process_group",
    "Store": "aiodist_torch.store",
    "codec_hook": "aiodist_torch.hooks",
    "last_error": "aiodist_torch.errors",
}


def __getattr__(name: str) -> Any:
    # On demand, because torch imports this package while it is imported itself.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
