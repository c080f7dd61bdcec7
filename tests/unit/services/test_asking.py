"""Answers of workers to questions of others."""

from __future__ import annotations

import asyncio
from typing import Any

from aiodist.services.asking import Asking
from aiodist.work import Work


async def test_close_does_not_tell_of_an_error_that_could_not_be_told() -> None:
    """The rank that asked may be gone, and no program awaits this send."""
    sent: list[Work[None]] = []

    class Quiet:
        closed = False

        def send(self, x: Any, dst: int, *, tag: str) -> Work[None]:
            sent.append(Work.begin(asyncio.get_running_loop(), "send", tag))
            return sent[-1]

    async def answer(question: str) -> None:
        raise ValueError(question)

    group: Any = Quiet()
    await Asking(answer)._reply(group, 1, 0, "why?")
    (work,) = sent
    assert work.is_awaited
    work.cancel()
