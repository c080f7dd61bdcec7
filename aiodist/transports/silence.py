"""What the kernel knows of the other end of a connection: whether it answers, and what it has.

TCP_USER_TIMEOUT is no help: Linux also lets it end connections to a peer that is alive and answers,
but has not read for so long (a rank that computes while others send to it). So the kernel is asked
when it has last heard from the peer while something was to be answered. A peer that does not read
answers the probes of its window.

========================== ==================================== =====================
the peer                   what its system does                 what it is taken for
========================== ==================================== =====================
computes, does not read    acknowledges until its buffers are   alive, for ever
                           full, then answers probes
its process was killed     ends the connection                  lost, at once
its host lost its power    nothing                              lost, after `seconds`
its cable was pulled       nothing arrives                      lost, after `seconds`
========================== ==================================== =====================
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

if sys.platform != "win32":
    import fcntl
    import termios

_FACTS = struct.Struct("=3xB20xI28xI")
"""Of Linux's `struct tcp_info`: `tcpi_probes`, probes that had no answer; `tcpi_unacked`, segments
that had none; `tcpi_last_ack_recv`, milliseconds since the last answer."""

NEAR = 1e-3
"""Seconds there and back up to which a peer is near."""

_TRIP = struct.Struct("=148xI")
"""`tcpi_min_rtt`, in microseconds."""

_AGAIN = struct.Struct("=100xI")
"""`tcpi_total_retrans`: segments that were sent again."""

_UNKNOWN = 0xFFFFFFFF
"""Its value before anything was answered."""

PROBES = 2
"""How many probes of an idle connection have no answer when it is lost."""


def is_unanswered(sock: socket.socket, seconds: float) -> bool:
    """Whether something is to be answered, and nothing was for so long."""
    probes, unanswered, since = _told(sock, _FACTS) or (0, 0, 0)
    return bool(probes or unanswered) and since > seconds * 1000


def round_trip(sock: socket.socket) -> float | None:
    """Seconds to the other end and back: the least that the kernel has seen, which leaves out how
    long a process there takes to answer. None where it does not say, or there is no TCP."""
    (found,) = _told(sock, _TRIP) or (_UNKNOWN,)
    return None if found == _UNKNOWN else found / 1e6


def sent_again(sock: socket.socket) -> int:
    """How many segments of a TCP connection were sent again, since they were lost; 0 where the
    system does not say."""
    (found,) = _told(sock, _AGAIN) or (0,)
    return found


def _told(sock: socket.socket, facts: struct.Struct) -> tuple[int, ...] | None:
    """These of the kernel's facts of a TCP connection; None where it does not say, or there is no
    TCP. Raises OSError where the connection is gone."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    found = sock.getsockopt(socket.IPPROTO_TCP, option, facts.size)
    return facts.unpack(found) if len(found) == facts.size else None


def probe_when_idle(sock: socket.socket, seconds: float) -> None:
    """Have an idle connection probed, so that it is lost after about so many seconds of silence.
    Raises OSError where it is gone already."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    pause = max(1, int(seconds / (PROBES + 2)))
    for name, value in (
        ("TCP_KEEPIDLE", max(1, int(seconds / 2))),
        ("TCP_KEEPINTVL", pause),
        ("TCP_KEEPCNT", PROBES),
    ):
        option = getattr(socket, name, None)  # Linux has them all, others some
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def unacknowledged(fd: int) -> int | None:
    """How many bytes that were written to a stream socket its peer's system has not acknowledged;
    None where the system does not say. What it has acknowledged it gives to its process, even if
    the connection breaks (Linux: SIOCOUTQ, tcp(7))."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return int.from_bytes(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return None
