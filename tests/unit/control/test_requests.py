"""What a member has asked: over connections that come and go; and writes that wait their turn."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from aiodist.control.requests import Requests
from aiodist.errors import AiodistError, CoordinatorLostError, GroupClosedError
from aiodist.wire.activity import SeenRequest
from aiodist.wire.codec import decode_message
from aiodist.wire.frames import Decoder
from aiodist.wire.limits import MAX_WRITES
from aiodist.wire.messages import (
    Leave,
    Left,
    Message,
    Renew,
    Result,
    StoreCancel,
    StoreChanged,
    StoreGet,
    StoreSet,
    StoreWait,
    StoreWatch,
)
from aiodist.wire.recovery import BallotResult, Purpose, Vote


class Connected:
    """Requests, and what was sent over the present connection."""

    def __init__(self) -> None:
        self.requests = Requests(asyncio.get_running_loop())
        self.sent: list[tuple[int, Message]] = []

    def connect(self) -> None:
        self.sent.clear()
        self.requests.send = lambda data: self.sent.extend(
            decode_message(frame) for frame in Decoder().feed(data)
        )


@pytest.fixture
async def one() -> Any:
    return Connected()


async def begun(*coroutines: Any) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(one) for one in coroutines]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


async def test_what_has_no_answer_is_said_again_in_its_order(one: Connected) -> None:
    one.connect()
    first, replied = one.requests.start(StoreSet("k", b"v"))
    second, waiting = one.requests.start(StoreGet("k"))
    one.requests.answer(first, Result(None))
    one.requests.send = None
    third, late = one.requests.start(Leave())
    one.requests.tell(Renew())
    one.connect()
    one.requests.say_again()
    assert one.sent == [(second, StoreGet("k")), (third, Leave()), (0, Renew())]
    one.requests.answer(third, Left())
    assert (await replied, await late) == (Result(None), Left())
    assert not waiting.done()


async def test_a_watch_begins_again_and_says_so(one: Connected) -> None:
    one.connect()
    heard: list[Message | AiodistError] = []
    number = one.requests.watch(StoreWatch("k"), heard.append)
    one.connect()
    one.requests.say_again()
    assert one.sent == [(number, StoreWatch("k", again=True))]
    change = StoreChanged("k", b"v")
    one.requests.answer(number, change)
    one.requests.unwatch(number)
    one.requests.unwatch(number)
    one.requests.answer(number, change)
    assert heard == [change]
    assert one.sent[1:] == [(0, StoreCancel(number))]


async def test_only_so_many_writes_are_under_way(one: Connected) -> None:
    one.connect()
    writes = [one.requests.ask(StoreSet(f"{n}", b""), None) for n in range(MAX_WRITES + 1)]
    tasks = await begun(*writes, one.requests.ask(StoreGet("k"), None))
    assert [message for _, message in one.sent] == [
        StoreSet(f"{n}", b"") for n in range(MAX_WRITES)
    ]
    one.requests.answer(one.sent[0][0], Result(None))
    await tasks[0]
    # What is read waits for what was written before.
    assert [message for _, message in one.sent[MAX_WRITES:]] == [
        StoreSet(f"{MAX_WRITES}", b""),
        StoreGet("k"),
    ]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_writes_that_wait_are_sent_once_over_a_new_connection(one: Connected) -> None:
    one.connect()
    tasks = await begun(
        *[one.requests.ask(StoreSet(f"{n}", b""), None) for n in range(MAX_WRITES + 3)]
    )
    tasks[0].cancel()  # its place is free as soon as it is not said again
    tasks[MAX_WRITES].cancel()
    await asyncio.wait([tasks[0], tasks[MAX_WRITES]])
    one.requests.send = None
    one.connect()
    one.requests.say_again()
    keys = [message.key for _, message in one.sent if isinstance(message, StoreSet)]
    assert keys == [f"{n}" for n in [*range(1, MAX_WRITES), MAX_WRITES + 1]]
    one.requests.fail(GroupClosedError("closed"))
    assert len(one.sent) == MAX_WRITES
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, BaseException) for outcome in outcomes)


async def test_a_write_that_is_given_up_keeps_its_place_until_it_is_answered(
    one: Connected,
) -> None:
    one.connect()
    [task] = await begun(one.requests.ask(StoreSet("k", b""), None))
    task.cancel()
    await asyncio.wait({task})
    [(number, _)] = one.sent
    assert one.requests._writes == 1
    one.requests.answer(number, Result(None))
    assert one.requests._writes == 0


async def test_a_wait_that_is_given_up_is_called_off(one: Connected) -> None:
    one.connect()
    [task] = await begun(one.requests.ask(StoreWait(("k",)), None))
    task.cancel()
    await asyncio.wait({task})
    assert one.sent[1] == (0, StoreCancel(one.sent[0][0]))
    assert one.requests._requests == {}


async def test_what_is_begun_and_given_up_is_forgotten(one: Connected) -> None:
    reply = one.requests.begin(Leave())
    assert len(one.requests._requests) == 1
    reply.cancel()
    await begun()
    assert one.requests._requests == {}


async def test_what_is_said_instead_is_all_that_a_later_connection_hears(one: Connected) -> None:
    one.connect()
    vote = Vote(b"group", 0, Purpose.AGREE, flag=True)
    number, reply = one.requests.start(vote)
    no = replace(vote, flag=False)
    assert one.requests.older_than(0.0) == {number: vote}
    one.requests.amend(vote, no)
    assert one.sent == [(number, vote), (number, no)]
    assert one.requests.older_than(0.0) == {}  # no call waits
    one.requests.send = None
    one.connect()
    one.requests.say_again()
    assert one.sent == [(number, no)]
    verdict = BallotResult(False, (), 1)
    one.requests.answer(number, verdict)
    one.requests.answer(number, verdict)  # to the second message
    assert await reply == verdict
    one.requests.amend(vote, no)
    assert len(one.sent) == 1


async def test_only_store_requests_with_a_deadline_count_as_waits(one: Connected) -> None:
    asks = ((StoreGet("k"), None), (StoreGet("k"), 60.0), (SeenRequest(()), 60.0))
    tasks = await begun(*[one.requests.ask(*each) for each in asks])
    assert one.requests.older_than(0.0) == {2: StoreGet("k")}
    one.requests.fail(GroupClosedError("closed"))
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_is_about_the_store_may_fail_alone(one: Connected) -> None:
    _, get = one.requests.start(StoreGet("k"))
    _, leave = one.requests.start(Leave())
    heard: list[Any] = []
    one.requests.watch(StoreWatch("k"), heard.append)
    one.requests.fail(CoordinatorLostError("it is empty"), only_store=True)
    assert isinstance(get.exception(), CoordinatorLostError)
    assert [type(error) for error in heard] == [CoordinatorLostError]
    assert not leave.done()
    one.requests.fail(GroupClosedError("closed"))
    assert isinstance(leave.exception(), GroupClosedError)
    assert len(heard) == 1
