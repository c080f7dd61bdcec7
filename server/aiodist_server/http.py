"""HTTP of the daemon: a page, the status as JSON, metrics, and health checks."""

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
from aiohttp.http import HttpProcessingError

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
"""Seconds for answers that are under way when the daemon ends."""

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
    """Serve at `address` (of scheme tcp). Gives the URL, with the port that it got. Raises
    OSError."""
    surveys = Surveys(coordinator)
    feed = Feed(coordinator, surveys)
    app = application(coordinator, address, surveys, feed)
    visits = Visits()
    app.middlewares.insert(0, visits.attend)
    runner = web.AppRunner(
        app, access_log=None, logger=_Problems(logger), shutdown_timeout=CLOSE_SECONDS
    )
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
    """Log that the feed has ended. This is a fault of the page, and groups go on."""
    if not asking.cancelled():
        logger.error("the page is told nothing more", exc_info=asking.exception())


class _Problems(logging.LoggerAdapter[logging.Logger]):
    """Takes the errors of aiohttp into the daemon's log. Malformed requests and connections that
    break are logged at debug level only, because any stranger could fill the log with them."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **rest: Any) -> None:
        of_peer = (HttpProcessingError, web.RequestPayloadError, ConnectionError)
        level = logging.DEBUG if isinstance(exc_info, of_peer) else logging.ERROR
        self.log(level, msg, *args, exc_info=exc_info, **rest)


def application(
    coordinator: Coordinator, address: Address, surveys: Surveys, feed: Feed
) -> web.Application:
    """Make the application for `address`.

    On the loopback interface, a request is refused unless it names that address, localhost, or an
    address in numbers. In a browser it would come from a foreign page whose name points here.
    """
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
            # Without HEAD, because that would wait for news that it never gets.
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
    """Yield the routes of the page and its files."""
    for file in (resources.files("aiodist_server") / "page").iterdir():
        path = "/" if file.name == "index.html" else f"/{file.name}"
        yield web.get(path, _file(file.read_text("utf-8"), _TYPES[file.name.rpartition(".")[2]]))


def _file(text: str, content_type: str) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type=content_type)

    return handler


def _without_ids(found: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the ids of members, because ranks know each other by them, and only holders of the
    token may see them."""

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
    """Answers to single requests."""

    def __init__(self, coordinator: Coordinator, surveys: Surveys) -> None:
        self._coordinator = coordinator
        self._surveys = surveys
        self._sums = metrics.Sums()

    async def alive(self, request: web.Request) -> web.Response:
        """Tell whether it serves its members. It does so while it drains, too, so that it is not
        restarted then."""
        return self._well(is_to_take_members=False)

    async def ready(self, request: web.Request) -> web.Response:
        """Tell whether it takes new members as well."""
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
        coordinator = self._coordinator
        health = metrics.Health(coordinator.totals, coordinator.state_health, self._sums)
        body, content_type = metrics.exposition(found, health, accept)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def found(self, *, counts: bool = False) -> Mapping[str, Any]:
        """Return what `Coordinator.survey` finds. Raises HTTPServiceUnavailable."""
        try:
            return await self._surveys.found(counts=counts)
        except (CoordinatorLostError, TimeoutError) as error:
            raise web.HTTPServiceUnavailable(text=f"{error}\n") from error
