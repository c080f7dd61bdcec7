"""The error of `close` for sends that failed while it waited for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiodist.errors import AiodistError, CollectiveTimeoutError, PeerLostError
from aiodist.rank.context import Context
from aiodist.recorder import name_of
from aiodist.work import SENDS, Work

MOST_NAMED = 4
"""How many sends the text describes."""


def error_of(
    group: Context, waited: Mapping[Work[Any], Context], left: CollectiveTimeoutError | None
) -> AiodistError | None:
    """Return the error for data that was sent but not taken; None if all was taken.

    `waited`: what `close` alone has waited for, with the group of each. `left`: the error for data
    that was still queued when this rank left.
    """
    timed_out = left is not None
    missing = set() if left is None else {*left.missing}
    texts = []
    for work, context in waited.items():
        error = work.error
        if work.op not in SENDS:
            continue
        if isinstance(error, CollectiveTimeoutError):
            timed_out, ranks = True, error.missing
        elif isinstance(error, PeerLostError):
            ranks = error.ranks
        else:
            continue
        work.exception()  # the error of `close` tells it, so asyncio need not report it, too
        roots = [context.ranks[rank] for rank in ranks]
        missing |= {group.rank_of[root] for root in roots if root in group.rank_of}
        where = "" if context is group else f" in group {context.group!r}"
        name = name_of(work.op, work.tag, None)
        texts.append(f"{work.nbytes:,} bytes of {name}{where} ({error.message})")
    if not texts:
        return left
    if len(texts) > MOST_NAMED:
        texts[MOST_NAMED:] = [f"{len(texts) - MOST_NAMED} more sends"]
    text = f"left, but not all that was sent had been taken: not {', '.join(texts)}"
    if left is not None:
        text = f"{text}; {left.message}"
    if not timed_out:
        return group.error(PeerLostError, text, op="close", ranks=missing)
    seen = {} if left is None else left.last_seen
    return group.error(CollectiveTimeoutError, text, op="close", missing=missing, last_seen=seen)
