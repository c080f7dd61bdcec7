"""Programs that name another backend get aiodist, as one word in their environment says.

``AIODIST_TORCH_REPLACES=gloo`` is for programs and libraries that know a fixed list of backends:
they ask torch for Gloo, are told that they have it, and the process group is one of aiodist.
``AIODIST_TORCH_REPLACES=tcp`` is for programs of the first years, because torch has no backend of
that name any more. Imports nothing heavy, as `registration` does not.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

VARIABLE = "AIODIST_TORCH_REPLACES"
"""The environment variable: which backend aiodist is to answer for."""

_unsaid: list[str] = []
"""What is to be said when the first group is made."""


def replace_backend(create: Callable[[Any, Any], Any]) -> None:
    """Have torch make aiodist's groups, by `create`, for the backend that the environment names.

    Never raises: a torch that does not know the way is left as it is, and stderr says so.
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
    """Make "tcp" another name of aiodist's backend; torch itself has none of that name."""
    import torch.distributed as dist

    dist.Backend.register_backend("tcp", create, extended_api=True, devices=["cpu"])


def _replace_gloo() -> None:
    """Put aiodist in the place of Gloo whenever torch looks up the backends of a group."""
    import torch.distributed.distributed_c10d as c10d

    config: Any = c10d.BackendConfig
    asked = config.get_device_backend_map

    def get_device_backend_map(self: Any) -> dict[str, Any]:
        """The backend for each type of device, aiodist's in place of Gloo for processors."""
        return replaced(asked(self))

    config.get_device_backend_map = get_device_backend_map


def replaced(backends: dict[str, Any]) -> dict[str, Any]:
    """`backends` with aiodist in place of Gloo for tensors of the processor. It comes first: the
    process group that it is makes those for other devices beside it."""
    if backends.get("cpu") != "gloo":
        return backends
    return {"cpu": "aiodist"} | {kind: name for kind, name in backends.items() if kind != "cpu"}


def announce() -> None:
    """Say, once in a process, that a group is aiodist's though the program may think otherwise."""
    while _unsaid:
        _say(_unsaid.pop())


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a stderr that is closed ends no program
        print(
            f"aiodist: {VARIABLE}={os.environ.get(VARIABLE)}: {text}", file=sys.stderr, flush=True
        )
