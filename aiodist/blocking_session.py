"""`connect_blocking`: a group for a program that has no event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from aiodist.blocking.calls import BlockingWork, Home
from aiodist.blocking.group import BlockingGroup
from aiodist.group import Group
from aiodist.session import Connecting, connect
from aiodist.threads.engine import engine

P = ParamSpec("P")


def _blocking(connect: Callable[P, Connecting]) -> Callable[P, BlockingGroup]:
    def connect_blocking(*args: P.args, **options: P.kwargs) -> BlockingGroup:
        """Join a group, as `connect` does: ``with connect_blocking(…) as group:`` in ordinary code.

        Or use ``group = connect_blocking(…)`` and ``group.close()``. It takes the arguments of
        `connect`, and raises what that raises.

        All such groups of a process share one event loop in a thread of its own. So leases are
        renewed and messages are received, even if your program is busy. A group that is still open
        when the process exits is closed then. After a fork it stays with the parent.

        For example::

            with aiodist.connect_blocking() as group:  # under `aiodist run`
                group.barrier()
        """
        connecting = connect(*args, **options)

        async def join() -> Group:
            return await connecting

        def leave(group: Group) -> None:
            group.abort("connect_blocking was interrupted")

        home = Home.of(engine().loop)
        return BlockingGroup(BlockingWork[Group](home, join, leave).run(), home)

    return connect_blocking


connect_blocking = _blocking(connect)
