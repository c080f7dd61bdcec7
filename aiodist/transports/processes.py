"""The process at the other end of a Unix socket, its user, and whether it has ended.

The end of a connection does not say so reliably: a child that was forked in C, past Python's hooks,
keeps it open. A pidfd tells of the process itself.
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
"""What the kernel shows for users who have no number in the user namespace of who asks."""

_ALL_USERS = "0 0 4294967295"
"""The map of a namespace in which every user has a number."""


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Process and user that connected, or listened, at the other end of a Unix socket. The process
    is 0 where it has no number in the pid namespace of this one."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return pid, uid


def peer_pid(sock: socket.socket, user: int) -> int:
    """The process that made the other end. Raises PermissionError where it is not of `user`, an
    effective user id.

    Both ends ask, and get the same answer: who connects compares itself, as it is then, with the
    listener as it was when it began to listen, and that one the other way round.
    """
    pid, uid = credentials(sock)
    if uid != user or _is_ambiguous(uid):
        raise PermissionError(
            f"process {pid} runs as user {uid}: expected user {user}, as this one"
        )
    return pid


def user_id() -> str:
    """Names the user of this process: equal for processes of one host that may share memory.

    A number means one user within one user namespace alone: root of a container without root's
    rights is another one outside of it. So the namespace is part of the name, though it sets apart
    processes of one user in two namespaces, too. A process whose number stands for many users
    there is like no other.
    """
    if not hasattr(os, "geteuid"):
        return ""
    uid = os.geteuid()
    if _is_ambiguous(uid):
        return f"{uid}-{secrets.token_hex(8)}"
    try:
        return f"{uid}-{os.stat('/proc/self/ns/user').st_ino}"
    except OSError:  # there are none
        return str(uid)


def _is_ambiguous(uid: int) -> bool:
    """Whether `uid` may be any of the users who have no number in this user namespace."""
    if uid != _NOBODY:
        return False
    try:
        mapped = Path("/proc/self/uid_map").read_text(encoding="ascii")
    except OSError:
        return os.path.exists("/proc/self/ns/user")
    return mapped.split() != _ALL_USERS.split()


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
    # The number is read from the socket and a file made of the number, and between the two the
    # process may have ended, and another one begun under its number. If the connection is still
    # there now, its process was there then, and the file is of that one.
    if _has_ended(sock):  # then the number may be another process' by now
        process.close()
        return None
    return process


def _has_ended(sock: socket.socket) -> bool:
    """Whether nothing can be sent or received any more but what has come already."""
    poll = select.poll()
    poll.register(sock, 0)
    return bool(poll.poll(0))
