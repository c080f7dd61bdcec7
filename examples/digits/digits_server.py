"""A web server that recognises digits with the newest weights that a trainer has published::

    python examples/digits/digits_server.py tcp://127.0.0.1:29500

`POST /digits` with images, a JSON list of 64 pixels each, is answered with the digits that they
show, and the version of the weights that says so. New weights come while requests are answered:
each answer is that of one version, and none has to wait.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

import numpy as np
from aiohttp import web

import aiodist

CHANNEL = "digits"

Weights = Mapping[str, np.ndarray]


def recognise(weights: Weights, images: np.ndarray) -> np.ndarray:
    """What the model of workload.py says, by numpy: a server needs no torch."""
    for layer in ("0", "2"):
        images = np.tanh(images @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"])
    return (images @ weights["4.weight"].T + weights["4.bias"]).argmax(axis=1)


class Server:
    """Answers with the weights that it has, and takes others whenever there are any."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.model: tuple[int, Weights]

    async def follow(self, app: web.Application) -> AsyncIterator[None]:
        """For as long as the server runs. It opens when it has weights to answer with."""
        async with aiodist.subscriber(CHANNEL, address=self.address) as weights:
            self.model = await weights.latest()
            following = asyncio.create_task(self.swap(weights))
            yield
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following

    async def swap(self, weights: aiodist.Subscriber) -> None:
        async for self.model in weights:  # version and weights in one step: that is the swap
            pass

    async def digits(self, request: web.Request) -> web.Response:
        images = np.array(await request.json(), np.float32)
        version, weights = self.model  # for all of this answer, whatever comes meanwhile
        return web.json_response(
            {"version": version, "digits": recognise(weights, images).tolist()}
        )


async def serve(server: Server) -> None:
    app = web.Application(client_max_size=1 << 24)
    app.add_routes([web.post("/digits", server.digits)])
    app.cleanup_ctx.append(server.follow)
    runner = web.AppRunner(app, handle_signals=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        print(f"http://{host}:{port}", flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    with suppress(web.GracefulExit):
        asyncio.run(serve(Server(sys.argv[1])))
