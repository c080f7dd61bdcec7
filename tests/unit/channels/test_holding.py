"""Work in threads that uses memory of the user."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

from aiodist.channels.holding import in_thread


async def test_the_error_of_a_thread_whose_caller_was_cancelled_is_no_noise() -> None:
    heard: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: heard.append(context))
    may = threading.Event()

    def fails() -> None:
        may.wait()
        raise ValueError("not a tree")

    call = asyncio.ensure_future(in_thread(fails))
    await asyncio.sleep(0)
    call.cancel()
    may.set()
    await asyncio.wait({call})
    assert call.cancelled()
    del call
    gc.collect()
    assert not heard
