"""The operations of a group: all collectives, and messages from one rank to another.

`Group` adds the rest: members, epochs and the end. Threads call the same operations through
`aiodist.blocking`.
"""

from aiodist.operations.collectives import CollectiveOperations
from aiodist.operations.messages import MessageOperations

__all__ = ["Operations"]


class Operations(CollectiveOperations, MessageOperations):
    """What the ranks of one context do together. Each call starts at once and returns a `Work`."""
