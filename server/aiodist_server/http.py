"""What the daemon says over HTTP: a page, the status as JSON, metrics, and whether it is well."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from aiohttp import web

from aiodist.coordinator.actor import Coordinator
from aiodist.coordinator.listening import bind_tcp
from aiodist.errors import CoordinatorLostError
from aiodist.transports.sockets import Acceptor
from aiodist.wire.address import Address
from aiodist_server import metrics
from aiodist_server.feed import Feed
from aiodist_server.surveys import Surveys
from aiodist_server.visits import Visits

logger = logging.getLogger("aiodist.daemon")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CLOSE_SECONDS = 1.0
"""How long answers that are under way may take when the daemon ends."""

_HEADERS = {
    "Server": "aiodist",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'self'; "
    "style-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_TYPES = {
    "html": "text/html",
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
}


@asynccontextmanager
async def serving(coordinator: Coordinator, address: Address) -> AsyncIterator[str]:
    """Serve at `address` (of scheme tcp); gives the URL, with the port it got. Raises OSError."""
    surveys = Surveys(coordinator)
    feed = Feed(coordinator, surveys)
    app = application(coordinator, address, surveys, feed)
    visits = Visits()
    app.middlewares.insert(0, visits.attend)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_SECONDS)
    await runner.setup()
    try:
        assert runner.server is not None
        visits.serve(runner.server)
        sock = await bind_tcp(address)
        host, port = sock.getsockname()[:2]
        acceptor = Acceptor(asyncio.get_running_loop(), sock, f"http on {host}", visits.take)
        asking = asyncio.create_task(feed.run(), name="aiodist feed")
        asking.add_done_callback(_log_failure)
        try:
            yield f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
        finally:
            acceptor.close()
            asking.cancel()
            await asyncio.wait({asking})
            await visits.end()
    finally:
        await runner.cleanup()


def _log_failure(asking: asyncio.Task[None]) -> None:
    """It never ends by itself: this is a fault of the page, from which no group must suffer."""
    if not asking.cancelled():
        logger.error("the page is told nothing more", exc_info=asking.exception())


def application(
    coordinator: Coordinator, address: Address, surveys: Surveys, feed: Feed
) -> web.Application:
    """What is served at `address`. On the loopback interface, who asks by another name than that
    address, localhost or one in numbers is refused: in a browser it is a page of somebody else's
    that has its name point here."""
    answers = Answers(coordinator, surveys)

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        if address.is_loopback and not _is_ours(request.host, address.host):
            raise web.HTTPMisdirectedRequest(text=f"nothing is served for {request.host!r}\n")
        return await handler(request)

    async def finish(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(_HEADERS)

    app = web.Application(middlewares=[checked])
    app.on_response_prepare.append(finish)
    app.add_routes(
        [
            web.get("/livez", answers.alive),
            web.get("/readyz", answers.ready),
            web.get("/healthz", answers.ready),
            web.get("/status", answers.status),
            web.get("/metrics", answers.metrics),
            # Without HEAD: that would wait for news that it is not told.
            web.get("/events", feed.stream, allow_head=False),
            *_files(),
        ]
    )
    return app


def _is_ours(asked: str, host: str) -> bool:
    before, _, after = asked.lower().rpartition(":")
    name = before if after.isdigit() else asked.lower()
    if name in ("localhost", host.lower()):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _files() -> Iterator[web.RouteDef]:
    """The page, and what it is made of."""
    for file in (resources.files("aiodist_server") / "page").iterdir():
        path = "/" if file.name == "index.html" else f"/{file.name}"
        yield web.get(path, _file(file.read_text("utf-8"), _TYPES[file.name.rpartition(".")[2]]))


def _file(text: str, content_type: str) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type=content_type)

    return handler


def _without_ids(found: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of members are for those who have the token: ranks know each other by them."""

    def anonymous(members: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in one.items() if key != "id"} for one in members]

    groups = [
        {**group, "members": anonymous(group["members"]), "waiting": anonymous(group["waiting"])}
        for group in found["groups"]
    ]
    channels = [
        {**channel, "participants": anonymous(channel["participants"])}
        for channel in found["channels"]
    ]
    averagers = [
        {**averager, "members": anonymous(averager["members"])}
        for averager in found.get("averagers", ())
    ]
    return {**found, "groups": groups, "channels": channels, "averagers": averagers}


class Answers:
    """What is served to who asks once."""

    def __init__(self, coordinator: Coordinator, surveys: Surveys) -> None:
        self._coordinator = coordinator
        self._surveys = surveys

    async def alive(self, request: web.Request) -> web.Response:
        """Whether it serves its members. While it drains it does: to restart it would cut them
        off."""
        return self._well(is_to_take_members=False)

    async def ready(self, request: web.Request) -> web.Response:
        """Whether it takes new members as well."""
        return self._well(is_to_take_members=True)

    def _well(self, *, is_to_take_members: bool) -> web.Response:
        try:
            draining = self._coordinator.status()["draining"]
        except RuntimeError as error:
            return web.Response(status=503, text=f"{error}\n")
        if draining and is_to_take_members:
            return web.Response(status=503, text="draining: no new members are taken\n")
        return web.Response(text="ok\n")

    async def status(self, request: web.Request) -> web.Response:
        text = json.dumps(_without_ids(await self.found()), indent=2)
        return web.Response(text=text, content_type="application/json")

    async def metrics(self, request: web.Request) -> web.Response:
        accept = request.headers.get("Accept", "")
        found = await self.found(counts=True)
        health = metrics.Health(self._coordinator.totals, self._coordinator.state_health)
        body, content_type = metrics.exposition(found, health, accept)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def found(self, *, counts: bool = False) -> Mapping[str, Any]:
        """What `Coordinator.survey` finds. Raises HTTPServiceUnavailable."""
        try:
            return await self._surveys.found(counts=counts)
        except (CoordinatorLostError, TimeoutError) as error:
            raise web.HTTPServiceUnavailable(text=f"{error}\n") from error
