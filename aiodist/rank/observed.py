"""What is asked of the actor of a rank in order to tell what the rank is doing."""

from __future__ import annotations

import asyncio
from typing import Protocol

from aiodist.links.endpoint import Endpoint
from aiodist.rank.context import Context
from aiodist.wire.messages import View


class Observed(Protocol):
    """A rank that is looked at, from the thread of its loop or from another one.

    `context` is that of its newest epoch, once it has begun, `view` the membership then, and
    `roots` are those of its members. `thread` is the thread of its `loop`.
    """

    loop: asyncio.AbstractEventLoop
    thread: int
    endpoint: Endpoint
    view: View
    roots: tuple[int, ...]
    context: Context | None

    @property
    def is_over(self) -> bool:
        """Whether this rank has left, or is about to."""
        ...
