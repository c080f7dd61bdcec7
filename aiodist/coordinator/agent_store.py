"""Finding the coordinator by the TCPStore that torchrun keeps at MASTER_ADDR:MASTER_PORT.

The store occupies that port. So rank 0 serves the coordinator on another port, and publishes it in
the store. The client of the store blocks, so it runs in a thread.
"""

from __future__ import annotations

import asyncio
import importlib
from datetime import timedelta
from typing import Any

from aiodist.errors import JoinError, JoinTimeoutError


async def publish(host: str, port: int, key: str, address: str, timeout: float) -> None:
    """Publish the address of the coordinator for `key`. Raises JoinError."""
    store = await _open(host, port, timeout)
    await asyncio.to_thread(store.set, key, address)


async def look_up(host: str, port: int, key: str, timeout: float) -> str:
    """Return the address that rank 0 has published for `key`; wait at most `timeout` seconds.

    Raises JoinTimeoutError, JoinError.
    """
    store = await _open(host, port, timeout)
    try:
        value = await asyncio.to_thread(store.get, key)
    except RuntimeError as error:
        raise JoinTimeoutError(
            f"rank 0 published no coordinator within {timeout:g} s in torchrun's store at "
            f"{host}:{port}: does it call aiodist.connect()? ({error})"
        ) from None
    return str(value.decode())


async def _open(host: str, port: int, timeout: float) -> Any:
    try:
        store_class = importlib.import_module("torch.distributed").TCPStore
    except ImportError:
        raise JoinError(
            f"torchrun keeps its store at {host}:{port}, and reaching it needs torch: install it, "
            "or set AIODIST_ADDRESS to a coordinator of its own (aiodist coordinator)"
        ) from None
    options = {"is_master": False, "wait_for_workers": False, "timeout": timedelta(seconds=timeout)}
    try:
        return await asyncio.to_thread(store_class, host, port, **options)
    except RuntimeError as error:
        raise JoinTimeoutError(
            f"torchrun's store at {host}:{port} was not reached within {timeout:g} s: {error}"
        ) from None
