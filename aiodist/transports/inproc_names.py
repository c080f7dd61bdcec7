"""Names that coordinators of this process listen on: the ports of ``inproc://``."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable

Adopt = Callable[[socket.socket], None]
"""Takes the listener's end of a new connection. Called in the thread that connects."""

_names: dict[str, Adopt] = {}
_lock = threading.Lock()

if hasattr(os, "register_at_fork"):  # the coordinators stay with the parent
    os.register_at_fork(after_in_child=_names.clear)


def register(name: str, adopt: Adopt) -> None:
    """Listen on `name`. Raises OSError(EADDRINUSE) if it is taken."""
    with _lock:
        if name in _names:
            raise OSError(errno.EADDRINUSE, f"inproc://{name} is in use in this process")
        _names[name] = adopt


def unregister(name: str) -> None:
    """Stop listening on `name`."""
    with _lock:
        _names.pop(name, None)


def connect(name: str) -> socket.socket:
    """Return the connecting end of a new connection. Raises ConnectionRefusedError without a
    listener."""
    with _lock:
        adopt = _names.get(name)
    if adopt is None:
        raise ConnectionRefusedError(
            errno.ECONNREFUSED, f"no coordinator listens on inproc://{name} in this process"
        )
    ours, theirs = socket.socketpair()
    adopt(theirs)
    return ours
