"""What the kernel knows of the other end of a connection: whether it answers, and what it has.

TCP_USER_TIMEOUT does not help. With it Linux also ends connections to a peer that is alive and
answers, but has not read for so long. A rank that computes while others send to it is such a peer.
So we ask the kernel when it last heard from the peer while something was unanswered. A peer that
does not read answers the probes of its window.

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
"""Of Linux's `struct tcp_info`: `tcpi_probes`, unanswered probes; `tcpi_unacked`, unanswered
segments; `tcpi_last_ack_recv`, milliseconds since the last answer."""

NEAR = 1e-3
"""The round trip in seconds up to which a peer is near."""

_TRIP = struct.Struct("=148xI")
"""`tcpi_min_rtt`, in microseconds."""

_AGAIN = struct.Struct("=100xI")
"""`tcpi_total_retrans`: segments that were sent again."""

_UNKNOWN = 0xFFFFFFFF
"""Its value before the first answer."""

PROBES = 2
"""How many unanswered probes end an idle connection."""


def is_unanswered(sock: socket.socket, seconds: float) -> bool:
    """Tell whether something is unanswered, and nothing was answered for so long."""
    probes, unanswered, since = _told(sock, _FACTS) or (0, 0, 0)
    return bool(probes or unanswered) and since > seconds * 1000


def round_trip(sock: socket.socket) -> float | None:
    """Return the round trip to the other end in seconds; None if it is unknown, or not TCP.

    It is the shortest that the kernel has seen, without the time that a process there takes to
    answer.
    """
    (found,) = _told(sock, _TRIP) or (_UNKNOWN,)
    return None if found == _UNKNOWN else found / 1e6


def sent_again(sock: socket.socket) -> int:
    """Return how many segments of a TCP connection were sent again; 0 if unknown."""
    (found,) = _told(sock, _AGAIN) or (0,)
    return found


def _told(sock: socket.socket, facts: struct.Struct) -> tuple[int, ...] | None:
    """Return these facts of the kernel about a TCP connection; None if unknown, or not TCP.

    Raises OSError if the connection is gone.
    """
    option = getattr(socket, "TCP_INFO", None)
    if option is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    found = sock.getsockopt(socket.IPPROTO_TCP, option, facts.size)
    return facts.unpack(found) if len(found) == facts.size else None


def probe_when_idle(sock: socket.socket, seconds: float) -> None:
    """Probe an idle connection, so that it ends after about so many seconds of silence.

    Raises OSError if it is gone already.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    pause = max(1, int(seconds / (PROBES + 2)))
    for name, value in (
        ("TCP_KEEPIDLE", max(1, int(seconds / 2))),
        ("TCP_KEEPINTVL", pause),
        ("TCP_KEEPCNT", PROBES),
    ):
        option = getattr(socket, name, None)  # Linux has all of them, other systems some
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def unacknowledged(fd: int) -> int | None:
    """Return how many bytes written to a stream socket its peer's system has not acknowledged.

    None if that is unknown. The system gives acknowledged bytes to its process even if the
    connection breaks (Linux: SIOCOUTQ, tcp(7)).
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return int.from_bytes(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return None
