"""A headless Chromium, driven by the DevTools protocol: for tests of pages, and pictures of them.

It is the system's own: ``apt-get install chromium``, or CHROMIUM names another one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

SECONDS = 50.0
"""How long anything may take."""


def command() -> str | None:
    """The browser; None: there is none."""
    named = os.environ.get("CHROMIUM")
    return named or shutil.which("chromium") or shutil.which("chromium-browser")


@asynccontextmanager
async def browsing(program: str) -> AsyncIterator[Page]:
    """A browser with an empty page. It ends with the block."""
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            program,
            "--headless",
            "--no-sandbox",  # tests may run as root
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--hide-scrollbars",
            "--force-color-profile=srgb",
            "--no-first-run",
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
            "about:blank",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "HOME": folder, "TZ": "UTC", "LANG": "en_GB.UTF-8"},
            start_new_session=True,
        )
        try:
            port = await _port(process)
            draining = asyncio.create_task(_drain(process))
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
                async with session.get("/json/list") as response:
                    listed = await response.json()
                (target,) = [one["id"] for one in listed if one["type"] == "page"]
                async with session.ws_connect(
                    f"/devtools/page/{target}", max_msg_size=1 << 26
                ) as socket:
                    page = Page(socket)
                    yield page
                    await page.close()
                    with contextlib.suppress(asyncio.CancelledError):
                        await socket.send_json({"id": 0, "method": "Browser.close"})
                        await process.wait()
            await draining
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            _forget(folder)


async def _port(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    async with asyncio.timeout(SECONDS):
        while line := await process.stderr.readline():
            if line.startswith(b"DevTools listening on "):
                return int(line.split(b":")[2].split(b"/")[0])
    raise RuntimeError("the browser ended before it listened")


async def _drain(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    while await process.stderr.read(65536):
        pass


def _forget(folder: str) -> None:
    """What its helpers write a last time, after it has ended, is not waited for."""
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir(exist_ok=True)  # its owner removes it


class Page:
    """One page of the browser. `problems`: what it complained of in its console."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._loaded = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def close(self) -> None:
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(SECONDS):
            return await answer

    async def go(self, url: str) -> None:
        """Load a page, with all that it needs."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(SECONDS):
            await self._loaded.wait()

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript; what it promises, once that is there."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise AssertionError(json.dumps(found["exceptionDetails"], indent=1))
        return found["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression is true. It is looked at after each change of the page."""
        await self.evaluate(
            f"""new Promise((resolve) => {{
                const holds = () => {{ if ({condition}) {{ watch.disconnect(); resolve(1); }} }};
                const watch = new MutationObserver(holds);
                const what = {{childList: true, attributes: true, characterData: true}};
                watch.observe(document, {{...what, subtree: true}});
                holds();
            }})"""
        )

    async def text(self, selector: str = "body") -> str:
        return str(await self.evaluate(f"document.querySelector({selector!r}).innerText"))

    async def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    async def colours(self, scheme: str) -> None:
        """ "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def picture(self) -> bytes:
        """All of the page as PNG, also what is below the window."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = await self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(taken["data"])

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                answer = self._answers.pop(said["id"])
                if answer.done():
                    continue
                if "error" in said:
                    answer.set_exception(RuntimeError(said["error"]["message"]))
                else:
                    answer.set_result(said["result"])
            elif said["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif said["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(said["params"]["exceptionDetails"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.problems.append(json.dumps(said["params"]["entry"]))
