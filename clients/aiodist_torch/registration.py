"""Making the backend known to torch. Imports nothing heavy: `import torch` calls this."""

from __future__ import annotations

from typing import Any

from aiodist_torch.replacing import announce, replace_backend


def register() -> None:
    """Make ``"aiodist"`` a name of a torch.distributed backend. Idempotent.

    torch calls this when it is imported (entry point ``torch.backends``), so that programs need no
    import of their own.
    """
    # Not at the top: when this package is imported first, torch calls `register` from within.
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "AIODIST"):
        dist.Backend.register_backend("aiodist", _create, extended_api=True, devices=["cpu"])
        replace_backend(_create)


def _create(options: Any, backend_options: Any) -> Any:
    """A process group, as torch asks for it; `backend_options` are for other backends."""
    from aiodist_torch.process_group import create

    announce()
    return create(options)
