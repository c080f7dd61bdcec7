"""The process at the other end of a Unix socket, its user, and its end.

The end of a connection does not tell that a process has ended, because a child that was forked in
C, past Python's hooks, keeps it open. A pidfd tells of the process itself.
"""

from __future__ import annotations

import io
import os
import secrets
import select
import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid

_NOBODY = 65534
"""What the kernel shows for users without a number in the caller's user namespace."""

_ALL_USERS = "0 0 4294967295"
"""The map of a namespace in which every user has a number."""


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end of a Unix socket, as of its connect or listen call.

    The process is 0 if it has no number in this pid namespace.
    """
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return pid, uid


def peer_pid(sock: socket.socket, user: int) -> int:
    """Return the process at the other end. Raises PermissionError unless it is of `user` (effective
    id).

    Both ends ask, and get the same answer: the caller compares itself with the listener at the time
    of its listen call, and the listener does the reverse.
    """
    pid, uid = credentials(sock)
    if uid != user or _is_ambiguous(uid):
        raise PermissionError(
            f"process {pid} runs as user {uid}: expected user {user}, as this one"
        )
    return pid


def user_id() -> str:
    """Return an id of the user of this process: equal for processes of a host that may share
    memory.

    A number means one user only within one user namespace: root of an unprivileged container is
    another user outside of it. So the namespace is part of the id, though this separates processes
    of one user in two namespaces, too. A process whose number stands for many users there is like
    no other.
    """
    if not hasattr(os, "geteuid"):
        return ""
    uid = os.geteuid()
    if _is_ambiguous(uid):
        return f"{uid}-{secrets.token_hex(8)}"
    try:
        return f"{uid}-{os.stat('/proc/self/ns/user').st_ino}"
    except OSError:  # there are no user namespaces
        return str(uid)


def _is_ambiguous(uid: int) -> bool:
    """Tell whether `uid` may be any of the users without a number in this user namespace."""
    if uid != _NOBODY:
        return False
    try:
        mapped = Path("/proc/self/uid_map").read_text(encoding="ascii")
    except OSError:
        return os.path.exists("/proc/self/ns/user")
    return mapped.split() != _ALL_USERS.split()


def open_behind(sock: socket.socket) -> io.FileIO | None:
    """Open a file that is readable once the process at the other end of a Unix socket has ended.

    None if that is impossible: another kind of socket, another pid namespace, a system without
    pidfds, or a connection that has ended. Also None for this process itself.
    """
    if sock.family != getattr(socket, "AF_UNIX", None) or not hasattr(os, "pidfd_open"):
        return None
    try:
        pid, _ = credentials(sock)
        if pid in (0, os.getpid()):
            return None
        process = io.FileIO(os.pidfd_open(pid), closefd=True)
    except OSError:  # it is gone, or the kernel or a sandbox does not let us
        return None
    # The file is made of a number that was read from the socket. In between, the process may have
    # ended, and another one may have its number. If the connection is still there now, its process
    # lived until now, and the file is of that process.
    if _has_ended(sock):  # the number may be another process' by now
        process.close()
        return None
    return process


def _has_ended(sock: socket.socket) -> bool:
    """Tell whether nothing can be sent or received any more except what has come already."""
    poll = select.poll()
    poll.register(sock, 0)
    return bool(poll.poll(0))
