"""Questions to all workers of a service: `Lifespan.ask`."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiodist.errors import (
    GroupClosedError,
    GroupRevokedError,
    MessageTooLargeError,
    ProtocolError,
    in_words,
)
from aiodist.group import Group
from aiodist.wire.limits import MAX_TEXT

log = logging.getLogger("aiodist.services")

Answer = Callable[[Any], Awaitable[Any]]
"""A function that answers a question."""

TAG = "aiodist ask"
"""The tag of questions, ``[number, question]``, and replies, ``[number, is an answer, answer]``."""


class Asking:
    """The questions that this worker has asked, and the answers that it gives."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._numbers = itertools.count()
        # Replies that are awaited, by number of the question and rank.
        self._waiting: dict[tuple[int, int], asyncio.Future[list[Any]]] = {}

    async def ask(self, group: Group, question: Any, silent: list[int]) -> list[Any]:
        """Return the answers of all ranks, by rank. A call that is cancelled puts the ranks that
        have not answered into `silent`."""
        number, loop = next(self._numbers), asyncio.get_running_loop()
        others = [rank for rank in range(group.size) if rank != group.rank]
        sends = [group.send([number, question], rank, tag=TAG) for rank in others]
        replies = {rank: loop.create_future() for rank in others}
        keys = {(number, rank): reply for rank, reply in replies.items()}
        self._waiting |= keys
        answering = asyncio.create_task(self._answered(group, number, question))
        try:
            silent.clear()
            own, *_ = await asyncio.gather(answering, *replies.values(), *sends)
        except asyncio.CancelledError:
            parts = {group.rank: answering, **replies}  # those that waited are cancelled, too
            silent += [
                rank for rank in sorted(parts) if not parts[rank].done() or parts[rank].cancelled()
            ]
            raise
        finally:
            for key in keys:
                self._waiting.pop(key, None)
            for part in (answering, *replies.values(), *sends):
                part.cancel()
            if not answering.done():  # it ends first, because the question may be asked again
                await asyncio.wait({answering})
        answers = []
        for rank in range(group.size):
            is_answer, value = (True, own) if rank == group.rank else replies[rank].result()
            if not is_answer:
                raise RuntimeError(f"rank {rank} did not answer: {value}")
            answers.append(value)
        return answers

    async def serve(self, group: Group) -> None:
        """Answer the questions of other workers during one epoch."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                receiving = group.recv(tag=TAG)
                try:
                    number, *rest = await receiving
                except (MessageTooLargeError, ProtocolError) as error:
                    # Only this message is lost. A worker that left for it would be asked again.
                    log.warning("a question or an answer is lost: %s", error)
                    continue
                source = receiving.source
                assert source is not None
                if len(rest) == 1:
                    task = asyncio.create_task(self._reply(group, source, number, rest[0]))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    continue
                reply = self._waiting.pop((number, source), None)
                if reply is not None and not reply.done():  # else the question was given up
                    reply.set_result(rest)
        except GroupClosedError:
            pass
        finally:
            for task in list(tasks):
                task.cancel()
            waiting, self._waiting = self._waiting, {}
            for reply in waiting.values():
                if not reply.done():
                    # `Lifespan.call` asks again in the next epoch.
                    reply.set_exception(GroupRevokedError("the epoch ended before all answered"))
                    reply.exception()

    async def _answered(self, group: Group, number: int, question: Any) -> Any:
        """Return this worker's own answer. Question and answer travel as those of the others do, so
        that a program that works with one worker works with several."""
        came = await _to_self(group, number, question)
        try:
            answer = await self._answer(came)
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            # Otherwise the task that asks would look cancelled.
            raise RuntimeError("this worker's answer ended by CancelledError") from error
        return await _to_self(group, number, answer)

    async def _reply(self, group: Group, source: int, number: int, question: Any) -> None:
        try:
            await group.send([number, True, await self._answer(question)], source, tag=TAG)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise  # the epoch is over, and not only something that the answer has waited for
            if not group.closed:
                text = in_words(error)[:MAX_TEXT]
                # The rank that asked may be gone by now, and then its loss is no error of `close`.
                sending = group.send([number, False, text], source, tag=TAG)
                sending.add_done_callback(lambda done: done.cancelled() or done.exception())


def _is_cancelled() -> bool:
    """Whether this task itself is cancelled, and not only something that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _to_self(group: Group, number: int, value: Any) -> Any:
    """Return `value` as it arrives when this rank sends it to itself."""
    rank, tag = group.rank, f"{TAG}, own {number}"
    _, came = await asyncio.gather(group.send(value, rank, tag=tag), group.recv(src=rank, tag=tag))
    return came
