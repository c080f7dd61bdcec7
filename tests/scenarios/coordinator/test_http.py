"""What a coordinator says over HTTP."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp.http_exceptions import LineTooLong

import aiodist
from aiodist.rank import actor
from aiodist.wire.address import parse_address
from aiodist_server import surveys, visits
from aiodist_server.feed import Feed
from aiodist_server.http import Answers, serving
from aiodist_server.surveys import Surveys

LOCAL = parse_address("tcp://127.0.0.1:0")


@asynccontextmanager
async def pages(coordinator: aiodist.Coordinator) -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        serving(coordinator, LOCAL) as url,
        aiohttp.ClientSession(url, raise_for_status=False) as session,
    ):
        yield session


async def test_what_participants_of_channels_have() -> None:
    async with (
        aiodist.Coordinator() as coordinator,
        pages(coordinator) as web,
        aiodist.publisher("policy", address=coordinator.address, name="trainer"),
    ):
        async with web.get("/status") as response:
            found = await response.json()
        async with web.get("/metrics") as response:
            metrics = await response.text()
    (channel,) = found["channels"]
    (trainer,) = channel["participants"]
    assert (channel["name"], trainer["name"], trainer["publishes"]) == ("policy", "trainer", True)
    assert "id" not in trainer
    assert 'aiodist_channel_subscribers{channel="policy"} 0.0\n' in metrics
    assert 'group="' not in metrics


async def test_what_ranks_do() -> None:
    async with aiodist.Coordinator(token="secret") as coordinator, pages(coordinator) as web:
        address = coordinator.address
        connect = [
            aiodist.connect(coordinator.address, group="train", rank=rank, size=2, token="secret")
            for rank in range(2)
        ]
        one, two = await asyncio.gather(*connect)
        async with one, two:
            await asyncio.gather(*(g.all_reduce(np.ones(1000)) for g in (one, two)))
            await asyncio.gather(*(g.barrier(tag="tagged") for g in (one, two)))
            pair = await asyncio.gather(*(g.dup() for g in (one, two)))
            await asyncio.gather(*(g.barrier() for g in pair))
            for group in pair:
                await group.close()
            late = one.barrier()
            async with web.get("/status") as response:
                assert response.status == 200
                found = await response.json()
            async with web.get("/metrics") as response:
                assert response.headers["Content-Type"].startswith("text/plain; version=")
                metrics = await response.text()
            await two.barrier()
            await late
    (group,) = found["groups"]
    assert (found["address"], found["draining"], group["name"]) == (address, False, "train")
    assert "id" not in group["members"][0]
    first, second = (member["doing"] for member in group["members"])
    assert first["waits"][0]["what"] == "barrier #1"
    # An all_reduce, a barrier with a tag, what dup agrees by, a barrier in the group that this made
    # and that is closed by now; and at rank 0 one that rank 1 has not called.
    assert (first["collectives"], second["collectives"]) == (5, 4)
    assert first["sent"] == second["received"] >= 8000
    assert group["findings"] == []  # nobody has waited for long
    assert 'aiodist_group_ranks{group="train"} 2.0\n' in metrics
    assert 'aiodist_rank_collectives_total{group="train",rank="0"' in metrics
    assert "secret" not in metrics + str(found)


async def test_faults_of_others_are_logged_for_debugging_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Any stranger could fill the log with malformed requests, and with connections that break
    before the answer. Faults of our own are errors."""
    faults = iter((ConnectionResetError("the peer has gone"), KeyError("a fault")))

    async def fail(self: Answers, **how: Any) -> Any:
        raise next(faults)

    monkeypatch.setattr(Answers, "found", fail)
    caplog.set_level(logging.DEBUG, "aiodist.daemon")
    async with aiodist.Coordinator() as coordinator, pages(coordinator) as web:
        for path, status in (("/" + 9000 * "a", 400), ("/status", 500), ("/status", 500)):
            async with web.get(path) as response:
                assert response.status == status
    said = [(one.name, one.levelname, one.exc_info) for one in caplog.records if one.exc_info]
    assert [(name, level, type(info[1])) for name, level, info in said] == [
        ("aiodist.daemon", "DEBUG", LineTooLong),
        ("aiodist.daemon", "DEBUG", ConnectionResetError),
        ("aiodist.daemon", "ERROR", KeyError),
    ]


