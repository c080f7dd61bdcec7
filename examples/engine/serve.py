"""An open inference engine, mistral.rs, behind HTTP. It serves the model in a folder, and reads it
again when it is asked to::

    pip install mistralrs aiohttp
    python examples/engine/serve.py models/policy --port 8000
    curl -d '{"prompt": "abc", "max_tokens": 4}' http://127.0.0.1:8000/v1/completions
    curl -X POST http://127.0.0.1:8000/reload

The package has the engine of mistral.rs without its server, so this is a small server of our own.
Requests that are under way end with the model that they began with.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from aiohttp import web
from mistralrs import Architecture, CompletionRequest, Runner, Which


class Server:
    """Serves the model in a folder, if it has one. `version`: what the last reload called it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engine: Runner | None = None
        self._loading = asyncio.Lock()
        self.version = ""
        self.app = web.Application()
        self.app.router.add_post("/v1/completions", self.complete)
        self.app.router.add_post("/reload", self.reload)

    def _load(self) -> Runner:
        model = Which.Plain(model_id=str(self._folder), arch=Architecture.Llama)
        return Runner(which=model, token_source="none")

    async def reload(self, request: web.Request) -> web.Response:
        async with self._loading:
            self._engine = await asyncio.to_thread(self._load)
            self.version = request.query.get("version", "")
        return web.json_response({"version": self.version})

    async def complete(self, request: web.Request) -> web.Response:
        try:
            asked = await request.json()
            prompt, most = str(asked["prompt"]), int(asked.get("max_tokens", 16))
        except (ValueError, TypeError, KeyError):
            raise web.HTTPBadRequest(text='{"prompt": "…", "max_tokens": 16} is needed\n') from None
        engine, version = self._engine, self.version
        if engine is None:
            raise web.HTTPServiceUnavailable(text="there is no model yet\n")
        wanted = CompletionRequest(prompt, str(self._folder), max_tokens=most, temperature=0.0)
        found = await asyncio.to_thread(engine.send_completion_request, wanted)
        return web.json_response({"text": found.choices[0].text, "version": version})


async def main(folder: Path, port: int) -> None:
    runner = web.AppRunner(Server(folder).app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    host, bound = runner.addresses[0]
    print(f"serving http://{host}:{bound}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A model in a folder, over HTTP.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    given = parser.parse_args()
    asyncio.run(main(given.folder, given.port))
