"""A short run of `make service`, and what it would find."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from fault_programs import ran
from service import Service, Worker


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")
@pytest.mark.timeout(300)
def test_no_request_fails_but_those_of_killed_workers() -> None:
    options = ["--rounds", 1, "--seconds", 1.5, "--every", 0.5, "--rate", 30, "--seed", 3]
    said = ran("service.py", *options)
    found = json.loads(said.partition("\n")[2])
    assert found["kills"] > 1
    assert found["undisturbed"]["answers"] == 45
    assert found["with kills"]["answers"] > 20


class Answer:
    """What a worker answers, in the place of an aiohttp session and its response."""

    def __init__(self, visits: int, status: int = 200) -> None:
        self.visits, self.status = visits, status

    def get(self, url: str) -> Answer:
        return self

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None

    def raise_for_status(self) -> None:
        if self.status != 200:
            raise aiohttp.ClientError(self.status)

    async def json(self) -> dict[str, int]:
        return {"visits": self.visits}


@dataclass(eq=False)
class Asked:
    """A worker that was asked 3 times, and has answered twice."""

    process = SimpleNamespace(pid=1)
    url: str = ""
    begun: int = 3
    answered: int = 2
    is_killed: bool = False


def service(answer: Answer) -> tuple[Service, Worker]:
    """A service of two workers, and the first of them."""
    workers = [cast(Worker, Asked()) for _ in range(2)]
    asked = Service("", cast(Any, answer))
    asked.members, asked.ready = workers, list(workers)
    return asked, workers[0]


@pytest.mark.parametrize("visits", [5, 6, 7])
async def test_an_answer_counts_what_was_answered_and_may_count_what_was_sent(visits: int) -> None:
    asked, worker = service(Answer(visits))
    assert await asked.ask(worker)
    assert (worker.begun, worker.answered) == (4, 3)


@pytest.mark.parametrize("visits", [4, 8])
async def test_a_wrong_answer_is_found(visits: int) -> None:
    asked, worker = service(Answer(visits))
    with pytest.raises(AssertionError, match=f"{visits} visits, not 5 to 7"):
        await asked.ask(worker)


async def test_a_request_that_fails_at_a_living_worker_is_found() -> None:
    asked, worker = service(Answer(5, status=500))
    assert not await asked.ask(worker)
    assert (asked.lost, len(asked.failed)) == (0, 1)
    worker.is_killed = True
    assert not await asked.ask(worker)
    assert (asked.lost, len(asked.failed)) == (1, 1)
