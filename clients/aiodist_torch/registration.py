"""Register the backend with torch. Imports nothing heavy, because `import torch` calls this."""

from __future__ import annotations

from typing import Any

from aiodist_torch.replacing import announce, replace_backend


def register() -> None:
    """Make ``"aiodist"`` a name of a torch.distributed backend. Idempotent.

    torch calls this when it is imported (entry point ``torch.backends``), so that programs need no
    import of their own.
    """
    # Not at the top, because torch calls `register` from within its import if this package comes
    # first.
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "AIODIST"):
        dist.Backend.register_backend("aiodist", _create, extended_api=True, devices=["cpu"])
        replace_backend(_create)


def _create(options: Any, backend_options: Any) -> Any:
    """Make a process group, for torch. `backend_options` are for other backends."""
    from aiodist_torch.process_group import create

    announce()
    return create(options)
