"""The TCPStore that torchrun keeps at MASTER_ADDR:MASTER_PORT, and what rank 0 writes into it.

The store occupies that port. So rank 0 serves the coordinator on another port, and publishes it in
the store. The store may outlive the workers: if torchrun starts them again, they find there what an
earlier rank 0 has published.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from aiodist.errors import JoinError, JoinTimeoutError
from aiodist.wire.address import Address

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds before the store is asked again. They grow, because thousands of ranks may ask it."""

_LONGEST_TIMEOUT = 1e6
"""The longest timeout of the store in seconds, because its timeouts are finite."""

_EXIT_SECONDS = 2.0
"""Seconds that the end of the process waits for calls of the store."""
_calling: set[threading.Thread] = set()


@atexit.register
def _wait_for_calls() -> None:
    # torch's client aborts the process if a call returns while Python ends.
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in list(_calling):
        thread.join(max(0.0, deadline - time.monotonic()))


class Notice(NamedTuple):
    """What rank 0 publishes: the address of its coordinator, and the run id that ranks join with.

    Rank 0 draws the run id, so it differs each time.
    """

    address: str
    run_id: str


class AgentStore:
    """The entry of torchrun's store that has the coordinator of one group."""

    def __init__(self, at: Address, key: str) -> None:
        self._host, self._port = at.host, at.port
        self._key = key
        self._store: Any = None  # None: not reached yet

    def __str__(self) -> str:
        return f"torchrun's store at {self._host}:{self._port}"

    async def publish(self, published: Notice, timeout: float) -> None:
        """Publish a coordinator. Raises JoinTimeoutError, JoinError."""
        try:
            async with asyncio.timeout(timeout):
                await self._open(timeout)
                await self._call(self._store.set, self._key, " ".join(published))
        except TimeoutError:
            raise JoinTimeoutError(f"{self} did not answer within {timeout:g} s") from None

    async def read(self, timeout: float, *, but: Notice | None = None) -> Notice:
        """Return what rank 0 has published, as soon as that is not `but`.

        Raises JoinTimeoutError, JoinError.
        """
        missing = f"{self} did not answer within {timeout:g} s"
        pause = _FIRST_PAUSE
        try:
            async with asyncio.timeout(timeout):
                await self._open(timeout)
                missing = (
                    f"rank 0 published no coordinator within {timeout:g} s in {self}: does it call "
                    "aiodist.connect()?"
                )
                while True:
                    found = await self._call(self._get)
                    if found is not None and found != but:
                        return found
                    await asyncio.sleep(pause)
                    pause = min(1.3 * pause, _LONGEST_PAUSE)
        except TimeoutError:
            raise JoinTimeoutError(missing) from None

    def _get(self) -> Notice | None:
        if not self._store.check([self._key]):
            return None
        address, _, run_id = self._store.get(self._key).decode().partition(" ")
        return Notice(address, run_id)

    async def _open(self, timeout: float) -> None:
        if self._store is not None:
            return
        try:
            # An import takes seconds. It must not be cut off by the end of the process, so it runs
            # in a thread that the process waits for.
            torch = await asyncio.to_thread(importlib.import_module, "torch.distributed")
        except ImportError:
            raise JoinError(
                f"reaching {self} needs torch: install it, or set AIODIST_ADDRESS to a coordinator "
                "of its own (aiodist coordinator)"
            ) from None
        options = {
            "is_master": False,
            "wait_for_workers": False,
            "timeout": timedelta(seconds=min(timeout, _LONGEST_TIMEOUT)),
        }
        self._store = await self._call(lambda: torch.TCPStore(self._host, self._port, **options))

    async def _call(self, call: Callable[..., T], *args: object) -> T:
        """Call the client of the store in a daemon thread. Raises JoinError.

        The client blocks, and for ever if the store does not answer. The process must be able to
        end meanwhile, so this is no thread of `asyncio.to_thread`.
        """
        outcome: Future[T] = Future()
        outcome.set_running_or_notify_cancel()

        def work() -> None:
            try:
                outcome.set_result(call(*args))
            except Exception as error:
                outcome.set_exception(error)
            finally:
                _calling.discard(thread)

        thread = threading.Thread(target=work, name="aiodist torchrun store", daemon=True)
        _calling.add(thread)
        thread.start()
        try:
            return await asyncio.wrap_future(outcome)
        except RuntimeError as error:
            raise JoinError(f"{self} failed: {error}. Does torchrun still run there?") from error
