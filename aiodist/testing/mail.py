"""Messages of random programs: who sends what to whom, and how it is received."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from aiodist.errors import AiodistError, CollectiveTimeoutError
from aiodist.group import Group
from aiodist.runtime.work import Work
from aiodist.testing.steps import data
from aiodist.types import ANY_SOURCE, ANY_TAG

if TYPE_CHECKING:
    from aiodist.testing.workload import Run

SIZES = (0, 1, 100, 7000, 30_000, 120_000)
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
    """`wild`: receives name neither source nor tag, "source": no source. `patience`: seconds that a
    receive waits before it is given up and posted again; `cancelled`: how often it is given up at
    once. `late`: seconds before a rank begins to receive."""

    messages: tuple[Message, ...]
    wild: str
    patience: float
    cancelled: float
    late: float


def random_mail(chooser: Random, size: int, *, calm: bool, narrow: bool) -> Mail:
    """Messages among `size` ranks."""
    count = chooser.choice([0, 10, 40])
    flood = not narrow and chooser.random() < 0.1
    sizes = (7000,) if flood else SIZES[:4] if narrow or chooser.random() < 0.7 else SIZES
    return Mail(
        tuple(
            Message(
                number,
                chooser.randrange(size),
                chooser.randrange(size),
                chooser.choice(["a", "b", 3]),
                chooser.choice(sizes),
            )
            for number in range(100 if flood else count)
        ),
        chooser.choice(["no", "source", "all"]),
        patience=LONG if calm else chooser.choice([0.002, 0.1, LONG]),
        cancelled=0.0 if calm else chooser.choice([0.0, 0.2]),
        late=chooser.choice([0.0, 0.0, 0.3]),
    )


async def exchange(run: Run, group: Group, failures: list[BaseException]) -> None:
    """All messages of this rank, sent and received."""
    await asyncio.gather(_send_all(run, group, failures), _receive_all(run, group, failures))


def _mine(run: Run, group: Group) -> list[Message]:
    """Those among the ranks that there are."""
    everything = run.scenario.mail.messages
    return [message for message in everything if max(message.src, message.dst) < group.size]


async def _send_all(run: Run, group: Group, failures: list[BaseException]) -> None:
    works: list[Work[None]] = []
    chooser = Random(f"send {run.scenario.seed} {group.rank}")
    for message in _mine(run, group):
        if message.src != group.rank:
            continue
        value = [message.number, group.epoch, data(group.epoch, group.rank, message.number,
                                                   message.size)]  # fmt: skip
        try:
            works.append(group.send(value, message.dst, tag=message.tag))
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


async def _receive_all(run: Run, group: Group, failures: list[BaseException]) -> None:
    mail = run.scenario.mail
    mine = [message for message in _mine(run, group) if message.dst == group.rank]
    await asyncio.sleep(mail.late)
    wanted: dict[tuple[Any, Any], list[Message]] = {}
    for message in mine:
        src = message.src if mail.wild == "no" else ANY_SOURCE
        tag = ANY_TAG if mail.wild == "all" else message.tag
        wanted.setdefault((src, tag), []).append(message)
    came: list[Message] = []
    byname = {message.number: message for message in mine}
    await asyncio.gather(
        *(
            _receive(run, group, src, tag, len(messages), byname, came, failures)
            for (src, tag), messages in wanted.items()
        )
    )
    if len({message.number for message in came}) != len(came):
        run.problems.append(f"{group!r} received a message twice: {came}")
    if not failures and len(came) != len(mine):
        run.problems.append(f"{group!r} has not received all of {mine}: {came}")


async def _receive(
    run: Run,
    group: Group,
    src: Any,
    tag: Any,
    count: int,
    known: dict[int, Message],
    came: list[Message],
    failures: list[BaseException],
) -> None:
    """Receive `count` messages, one after the other, so that their order shows."""
    mail = run.scenario.mail
    chooser = Random(f"receive {run.scenario.seed} {group.rank} {tag}")
    last: dict[tuple[int, Any], int] = {}
    in_vain = 0
    while count:
        patience = LONG if in_vain > MOST_IN_VAIN else mail.patience
        try:
            work = group.recv(src=src, tag=tag, timeout=patience)
            run.expect(work, patience)
            if chooser.random() < mail.cancelled:
                await asyncio.sleep(chooser.choice([0, 1e-4, 0.01]))
                work.cancel()
            value = await work
        except asyncio.CancelledError:
            if not work.cancelled():
                raise
            continue
        except CollectiveTimeoutError as error:
            if patience < LONG:
                in_vain += 1
                await asyncio.sleep(0.001)
                continue
            failures.append(error)
            run.blame(group, error, f"recv({src}, {tag})", expected=False)
            return
        except AiodistError as error:
            failures.append(error)
            run.blame(group, error, f"recv({src}, {tag})", expected=False)
            return
        count -= 1
        number, epoch, array = value
        message = known.get(number)
        if message is None or (message.src, message.tag) != (work.source, work.tag):
            run.problems.append(f"{group!r} received what is not for it: {value!r} of {work!r}")
            return
        right = data(group.epoch, message.src, number, message.size)
        if epoch != group.epoch or not np.array_equal(array, right):
            run.problems.append(f"{group!r} received {value!r} for {message}")
        line = message.src, message.tag
        if last.get(line, -1) > number:
            run.problems.append(f"{group!r}: {message} was overtaken by number {last[line]}")
        last[line] = number
        came.append(message)
