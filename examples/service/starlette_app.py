"""A web service of several workers that know together how often it was asked::

    aiodist coordinator &
    export AIODIST_ADDRESS=tcp://127.0.0.1:29500
    uvicorn --workers 4 --app-dir examples/service starlette_app:app
    curl http://127.0.0.1:8000/visits

Kill a worker: the others go on without it, and no request of theirs fails. Its successor is taken
in. The same with gunicorn, whose workers on uvloop would ignore a SIGTERM while they start::

    gunicorn -k asgi --asgi-loop asyncio -w 4 --chdir examples/service starlette_app:app
"""

from __future__ import annotations

import asyncio
import itertools
import os

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import aiodist

here = [0]  # how often this worker was asked
numbers = itertools.count()


async def visits(request: Request) -> JSONResponse:
    here[0] += 1
    total = await lifespan.call(count)
    group: aiodist.Group = request.app.state.group
    return JSONResponse({"visits": total, "worker": os.getpid(), "workers": group.size})


async def count(group: aiodist.Group) -> int:
    """How often all workers were asked: a sum under a name that the others are told."""
    name = f"count {next(numbers)} of rank {group.rank}"
    others = [rank for rank in range(group.size) if rank != group.rank]
    await asyncio.gather(*(group.send(name, rank, tag="count") for rank in others))
    return await group.all_reduce(here[0], tag=name)


async def join_others(group: aiodist.Group) -> None:
    """Take part in every sum that another worker was asked for."""
    print(f"epoch {group.epoch}: worker {os.getpid()} is one of {group.size}", flush=True)
    async for name, _, _ in group.messages(tag="count"):
        # The worker that got the request sees the result.
        group.all_reduce(here[0], tag=name).add_done_callback(lambda done: done.exception())


lifespan = aiodist.lifespan(serve=join_others, min_size=1)
app = Starlette(routes=[Route("/visits", visits)], lifespan=lifespan)
