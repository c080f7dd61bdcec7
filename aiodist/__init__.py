"""aiodist: collective communication for async Python.

::

    import aiodist

    async with aiodist.connect() as group:
        await group.all_reduce(t)
"""

from aiodist.blocking import BlockingGroup
from aiodist.coordinator.actor import Coordinator
from aiodist.debugging import breakpoint
from aiodist.errors import (
    AiodistError,
    AuthenticationError,
    CollectiveAbortedError,
    CollectiveTimeoutError,
    CoordinatorLostError,
    GroupClosedError,
    GroupCompleteError,
    GroupRevokedError,
    JoinError,
    JoinTimeoutError,
    MessageTooLargeError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    RankTakenError,
    SizeMismatchError,
)
from aiodist.group import Group
from aiodist.launch import run
from aiodist.p2p.point_to_point import Envelope
from aiodist.rank import flight_recorder
from aiodist.session import connect, local
from aiodist.types import ANY_SOURCE, ANY_TAG, Member, ReduceOp, View
from aiodist.work import Work

__version__ = "0.1.0"

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "AiodistError",
    "AuthenticationError",
    "BlockingGroup",
    "CollectiveAbortedError",
    "CollectiveTimeoutError",
    "Coordinator",
    "CoordinatorLostError",
    "Envelope",
    "Group",
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
    "RankTakenError",
    "ReduceOp",
    "SizeMismatchError",
    "View",
    "Work",
    "breakpoint",
    "connect",
    "flight_recorder",
    "local",
    "run",
]
