"""Web workers that answer with the newest weights, and know which version each of them has::

    aiodist coordinator &
    export AIODIST_ADDRESS=tcp://127.0.0.1:29500
    uvicorn --workers 4 --app-dir examples/service model_app:app &
    python examples/weights/policy.py train tcp://127.0.0.1:29500
    curl http://127.0.0.1:8000/answer
    curl http://127.0.0.1:8000/versions

Each worker is a member of two groups: `aiodist.lifespan` keeps it among the workers, and
`aiodist.subscriber` brings it the weights. A worker that dies is missed by neither.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import aiodist


class Model:
    """The newest weights that are here. They are swapped as a whole."""

    version = -1
    tree: dict[str, Any] = {"w": np.zeros(3)}  # noqa: RUF012


model = Model()


async def follow(weights: aiodist.Subscriber) -> None:
    async for model.version, model.tree in weights:
        print(f"version {model.version} is here", flush=True)


async def version_of(question: Any) -> int:
    """What this worker says when another one asks."""
    return model.version


lifespan = aiodist.lifespan(answer=version_of, min_size=1)


@contextlib.asynccontextmanager
async def life(app: Starlette) -> AsyncIterator[None]:
    async with lifespan(app), aiodist.subscriber("policy") as weights:
        following = asyncio.create_task(follow(weights))
        try:
            yield
        finally:
            following.cancel()
            await asyncio.wait({following})


async def answer(request: Request) -> JSONResponse:
    weights = model.tree["w"]
    return JSONResponse({"version": model.version, "answer": float(weights.sum())})


async def versions(request: Request) -> JSONResponse:
    return JSONResponse(await lifespan.ask("version", timeout=5.0))


app = Starlette(routes=[Route("/answer", answer), Route("/versions", versions)], lifespan=life)
