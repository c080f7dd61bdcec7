"""The process at the other end of a Unix socket, and whether it has ended.

The end of a connection does not say so reliably: a child that was forked in C, past Python's hooks,
keeps it open. A pidfd tells of the process itself.
"""

from __future__ import annotations

import io
import os
import select
import socket
import struct

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Process and user that connected, or listened, at the other end of a Unix socket. The process
    is 0 where it has no number in the pid namespace of this one."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return pid, uid


def open_behind(sock: socket.socket) -> io.FileIO | None:
    """A file that is readable once the process has ended that connected, or listened, at the other
    end of a Unix socket. None where nobody can tell: another kind of socket, a process of
    another pid namespace, a system without pidfds, or a connection that has ended already. None
    as well for this process itself."""
    if sock.family != getattr(socket, "AF_UNIX", None) or not hasattr(os, "pidfd_open"):
        return None
    try:
        pid, _ = credentials(sock)
        if pid in (0, os.getpid()):
            return None
        process = io.FileIO(os.pidfd_open(pid), closefd=True)
    except OSError:  # it is gone, or the kernel, or a sandbox, does not let us
        return None
    if _has_ended(sock):  # then the number may be another process' by now
        process.close()
        return None
    return process


def _has_ended(sock: socket.socket) -> bool:
    """Whether nothing can be sent or received any more but what has come already."""
    poll = select.poll()
    poll.register(sock, 0)
    return bool(poll.poll(0))
