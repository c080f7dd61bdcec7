"""TLS for groups, with the certificates of the cluster, if the cluster uses TLS."""

from __future__ import annotations

import ssl
from typing import Any


def server_context(security: Any, role: str) -> ssl.SSLContext | None:
    """Return how a process of that role ("scheduler", "worker") serves; None without TLS."""
    context: ssl.SSLContext | None = security.get_listen_args(role).get("ssl_context")
    return context


def contexts(security: Any, role: str) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """Return what `aiodist.connect` takes as `ssl` in a process of that role."""
    client = security.get_connection_args(role).get("ssl_context")
    server = server_context(security, role)
    return None if client is None or server is None else (client, server)
