"""A simulated network: nodes with one process each, and connections that are slow, cut or broken.

It carries streams, as TCP does. Lost packets are sent again, so a lossy network is a slow one. A
cut holds everything back until it heals, or until the connection is given up.
"""

from __future__ import annotations

import errno
from typing import Any, cast

from aiodist.testing.sockets import SimSocket
from aiodist.testing.virtual_loop import VirtualLoop, current_process
from aiodist.testing.wires import Conditions, Node, Wires

__all__ = ["Conditions", "Network", "Node"]


class Network(Wires):
    """The network of a virtual loop. `seed` decides delays, losses and sizes of packets."""

    def __init__(
        self, loop: VirtualLoop, seed: int | str = 0, conditions: Conditions | None = None
    ) -> None:
        super().__init__(loop, seed, conditions)
        loop.make_socket = self._socket

    def _socket(self, family: int, kind: int, proto: int) -> Any:
        process = current_process()
        if not isinstance(process, Node):
            raise OSError(
                errno.ENETDOWN, "no node has called this: run it by node.spawn(coroutine)"
            )
        if not process.alive:
            raise OSError(errno.ENETDOWN, f"{process} is dead")
        return cast(Any, SimSocket(self, process))
