"""A value that travels, without a way between its ends."""

from __future__ import annotations

from typing import Any

from aiodist.buffers.encoding import encode
from aiodist.buffers.values import parse


def into(value: object, out: object, *, allow_pickle: bool = False, name: str = "out") -> Any:
    """Copy a value into `out` (None: into new memory), as if it had gone over the wire. Raises as
    `encode` and `allocate`."""
    encoded = encode(value, allow_pickle=allow_pickle)
    incoming = parse(encoded.meta, allow_pickle=allow_pickle)
    incoming.allocate(out, name=name)
    for target, source in zip(incoming.buffers, encoded.buffers, strict=True):
        target[:] = source
    return incoming.finish()
