"""Messages of random programs: sent, received, and compared with what was sent."""

from __future__ import annotations

import asyncio
from collections import deque
from random import Random
from typing import Any

import numpy as np

from aiodist.errors import AiodistError, CollectiveTimeoutError
from aiodist.group import Group
from aiodist.testing.history import digest_of
from aiodist.testing.judge import Judge
from aiodist.testing.mail import LONG, Letter
from aiodist.testing.steps import data
from aiodist.types import ANY_SOURCE, ANY_TAG
from aiodist.work import Work

MOST_IN_VAIN = 20
"""How many receives are given up before one waits for long."""

Due = dict[tuple[int, str | int], deque[Letter]]
"""Messages that are to come, by sender and tag."""


async def exchange(judge: Judge, group: Group, failures: list[BaseException]) -> None:
    """Send and receive all messages of this rank."""
    rank = _Correspondent(judge, group, failures)
    await asyncio.gather(rank.send_all(), rank.receive_all())


class _Correspondent:
    """The messages of one rank of `group`."""

    def __init__(self, judge: Judge, group: Group, failures: list[BaseException]) -> None:
        self._judge = judge
        self._group = group
        self._failures = failures
        self._mail = judge.scenario.mail
        # Those among the ranks that exist.
        self._messages = [one for one in self._mail.messages if max(one.src, one.dst) < group.size]

    def _blame(self, error: BaseException, what: str) -> None:
        self._failures.append(error)
        self._judge.blame(self._group, error, what, expected=False)

    def _value(self, message: Letter) -> Any:
        group = self._group
        array = data(group.epoch, message.src, message.number, message.size)
        return array if self._mail.plain else [message.number, group.epoch, array]

    async def send_all(self) -> None:
        group = self._group
        works: list[Work[None]] = []
        chooser = Random(f"send {self._judge.scenario.seed} {group.rank}")
        for message in self._messages:
            if message.src != group.rank:
                continue
            try:
                works.append(group.send(self._value(message), message.dst, tag=message.tag))
            except AiodistError as error:
                self._blame(error, str(message))
                break
            self._judge.expect(works[-1], self._judge.scenario.op_timeout)
            if chooser.random() < 0.3:
                await asyncio.sleep(chooser.choice([0, 1e-4, 0.01]))
        for work in works:
            try:
                await work
            except AiodistError as error:
                self._blame(error, repr(work))

    async def receive_all(self) -> None:
        mail = self._mail
        await asyncio.sleep(mail.late)
        wanted: dict[tuple[Any, Any], list[Letter]] = {}
        for message in self._messages:
            if message.dst == self._group.rank:
                src: Any = message.src if mail.wild == "no" else ANY_SOURCE
                if mail.wild == "some":
                    src = tuple(range(message.src % 2, self._group.size, 2))
                tag = ANY_TAG if mail.wild == "all" else message.tag
                wanted.setdefault((src, tag), []).append(message)
        await asyncio.gather(*(self._receive(*key, some) for key, some in wanted.items()))

    async def _receive(self, src: Any, tag: Any, messages: list[Letter]) -> None:
        """Receive these messages one after the other, so that their order shows."""
        mail, group = self._mail, self._group
        chooser = Random(f"receive {self._judge.scenario.seed} {group.rank} {src} {tag}")
        due: Due = {}
        for message in messages:
            due.setdefault((message.src, message.tag), deque()).append(message)
        in_vain = 0
        left = len(messages)
        while left:
            patience = LONG if in_vain > MOST_IN_VAIN else mail.patience
            out = None
            if mail.plain:
                (line,) = due.values()
                out = np.zeros(line[0].size, np.int64)
            work: Work[Any] | None = None
            try:
                work = group.recv(src=src, tag=tag, timeout=patience, out=out)
                self._judge.expect(work, patience)
                if chooser.random() < mail.cancelled:
                    await asyncio.sleep(chooser.choice([0, 1e-4, 0.002, 0.01]))
                    work.cancel()
                value = await work
            except asyncio.CancelledError:
                if work is None or not work.cancelled():
                    raise
            except AiodistError as error:
                in_vain += 1
                if not isinstance(error, CollectiveTimeoutError) or patience == LONG:
                    self._blame(error, f"recv({src}, {tag})")
                    return
                await asyncio.sleep(0.001)
            else:
                left -= 1
                self._check(work, value, due)
            if out is not None:
                self._judge.watch(out, f"{group!r} {work!r}")

    def _check(self, work: Work[Any], value: Any, due: Due) -> None:
        """Check that the messages of one source and tag come in their order, each once."""
        line = due.get((work.source or 0, work.tag))
        if not line:
            self._judge.problems.append(f"{self._group!r} received what is not for it, by {work!r}")
            return
        message = line.popleft()
        expected = self._value(message)
        if digest_of(value) != digest_of(expected):
            self._judge.problems.append(
                f"{self._group!r} received {value!r} by {work!r}, not {expected!r} of {message}"
            )
