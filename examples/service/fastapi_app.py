"""The service of `starlette_app`, for FastAPI::

aiodist coordinator &
export AIODIST_ADDRESS=tcp://127.0.0.1:29500
uvicorn --workers 4 --app-dir examples/service fastapi_app:app
curl http://127.0.0.1:8000/visits
"""

from __future__ import annotations

import os

from fastapi import FastAPI, Request
from starlette_app import count, here, lifespan

app = FastAPI(lifespan=lifespan)


@app.get("/visits")
async def visits(request: Request) -> dict[str, int]:
    """How often this worker and all others were asked."""
    here[0] += 1
    total = await lifespan.call(count)
    return {"visits": total, "worker": os.getpid(), "workers": request.app.state.group.size}
