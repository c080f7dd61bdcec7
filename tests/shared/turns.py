"""What a simulated program does after so many turns of its loop."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable

from aiodist.testing.virtual_loop import VirtualLoop


def after_turns(count: int, callback: Callable[[], object]) -> None:
    """Call `callback`, as the calling process, before anything else happens in that turn."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    earlier = loop.selector.on_turn
    context, left = contextvars.copy_context(), count

    def turn() -> None:
        nonlocal left
        earlier()
        left -= 1
        if not left:
            context.run(callback)

    loop.selector.on_turn = turn
