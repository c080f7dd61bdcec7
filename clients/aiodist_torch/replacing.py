"""Let programs that name another backend use aiodist, by an environment variable.

``AIODIST_TORCH_REPLACES=gloo`` is for programs and libraries with a fixed list of backends. They
ask torch for Gloo and believe that they have it, but the process group is aiodist's.

``AIODIST_TORCH_REPLACES=tcp`` is for programs of torch's first years, because torch has no backend
of that name any more. Imports nothing heavy, as `registration`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

VARIABLE = "AIODIST_TORCH_REPLACES"
"""The environment variable with the backend that aiodist answers for."""

_unsaid: list[str] = []
"""What to print when the first group is made."""


def replace_backend(create: Callable[[Any, Any], Any]) -> None:
    """Make torch use aiodist's groups, by `create`, for the backend that the environment names.

    Never raises. If this torch cannot do that, it stays as it is, and stderr says so.
    """
    wanted = os.environ.get(VARIABLE, "").strip().lower()
    if not wanted:
        return
    try:
        if wanted == "gloo":
            _replace_gloo()
        elif wanted == "tcp":
            _register_tcp(create)
        else:
            _say('only "gloo" and "tcp" can be replaced; nothing is')
            return
    except (ImportError, AttributeError) as error:
        _say(f"this torch does not offer what is needed for that: {error}")
        return
    _unsaid.append(f'the torch backend "{wanted}" of this process is aiodist')


def _register_tcp(create: Callable[[Any, Any], Any]) -> None:
    """Make "tcp" another name of aiodist's backend. torch itself has none of that name."""
    import torch.distributed as dist

    dist.Backend.register_backend("tcp", create, extended_api=True, devices=["cpu"])


def _replace_gloo() -> None:
    """Put aiodist in the place of Gloo whenever torch looks up the backends of a group."""
    import torch.distributed.distributed_c10d as c10d

    config: Any = c10d.BackendConfig
    asked = config.get_device_backend_map

    def get_device_backend_map(self: Any) -> dict[str, Any]:
        """Return the backend for each type of device, with aiodist in place of Gloo for the CPU."""
        return replaced(asked(self))

    config.get_device_backend_map = get_device_backend_map


def replaced(backends: dict[str, Any]) -> dict[str, Any]:
    """Return `backends` with aiodist in place of Gloo for tensors on the CPU.

    It comes first, because that process group makes those for other devices.
    """
    if backends.get("cpu") != "gloo":
        return backends
    return {"cpu": "aiodist"} | {kind: name for kind, name in backends.items() if kind != "cpu"}


def announce() -> None:
    """Print, once in a process, that a group is aiodist's though the program may think
    otherwise."""
    while _unsaid:
        _say(_unsaid.pop())


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed stderr must not end the program
        print(
            f"aiodist: {VARIABLE}={os.environ.get(VARIABLE)}: {text}", file=sys.stderr, flush=True
        )
