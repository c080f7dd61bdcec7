"""What is counted over time, and told as metrics."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

import aiodist
from aiodist.coordinator.actor import Coordinator
from aiodist.rank import doings
from aiodist_server import metrics


async def told(coordinator: Coordinator) -> dict[str, float]:
    """The metrics as they are scraped."""
    found = await coordinator.survey(counts=True)
    health = metrics.Health(coordinator.totals, coordinator.state_health, metrics.Sums())
    body, _ = metrics.exposition(found, health)
    lines = [line for line in body.decode().splitlines() if line.startswith("aiodist_")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def pair(coordinator: Coordinator, **options: object) -> list[aiodist.Group]:
    joining = [
        aiodist.connect(coordinator.address, rank=rank, size=2, **options) for rank in range(2)
    ]
    return await asyncio.gather(*joining)


@pytest.mark.long
async def test_a_thousand_groups_come_and_go_and_the_series_are_the_same() -> None:
    async with Coordinator("inproc://a-thousand-groups") as coordinator:
        series = set()
        for batch in range(20):
            names = [f"run {batch} {number}" for number in range(50)]

            async def one(name: str) -> None:
                async with aiodist.connect(coordinator.address, group=name, size=1) as group:
                    await group.all_reduce(np.ones(4))

            await asyncio.gather(*map(one, names))
            series.add(frozenset(await told(coordinator)))
        assert coordinator.totals.events["formed"] == 1000
        assert len(series) == 1
        assert not coordinator.totals._last


async def test_operations_are_measured_from_the_first_time_that_somebody_asks() -> None:
    async with Coordinator() as coordinator:
        groups = await pair(coordinator, transports="tcp")
        await asyncio.gather(*(group.all_reduce(np.ones(4)) for group in groups))
        before = await told(coordinator)
        assert not [name for name in before if "operation_seconds" in name]
        assert before['aiodist_payload_bytes_total{direction="sent",transport="tcp"}'] > 0
        for _ in range(3):
            await asyncio.gather(*(group.all_reduce(np.ones(4)) for group in groups))
        await asyncio.gather(*(group.all_reduce(np.ones(100_000)) for group in groups))
        after = await told(coordinator)
        how_many = 'aiodist_operation_seconds_count{op="all_reduce",size="%s"}'
        assert (after[how_many % "1KiB"], after[how_many % "1MiB"]) == (6, 2)
        total = after['aiodist_operation_seconds_sum{op="all_reduce",size="1KiB"}']
        assert 0 < total < math.inf
        await asyncio.gather(*(group.close() for group in groups))
        assert (await told(coordinator))[how_many % "1KiB"] == 6


async def test_failures_are_known_also_of_those_who_have_gone_at_once() -> None:
    """Nobody has asked them."""
    async with Coordinator() as coordinator:
        groups = await pair(coordinator)
        results = await asyncio.gather(
            groups[0].all_reduce(np.ones(4)),
            groups[1].all_reduce(np.ones(5)),
            return_exceptions=True,
        )
        assert all(isinstance(one, aiodist.MismatchError) for one in results)
        with pytest.raises(aiodist.CollectiveTimeoutError):
            await groups[0].barrier(timeout=0.01)
        await asyncio.gather(*(group.close() for group in groups))
        now = await told(coordinator)
        failed = 'aiodist_operation_failures_total{reason="%s"}'
        assert (now[failed % "mismatch"], now[failed % "timeout"]) == (2, 1)
        assert now['aiodist_events_total{event="left"}'] == 2


async def test_losses_and_refusals() -> None:
    async with Coordinator(token="secret") as coordinator:
        groups = await pair(coordinator, token="secret")
        groups[1].abort("enough")
        with pytest.raises(aiodist.PeerLostError):
            await groups[0].all_reduce(np.ones(4))
        with pytest.raises(aiodist.AuthenticationError):
            await aiodist.connect(coordinator.address, size=1, token="wrong")
        host, port = coordinator.address.removeprefix("tcp://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.read() == b""
        writer.close()
        await groups[0].close()
        now = await told(coordinator)
        assert now['aiodist_events_total{event="aborted"}'] == 1
        assert now['aiodist_operation_failures_total{reason="lost"}'] == 1
        assert now['aiodist_refused_connections_total{reason="token"}'] == 1
        assert now['aiodist_refused_connections_total{reason="protocol"}'] == 1


async def test_the_state_file_is_told_of(tmp_path: object) -> None:
    async with Coordinator(state=f"{tmp_path}/state") as coordinator:
        now = await told(coordinator)
        assert now["aiodist_state_file_age_seconds"] >= 0
        assert now["aiodist_state_file_failures_total"] == 0


async def test_nothing_is_measured_that_nobody_asks_for() -> None:
    async with aiodist.local(1) as (group,):
        doing = group._actor.control.doings
        assert isinstance(doing, doings.RankDoings)
        assert not doing._counting.measures
        assert not group._actor.endpoint.recorder.observers
