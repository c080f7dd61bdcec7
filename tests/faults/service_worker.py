"""A worker of `service.py`. Import this once and fork: then a worker needs little time to start."""

from __future__ import annotations

import contextlib
import os
import socket
from multiprocessing.connection import Connection

# What uvicorn imports when it starts is imported here, before the fork.
import uvicorn
import uvicorn.lifespan.on
import uvicorn.loops.auto
import uvicorn.protocols.http.auto
import uvicorn.protocols.websockets.auto
from starlette_app import app  # pyright: ignore[reportMissingImports]


def worker(address: str, ready: Connection) -> None:
    """Serve the example's application, as a forked process. Says its port by `ready`."""
    os.environ["AIODIST_ADDRESS"] = address
    # Requests may come from now on. They wait until this worker is a member of the group.
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),  # because the example says there what it does
    ):
        ready.send(listener.getsockname()[1])
        ready.close()
        # A server that closes a connection at which nothing was asked for some seconds breaks a
        # request that is on its way.
        config = uvicorn.Config(app, log_level="error", access_log=False, timeout_keep_alive=3600)
        uvicorn.Server(config).run(sockets=[listener])
