"""For tests of code that uses aiodist or extends it. Nothing in the library imports it.

`Simulation` runs ranks on a simulated network in virtual time. `LinkConformance` has the tests that
every transport passes, and `CodecConformance` those for codecs. ``python -m aiodist.testing
simulate`` runs random programs. See `docs/testing.md`.
"""

from aiodist.testing.codecs import CodecConformance
from aiodist.testing.conformance import LinkConformance
from aiodist.testing.exploring import Explored, FoundError, explore
from aiodist.testing.faults import Fault, FaultInjector
from aiodist.testing.history import History, HistoryEntry
from aiodist.testing.simulation import HangError, InvariantError, Killed, Simulation
from aiodist.testing.sockets import Network
from aiodist.testing.virtual_loop import DeadlockError, Process, VirtualLoop
from aiodist.testing.wires import Conditions, Node

__all__ = [
    "CodecConformance",
    "Conditions",
    "DeadlockError",
    "Explored",
    "Fault",
    "FaultInjector",
    "FoundError",
    "HangError",
    "History",
    "HistoryEntry",
    "InvariantError",
    "Killed",
    "LinkConformance",
    "Network",
    "Node",
    "Process",
    "Simulation",
    "VirtualLoop",
    "explore",
]
