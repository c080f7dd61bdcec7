"""Plain values: those without arrays, such as lists of tokens, whose form changes with each call.

No template fits them, but they need none: their metadata is all of them. So each rank can show them
and read them within the call. The bytes are those of the ordinary way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from aiodist.buffers.descriptions import WORDS
from aiodist.buffers.encoding import encode_plain
from aiodist.buffers.values import parse
from aiodist.collectives.offers import Offer
from aiodist.collectives.templates import LENGTH
from aiodist.prepared.exchanged import Exchanged

OPS = frozenset({"broadcast", "all_gather", "gather", "scatter", "all_to_all"})
"""The operations on such values."""
SLOTS = frozenset({"scatter", "all_to_all"})
"""Those that take a list with one value for each rank."""
MOST = 1 << 20
"""The most bytes that a rank shows within a call."""
CONTAINERS = frozenset({list, tuple, dict})
_BEHIND = [*Offer(b"", 0, b"")][1:]
"""What follows the metadata in the offer of such a value."""


def may_be_plain(value: Any) -> bool:
    """Say whether `value` is of a type that may have no arrays in it."""
    return type(value) in CONTAINERS or type(value) in WORDS or isinstance(value, np.generic)


def shown(values: Sequence[Any]) -> bytes | None:
    """Return what a rank shows that offers these `values`, with its length before it.

    None: there are arrays in them, or something that cannot travel, or they are large.
    """
    blob = b""
    if values:
        offers: list[Offer] = []
        for value in values:
            meta = encode_plain(value, MOST)
            if meta is None:
                return None
            offers.append(Offer(meta, 0, b""))
        blob = msgpack.packb(offers)
    return len(blob).to_bytes(LENGTH, "big") + blob if len(blob) <= MOST else None


def read(exchanged: Exchanged, blobs: Sequence[bytes | memoryview], most: int) -> list[Any] | None:
    """Return the values that a rank takes of what all ranks show, in the memory of `blobs`.

    `most` is `max_message_bytes`. None: a rank shows anything else, perhaps what is not sound, or
    wants something. Then the ordinary way has to look at it. All ranks decide the same, except if
    the ordinary way raises an error on one of them.
    """
    rows: list[list[Any]] = []  # by rank, the offers
    try:
        for blob, count in zip(blobs, exchanged.counts, strict=True):
            stop = LENGTH + int.from_bytes(blob[:LENGTH], "big")
            if stop > len(blob) or (stop > LENGTH) != (count > 0):
                return None
            offers = msgpack.unpackb(blob[LENGTH:stop]) if count else []
            if len(offers) != count:
                return None
            for offer in offers:
                if offer[1:] != _BEHIND:
                    return None
            rows.append(offers)
        values: list[Any] = []
        for src, at in exchanged.takes:
            value = parse(rows[src][at][0], max_bytes=most)
            if not value.is_plain:
                return None
            values.append(value.finish())
    except Exception:  # other ranks may show anything, so msgpack and the fields may raise anything
        return None
    return values
