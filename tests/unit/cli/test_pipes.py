"""The pipes of ranks, on both kinds of event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

from aiodist_cli.pipes import Pipe

Run = Callable[..., None]


def test_interrupt_amid_opening_is_the_error_and_leaves_nothing_open(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []
    pipe = os.pipe

    def noted() -> tuple[int, int]:
        ends.extend(pipe())
        return ends[0], ends[1]

    async def main() -> None:
        monkeypatch.setattr(os, "pipe", noted)
        opening = asyncio.create_task(Pipe.open())
        await asyncio.sleep(0)
        assert ends
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        for end in ends:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(end)

    run(main())
