"""Find out on all ranks, before data is moved, whether the values fit at their destinations.

A rank that gives an `out` says in its first words what it takes from each rank: an array, or a
tree of this form. If all offers are of this form, everything fits. Otherwise (for example, if sizes
differ) each rank tries, and shares what does not fit. Then no rank gets a result, and all know
which place was wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import msgpack
import numpy as np

from aiodist.buffers.arrays import view, writable
from aiodist.buffers.tokens import PLAIN
from aiodist.buffers.values import WORD, outline, parse
from aiodist.devices import device_of
from aiodist.errors import MismatchError, ProtocolError
from aiodist.phases.base import Part, Place, share

NOTHING = b""
"""The rank has no wishes: values get memory of their own."""
LOOK = b"?"
"""The rank has a place, but must see a value to know whether it fits."""

_MARK = b"\xc1"
"""The first byte of words that want something. No message of msgpack begins with it."""
_LONGEST = 255
_SHORT = 1024
"""The most bytes of metadata that are compared with what others want."""
_FEW = 64
"""The most leaves of a tree of places whose form is told."""


def wanted(out: Any) -> bytes:
    """Return what `out` takes: the form of an array or tree, `LOOK`, or `NOTHING` for None."""
    if out is None:
        return NOTHING
    left = iter(range(_FEW))

    def place(leaf: Any) -> Any:
        if next(left, None) is None:
            return None
        if type(leaf) in PLAIN or type(leaf) in (int, complex) or isinstance(leaf, np.generic):
            return WORD
        return _described(leaf, to_write=True)

    return _text(outline(out, place))


def wanted_of_each(out: Any, x: Any, size: int) -> bytes:
    """Return what `out` takes from each rank: the same kind as `x` from all ranks, or `LOOK`.

    `out` has one slot for each rank.
    """
    if out is None:
        return NOTHING
    own = _described(x)
    if own is None:
        return LOOK
    text = _text(own)
    if isinstance(out, (list, tuple)):
        return text if all(slot is None or wanted(slot) == text for slot in out) else LOOK
    name, shape = own
    stacked = (size, *shape)
    behind = (size * shape[0], *shape[1:]) if shape else stacked
    return text if _described(out, to_write=True) in ((name, stacked), (name, behind)) else LOOK


def all_fit(wants: Sequence[bytes], metas: Iterable[bytes | int]) -> bool:
    """Whether offers with these `metas` are known to fit what every rank wants."""
    return not any(wants) or {*wants} <= {NOTHING, given(metas)} - {LOOK}


def given(metas: Iterable[bytes | int]) -> bytes:
    """Return the one form that all these metadata describe, or `LOOK`."""
    one, *more = set(metas)
    return LOOK if more or not isinstance(one, bytes) or len(one) > _SHORT else _given(one)


@lru_cache(maxsize=1024)
def _given(meta: bytes) -> bytes:
    return _text(parse(meta).outline())


def joined(want: bytes, words: bytes) -> bytes:
    """Return the first words of a rank, with what it wants."""
    return b"".join((_MARK, bytes([len(want)]), want, words)) if want else words


def parted(blobs: Sequence[bytes]) -> tuple[list[bytes], list[bytes | memoryview]]:
    """Split first words into what each rank wants and the rest. Raises ProtocolError."""
    wants = [NOTHING] * len(blobs)
    words: list[bytes | memoryview] = [*blobs]
    for rank, blob in enumerate(blobs):
        if blob[:1] == _MARK:
            start = 2 + int.from_bytes(blob[1:2], "big")
            if not 2 < start <= len(blob):
                raise ProtocolError(f"the words of rank {rank} are cut off")
            wants[rank] = blob[2:start]
            words[rank] = memoryview(blob)[start:]
    return wants, words


def settle(place: Place, problem: MismatchError | None, fits: bool, on_lane: bool) -> Part[None]:
    """Share whether the values fit here, unless all ranks know that they do (`fits`).

    Raises MismatchError if they do not fit on every rank.
    """
    if fits:
        if problem is not None:
            raise problem
        return
    own = b""
    if problem is not None:
        calls = {rank: text[:500] for rank, text in problem.calls.items()}
        own = msgpack.packb((problem.message[:1000], calls))
    for rank, blob in enumerate((yield from share(place, own, on_lane, of_one=True))):
        if not blob:
            continue
        try:
            text, calls = msgpack.unpackb(blob, strict_map_key=False)
            if type(text) is not str:
                raise TypeError("a text was due")
            error = MismatchError(text, calls={int(src): str(call) for src, call in calls.items()})
        except (ValueError, TypeError, AttributeError) as wrong:
            raise ProtocolError(f"malformed words of rank {rank}: {wrong!r}") from None
        raise place.error(MismatchError, error.message, calls=error.calls)


def _described(value: Any, *, to_write: bool = False) -> tuple[str, tuple[int, ...]] | None:
    """Return dtype and shape of one array on the host or a device, or None for anything else.

    With `to_write`, also None if the array cannot be written to.
    """
    if isinstance(value, (list, tuple, dict)):
        return None
    try:
        device = device_of(value)
        if device is not None:
            return device.describe(value) if not to_write or device.can_write(value) else None
        array = writable(value, "out") if to_write else view(value, "x")
    except (TypeError, ValueError):
        return None
    return None if array is None or array.kind == "scalar" else (array.name, array.shape)


def _text(outlined: Any) -> bytes:
    if outlined is None:
        return LOOK
    text = repr(outlined).encode("utf-8", "surrogatepass")
    return text if len(text) <= _LONGEST else blake2b(text, digest_size=32).digest()