async def test_the_members_are_asked_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    async with aiodist.Coordinator() as coordinator:
        asked = []
        gate = asyncio.Event()
        survey = coordinator.survey

        async def slow(**how: Any) -> Any:
            asked.append(1)
            await gate.wait()
            return await survey(**how)

        monkeypatch.setattr(coordinator, "survey", slow)
        answers = Surveys(coordinator)
        first, second = (asyncio.create_task(answers.found()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()  # who goes away takes nothing away from others
        gate.set()
        assert (await second)["groups"] == []
        assert len(asked) == 1
        await answers.found()
        assert len(asked) == 2
        gate.clear()
        whole, less = (asyncio.create_task(answers.found(counts=how)) for how in (True, False))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(whole, less)
        assert len(asked) == 3


async def test_a_coordinator_that_does_not_come_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveys, "ASK_SECONDS", 0.01)
    async with aiodist.Coordinator() as coordinator, pages(coordinator) as web:
        never = asyncio.Event()
        monkeypatch.setattr(coordinator, "survey", lambda **how: never.wait())
        async with web.get("/status") as response:
            assert response.status == 503
            assert await response.text() == "the coordinator did not come to it within 0.01 s\n"


async def test_whether_it_is_well() -> None:
    async with aiodist.Coordinator() as coordinator, pages(coordinator) as web:
        for path in ("/livez", "/readyz", "/healthz"):
            async with web.get(path) as response:
                assert (response.status, await response.text()) == (200, "ok\n")
        group = await aiodist.connect(coordinator.address, rank=0, size=1)
        stopping = asyncio.create_task(coordinator.stop(drain=30))
        await asyncio.sleep(0)
        for path in ("/readyz", "/healthz"):
            async with web.get(path) as response:
                assert response.status == 503
                assert "draining" in await response.text()
        async with web.get("/livez") as response:  # it still has members, who need it
            assert (response.status, await response.text()) == (200, "ok\n")
        await group.close()
        await stopping
        for path in ("/livez", "/readyz", "/healthz", "/status", "/metrics"):
            async with web.get(path) as response:
                assert response.status == 503
                assert "the coordinator has stopped" in await response.text()


async def test_it_stops_while_members_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "GOODBYE_TIMEOUT", 0.1)  # nobody is there to answer it
    async with (
        aiodist.Coordinator() as coordinator,
        await aiodist.connect(coordinator.address, rank=0, size=1),
    ):
        asking = asyncio.create_task(coordinator.survey())
        await asyncio.sleep(0)
        stopping = asyncio.create_task(coordinator.stop())
        with pytest.raises(aiodist.CoordinatorLostError, match="stopped"):
            await asking
        await stopping


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:80", 200), ("[::1]:80", 200), ("localhost", 200), ("LOCALHOST:1", 200),
        ("somebody.example", 421), ("somebody.example:80", 421), ("", 421),
    ],
)  # fmt: skip
async def test_a_page_of_somebody_else_learns_nothing(host: str, status: int) -> None:
    async with (
        aiodist.Coordinator() as coordinator,
        pages(coordinator) as web,
        web.get("/status", headers={"Host": host}) as response,
    ):
        assert response.status == status


async def test_others_may_ask_by_any_name_where_other_hosts_are_let_in() -> None:
    everywhere = parse_address("tcp://0.0.0.0:0")
    async with aiodist.Coordinator() as coordinator, serving(coordinator, everywhere) as url:
        port = url.rstrip("/").rpartition(":")[2]
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/healthz", headers={"Host": "a.b"}) as response,
        ):
            assert response.status == 200


async def test_who_brings_no_request_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "REQUEST_SECONDS", 0.05)
    async with aiodist.Coordinator() as coordinator, serving(coordinator, LOCAL) as url:
        host, port = url.removeprefix("http://").rstrip("/").split(":")
        for said in (b"", b"GET /healthz HTTP/1.1\r\nHost: loc", b"GET /healthz HTTP/1.1\r\n"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(said)
            assert await reader.read() == b""
            writer.close()
        monkeypatch.setattr(visits, "REQUEST_SECONDS", 30.0)
        status = coordinator.status

        def answer() -> Any:
            monkeypatch.setattr(visits, "REQUEST_SECONDS", 0.05)
            return status()

        monkeypatch.setattr(coordinator, "status", answer)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.read()).endswith(b"ok\n")  # and no other request came
        writer.close()


async def test_an_answer_that_takes_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[visits.Visit] = []
    made = visits.Visit.connection_made

    def making(visit: visits.Visit, transport: asyncio.BaseTransport) -> None:
        there.append(visit)
        made(visit, transport)

    async def silent(feed: Feed) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Feed, "run", silent)
    monkeypatch.setattr(visits.Visit, "connection_made", making)
    async with aiodist.Coordinator() as coordinator, pages(coordinator) as web:
        survey = coordinator.survey

        def running() -> list[bool]:
            return [one._timer is not None and not one._timer.cancelled() for one in there]

        async def asked(**how: Any) -> Any:
            assert running() == [False]
            return await survey(**how)

        monkeypatch.setattr(coordinator, "survey", asked)
        async with web.get("/status") as response:
            assert response.status == 200
        assert running() == [True]


async def test_the_oldest_connection_goes_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "most_visits", lambda: 8)
    async with aiodist.Coordinator() as coordinator, serving(coordinator, LOCAL) as url:
        host, port = url.removeprefix("http://").rstrip("/").split(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
        async with aiohttp.ClientSession(url) as session:
            for _ in range(3):  # the connection is kept, and used again
                async with session.get("/healthz") as response:
                    assert await response.text() == "ok\n"
        for reader, writer in opened[:16]:
            assert await reader.read() == b""
            writer.close()
        assert not any(reader.at_eof() for reader, _ in opened[17:])
        for _, writer in opened[16:]:
            writer.close()


def test_the_share_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {256: 16, 64: 16, 1024: 64, 10**6: 256, resource.RLIM_INFINITY: 256}
    for files, most in limits.items():
        monkeypatch.setattr(resource, "getrlimit", lambda what, files=files: (files, files))
        assert visits.most_visits() == most


async def test_the_page_and_its_files() -> None:
    async with aiodist.Coordinator() as coordinator, pages(coordinator) as web:
        async with web.get("/") as response:
            page = await response.text()
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            assert response.headers["Server"] == "aiodist"
        for name in ("page.js", "page.css", "icon.svg", "status", "metrics"):
            assert f'"{name}"' in page
            async with web.get(f"/{name}") as response:
                assert response.status == 200
        for name in ("dom.js", "group.js", "latencies.js", "plot.js", "strip.js"):
            async with web.get(f"/{name}") as response:
                assert response.content_type == "text/javascript"
        async with web.post("/status") as response:
            assert response.status == 405
        async with web.head("/events") as response:
            assert response.status == 405
        async with web.get("/none") as response:
            assert response.status == 404
