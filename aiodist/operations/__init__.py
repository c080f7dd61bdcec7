"""The operations of a group: all collectives, and messages from one rank to another.

`Group` adds the rest: members, epochs and the end. Threads call the same operations through
`aiodist.blocking`.
"""

from inspect import isfunction

from aiodist.operations.collectives import CollectiveOperations
from aiodist.operations.messages import MessageOperations

__all__ = ["Operations"]


class Operations(CollectiveOperations, MessageOperations):
    """What the ranks of one context do together. Each call starts at once and returns a `Work`."""


# Python's own errors about arguments have this name, and users know `Group` alone.
for _class in Operations.__bases__:
    for _method in vars(_class).values():
        if isfunction(_method):
            _method.__qualname__ = f"Group.{_method.__name__}"
