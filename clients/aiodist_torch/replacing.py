"""One word where Gloo is named: a process's "gloo" is answered by aiodist.

Some programs and libraries know a fixed list of backends. With ``AIODIST_TORCH_REPLACES=gloo`` in
their environment they ask torch for Gloo, are told that they have it, and the process group is one
of aiodist. Imports nothing heavy, as `registration` does not.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

VARIABLE = "AIODIST_TORCH_REPLACES"
"""The environment variable: which backend aiodist is to answer for."""

_REPLACEABLE = "gloo"
_unsaid: list[str] = []
"""What is to be said when the first group is made."""


def replace_backend() -> None:
    """Have torch make aiodist's groups where "gloo" is asked for, if the environment says so.

    Never raises: a torch that does not know the way is left as it is, and stderr says so.
    """
    wanted = os.environ.get(VARIABLE, "").strip().lower()
    if not wanted:
        return
    if wanted != _REPLACEABLE:
        _say(f'only "{_REPLACEABLE}" can be replaced; nothing is')
        return
    try:
        import torch.distributed.distributed_c10d as c10d

        config: Any = c10d.BackendConfig
        asked = config.get_device_backend_map
    except (ImportError, AttributeError) as error:
        _say(f"this torch does not offer what is needed for that: {error}")
        return

    def get_device_backend_map(self: Any) -> dict[str, Any]:
        """The backend for each type of device, aiodist's in place of Gloo for processors."""
        return replaced(asked(self))

    config.get_device_backend_map = get_device_backend_map
    _unsaid.append(f'the torch backend "{_REPLACEABLE}" of this process is aiodist')


def replaced(backends: dict[str, Any]) -> dict[str, Any]:
    """`backends` with aiodist in place of Gloo for tensors of the processor. It comes first: the
    process group that it is makes those for other devices beside it."""
    if backends.get("cpu") != _REPLACEABLE:
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
