"""Messages of random programs: who sends what to whom, and how it is received."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import numpy as np

from aiodist.errors import AiodistError, CollectiveTimeoutError
from aiodist.group import Group
from aiodist.testing.history import digest_of
from aiodist.testing.steps import Array, data
from aiodist.types import ANY_SOURCE, ANY_TAG
from aiodist.work import Work

SIZES = (0, 1, 1000, 7000, 30_000, 120_000)
"""Elements, of 8 bytes: eager ones, and large ones that are pulled in pieces."""
LONG = 100.0
"""Seconds after which a receive that should have found its message has not."""
MOST_IN_VAIN = 20
"""Receives that are given up before one waits for long."""


@dataclass(frozen=True)
class Message:
    """`number` is unique; messages of one (source, tag) must arrive in its order."""

    number: int
    src: int
    dst: int
    tag: str | int
    size: int


@dataclass(frozen=True)
class Mail:
    """`wild`: receives name no source ("source"), nor a tag ("all"), or both ("no"). `patience`:
    seconds that a receive waits before it is given up and posted again; `cancelled`: how often it
    is given up at once. `late`: seconds before a rank begins to receive. `plain`: values are arrays
    alone, received in memory that is given for it."""

    messages: tuple[Message, ...]
    wild: str
    patience: float
    cancelled: float
    late: float
    plain: bool


def random_mail(chooser: Random, size: int, *, calm: bool, narrow: bool) -> Mail:
    """Messages among `size` ranks."""
    count = chooser.choice([0, 10, 40])
    wild = chooser.choice(["no", "no", "source", "all"])
    flood = not narrow and chooser.random() < 0.1
    sizes = (7000,) if flood else SIZES[:3] if narrow or chooser.random() < 0.5 else SIZES
    tags: tuple[str | int, ...] = ("a", "b", 3)
    return Mail(
        tuple(
            Message(
                number,
                chooser.randrange(size),
                chooser.randrange(size),
                chooser.choice(tags),
                chooser.choice(sizes),
            )
            for number in range(100 if flood else count)
        ),
        wild,
        patience=LONG if calm else chooser.choice([0.002, 0.1, LONG]),
        cancelled=0.0 if calm else chooser.choice([0.0, 0.2]),
        late=chooser.choice([0.0, 0.0, 0.3]),
        plain=wild == "no" and chooser.random() < 0.6,
    )


class MailPlan(Protocol):
    """What is planned for a run: the same for all of its ranks."""

    @property
    def seed(self) -> int | str: ...

    @property
    def op_timeout(self) -> float: ...

    @property
    def mail(self) -> Mail: ...


class MailRun(Protocol):
    """A run whose ranks exchange mail. `problems` gets what was wrong with what they saw."""

    @property
    def scenario(self) -> MailPlan: ...

    problems: list[str]

    def expect(self, work: Work[Any], timeout: float) -> None:
        """Notes that `work` is to end within `timeout` seconds."""
        ...

    def watch(self, buffer: Array, text: str) -> None:
        """Sees to it that nobody writes to `buffer` from now on."""
        ...

    def blame(self, group: Group, error: BaseException, what: str, expected: bool) -> bool:
        """Notes an error that has no cause. Returns whether somebody is lost by it."""
        ...


async def exchange(run: MailRun, group: Group, failures: list[BaseException]) -> None:
    """All messages of this rank, sent and received."""
    await asyncio.gather(_send_all(run, group, failures), _receive_all(run, group, failures))


def _mine(run: MailRun, group: Group) -> list[Message]:
    """Those among the ranks that there are."""
    everything = run.scenario.mail.messages
    return [message for message in everything if max(message.src, message.dst) < group.size]


async def _send_all(run: MailRun, group: Group, failures: list[BaseException]) -> None:
    works: list[Work[None]] = []
    chooser = Random(f"send {run.scenario.seed} {group.rank}")
    for message in _mine(run, group):
        if message.src != group.rank:
            continue
        try:
            works.append(group.send(_value(run, group, message), message.dst, tag=message.tag))
        except AiodistError as error:
            failures.append(error)
            run.blame(group, error, str(message), expected=False)
            break
        run.expect(works[-1], run.scenario.op_timeout)
        if chooser.random() < 0.3:
            await asyncio.sleep(chooser.choice([0, 1e-4, 0.01]))
    for work in works:
        try:
            await work
        except AiodistError as error:
            failures.append(error)
            run.blame(group, error, repr(work), expected=False)


def _value(run: MailRun, group: Group, message: Message) -> Any:
    array = data(group.epoch, message.src, message.number, message.size)
    return array if run.scenario.mail.plain else [message.number, group.epoch, array]


async def _receive_all(run: MailRun, group: Group, failures: list[BaseException]) -> None:
    mail = run.scenario.mail
    mine = [message for message in _mine(run, group) if message.dst == group.rank]
    await asyncio.sleep(mail.late)
    wanted: dict[tuple[Any, Any], list[Message]] = {}
    for message in mine:
        src = message.src if mail.wild == "no" else ANY_SOURCE
        tag = ANY_TAG if mail.wild == "all" else message.tag
        wanted.setdefault((src, tag), []).append(message)
    await asyncio.gather(
        *(
            _Line(run, group, src, tag, messages, failures).receive()
            for (src, tag), messages in wanted.items()
        )
    )


class _Line:
    """Messages that are received one after the other, so that their order shows."""

    def __init__(
        self,
        run: MailRun,
        group: Group,
        src: Any,
        tag: Any,
        messages: list[Message],
        failures: list[BaseException],
    ) -> None:
        self.run, self.group = run, group
        self.src, self.tag = src, tag
        self.failures = failures
        # Decides how each message is received.
        self.chooser = Random(f"receive {run.scenario.seed} {group.rank} {src} {tag}")
        # Messages that are to come, by sender and tag.
        self.due: dict[tuple[int, str | int], deque[Message]] = {}
        for message in messages:
            self.due.setdefault((message.src, message.tag), deque()).append(message)
        self.left = len(messages)  # how many of them there are

    async def receive(self) -> None:
        """All of them."""
        in_vain = 0
        mail = self.run.scenario.mail
        while self.left:
            patience = LONG if in_vain > MOST_IN_VAIN else mail.patience
            out = None
            if mail.plain:
                (line,) = self.due.values()
                out = np.zeros(line[0].size, np.int64)
            work: Work[Any] | None = None
            try:
                work = self.group.recv(src=self.src, tag=self.tag, timeout=patience, out=out)
                self.run.expect(work, patience)
                if self.chooser.random() < mail.cancelled:
                    await asyncio.sleep(self.chooser.choice([0, 1e-4, 0.002, 0.01]))
                    work.cancel()
                value = await work
            except asyncio.CancelledError:
                if work is None or not work.cancelled():
                    raise
            except AiodistError as error:
                in_vain += 1
                if not isinstance(error, CollectiveTimeoutError) or patience == LONG:
                    self.failures.append(error)
                    what = f"recv({self.src}, {self.tag})"
                    self.run.blame(self.group, error, what, expected=False)
                    return
                await asyncio.sleep(0.001)
            else:
                self._check(work, value)
            if out is not None:
                self.run.watch(out, f"{self.group!r} {work!r}")

    def _check(self, work: Work[Any], value: Any) -> None:
        """The messages of one source and tag come in their order, each once."""
        self.left -= 1
        line = self.due.get((work.source or 0, work.tag))
        if not line:
            self.run.problems.append(f"{self.group!r} received what is not for it, by {work!r}")
            return
        message = line.popleft()
        expected = _value(self.run, self.group, message)
        if digest_of(value) != digest_of(expected):
            self.run.problems.append(
                f"{self.group!r} received {value!r} by {work!r}, not {expected!r} of {message}"
            )
