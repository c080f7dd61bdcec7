"""aiodist: collective communication for async Python.

::

    import aiodist

    async with aiodist.connect() as group:
        await group.all_reduce(t)

``import aiodist`` loads the exceptions and the small types. Everything else is loaded when it is
first used. So a program that only catches ``aiodist.PeerLostError`` does not pay for an engine.
``from aiodist import connect`` at the top of a module loads the engine at once. Use that in a
service that must not be held up later.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aiodist.errors import (
    AiodistError,
    AuthenticationError,
    CollectiveAbortedError,
    CollectiveTimeoutError,
    CoordinatorLostError,
    GroupBrokenError,
    GroupClosedError,
    GroupCompleteError,
    GroupRevokedError,
    JoinError,
    JoinTimeoutError,
    MessageTooLargeError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    QuorumLostError,
    RankTakenError,
    SizeMismatchError,
    StaleError,
)
from aiodist.types import ANY_SOURCE, ANY_TAG, Member, ReduceOp, View

if TYPE_CHECKING:
    from aiodist import codecs
    from aiodist.averaging.averager import Averaged, Averager, averager
    from aiodist.averaging.kept import AveragerState
    from aiodist.blocking.calls import BlockingWork
    from aiodist.blocking.group import BlockingGroup
    from aiodist.blocking.store import BlockingStore
    from aiodist.blocking_session import connect_blocking
    from aiodist.channels.publisher import Publisher, publisher
    from aiodist.channels.subscriber import Subscriber, subscriber
    from aiodist.collectives.shards import Shard
    from aiodist.coordinator.actor import Coordinator
    from aiodist.debugging import breakpoint
    from aiodist.group import Group
    from aiodist.launch import run
    from aiodist.p2p.point_to_point import Envelope
    from aiodist.rank import flight_recorder, telemetry
    from aiodist.services.epochs import epochs
    from aiodist.services.lifespan import lifespan
    from aiodist.session import connect, local
    from aiodist.topologies.graph import Graph
    from aiodist.topologies.grid import Grid
    from aiodist.windows.window import Window
    from aiodist.work import Work

__version__ = "0.1.0"

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "AiodistError",
    "AuthenticationError",
    "Averaged",
    "Averager",
    "AveragerState",
    "BlockingGroup",
    "BlockingStore",
    "BlockingWork",
    "CollectiveAbortedError",
    "CollectiveTimeoutError",
    "Coordinator",
    "CoordinatorLostError",
    "Envelope",
    "Graph",
    "Grid",
    "Group",
    "GroupBrokenError",
    "GroupClosedError",
    "GroupCompleteError",
    "GroupRevokedError",
    "JoinError",
    "JoinTimeoutError",
    "Member",
    "MessageTooLargeError",
    "MismatchError",
    "PeerLostError",
    "ProtocolError",
    "Publisher",
    "QuorumLostError",
    "RankTakenError",
    "ReduceOp",
    "Shard",
    "SizeMismatchError",
    "StaleError",
    "Subscriber",
    "View",
    "Window",
    "Work",
    "averager",
    "breakpoint",
    "codecs",
    "connect",
    "connect_blocking",
    "epochs",
    "flight_recorder",
    "lifespan",
    "local",
    "publisher",
    "run",
    "subscriber",
    "telemetry",
]

_LOADED_WHEN_ASKED_FOR = {
    "Averaged": "aiodist.averaging.averager",
    "Averager": "aiodist.averaging.averager",
    "AveragerState": "aiodist.averaging.kept",
    "BlockingGroup": "aiodist.blocking.group",
    "BlockingStore": "aiodist.blocking.store",
    "BlockingWork": "aiodist.blocking.calls",
    "Coordinator": "aiodist.coordinator.actor",
    "Envelope": "aiodist.p2p.point_to_point",
    "Graph": "aiodist.topologies.graph",
    "Grid": "aiodist.topologies.grid",
    "Group": "aiodist.group",
    "Publisher": "aiodist.channels.publisher",
    "Shard": "aiodist.collectives.shards",
    "Subscriber": "aiodist.channels.subscriber",
    "Window": "aiodist.windows.window",
    "Work": "aiodist.work",
    "averager": "aiodist.averaging.averager",
    "breakpoint": "aiodist.debugging",
    "codecs": "aiodist.codecs",
    "connect": "aiodist.session",
    "connect_blocking": "aiodist.blocking_session",
    "epochs": "aiodist.services.epochs",
    "flight_recorder": "aiodist.rank.flight_recorder",
    "lifespan": "aiodist.services.lifespan",
    "local": "aiodist.session",
    "publisher": "aiodist.channels.publisher",
    "run": "aiodist.launch",
    "subscriber": "aiodist.channels.subscriber",
    "telemetry": "aiodist.rank.telemetry",
}
"""The modules of names that are loaded later. `codecs`, `flight_recorder` and `telemetry` are
modules."""


def __getattr__(name: str) -> Any:
    """Load the module of a name (PEP 562). From then on the name is an ordinary attribute."""
    module = _LOADED_WHEN_ASKED_FOR.get(name)
    if module is None:
        raise AttributeError(f"module 'aiodist' has no attribute {name!r}")
    loaded = import_module(module)
    globals()[name] = found = getattr(loaded, name, loaded)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LOADED_WHEN_ASKED_FOR})
