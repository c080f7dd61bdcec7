"""Operations as spans and metrics of OpenTelemetry."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist import telemetry

pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

Sdk = tuple[TracerProvider, InMemorySpanExporter, MeterProvider, InMemoryMetricReader]


@pytest.fixture
def sdk() -> Iterator[Sdk]:
    """The SDK, set up by a program."""
    spans, tracers, reader = InMemorySpanExporter(), TracerProvider(), InMemoryMetricReader()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    meters = MeterProvider([reader])
    telemetry.enable(tracer_provider=tracers, meter_provider=meters)
    yield tracers, spans, meters, reader
    telemetry.disable()
    tracers.shutdown()
    meters.shutdown()


def of_rank(spans: InMemorySpanExporter, rank: int) -> list[ReadableSpan]:
    return [
        one
        for one in spans.get_finished_spans()
        if (one.attributes or {}).get("aiodist.rank") == rank
    ]


async def test_spans(sdk: Sdk) -> None:
    tracers, spans, _, _ = sdk
    before = time.time_ns()
    async with aiodist.local(2) as groups:
        with tracers.get_tracer("program").start_as_current_span("request") as request:
            works = [group.all_reduce(np.ones(4)) for group in groups]
        await asyncio.gather(*works)
        for _ in range(2):  # the second one may be done within its call
            await asyncio.gather(groups[0].send(np.ones(2), 1, tag="t"), groups[1].recv(src=0))
        one, *messages = of_rank(spans, 0)
    assert one.name == "all_reduce"
    assert one.parent is not None
    assert one.parent.span_id == request.get_span_context().span_id
    assert before <= (one.start_time or 0) <= (one.end_time or 0) <= time.time_ns()
    assert dict(one.attributes or {}) == {
        "aiodist.operation": "all_reduce", "aiodist.group": "world", "aiodist.epoch": 1,
        "aiodist.rank": 0, "aiodist.size": 2, "aiodist.bytes": 32, "aiodist.number": 0,
        "aiodist.call": "all_reduce(SUM, float64[4])",
        "aiodist.algorithm": "recursive_doubling.all_reduce",
    }  # fmt: skip
    assert [(span.name, span.kind, span.parent) for span in messages] == [
        ("send", SpanKind.PRODUCER, None)
    ] * 2
    assert {span.kind for span in of_rank(spans, 1)[1:]} == {SpanKind.CONSUMER}


async def test_spans_of_what_fails(sdk: Sdk) -> None:
    _, spans, _, reader = sdk
    async with aiodist.local(2) as groups:
        work = groups[0].barrier()
        work.cancel()
        groups[1].abort("enough")
        with pytest.raises(aiodist.PeerLostError):
            await groups[0].all_reduce(np.ones(4))
    cancelled, failed = of_rank(spans, 0)
    assert (cancelled.attributes or {})["error.type"] == "cancelled"
    assert cancelled.status.status_code is StatusCode.UNSET
    assert (failed.attributes or {})["error.type"] == "PeerLostError"
    assert failed.status.status_code is StatusCode.ERROR
    assert "rank 1" in (failed.status.description or "")
    assert {"barrier", "all_reduce"} <= {*counts(reader, "aiodist.operation.duration")}


def counts(reader: InMemoryMetricReader, name: str) -> dict[str, tuple[int, float]]:
    """How many values of an operation there are, and their sum."""
    found: dict[str, tuple[int, float]] = {}
    data: Any = reader.get_metrics_data()
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        if metric.name == name:
            for point in metric.data.data_points:
                found[point.attributes["aiodist.operation"]] = (point.count, point.sum)
    return found


class Broken(SpanProcessor):
    """Of a program, with a fault."""

    def __init__(self, at: str) -> None:
        self._at = at

    def on_start(self, span: object, parent_context: object = None) -> None:
        if self._at == "start":
            raise LookupError("of the program")

    def on_end(self, span: object) -> None:
        if self._at == "end":
            raise LookupError("of the program")


@pytest.mark.parametrize("transports", ["inproc", "tcp"])
@pytest.mark.parametrize("at", ["start", "end"])
async def test_what_the_sdk_raises_harms_no_operation(
    sdk: Sdk, caplog: pytest.LogCaptureFixture, at: str, transports: str
) -> None:
    sdk[0].add_span_processor(Broken(at))
    async with aiodist.local(2, transports=transports) as groups:
        for value in (1, np.ones(100_000)):
            sums = await asyncio.gather(*(group.all_reduce(value) for group in groups))
            assert [np.max(one) for one in sums] == [2, 2]
        for _ in range(2):  # the second one may be done within its call
            await groups[0].send(7, 1)
            assert await groups[1].recv(src=0) == 7
        assert not groups[0].lost
    said = [one for one in caplog.records if "OpenTelemetry raised" in one.message]
    assert [one.levelname for one in said] == ["WARNING"] * 2  # once for each rank
    assert "of the program" in caplog.text


async def test_metrics(sdk: Sdk) -> None:
    reader = sdk[3]
    async with aiodist.local(2) as groups:
        for _ in range(3):
            await asyncio.gather(*(group.all_reduce(np.ones(4)) for group in groups))
    assert counts(reader, "aiodist.operation.size") == {"all_reduce": (6, 6 * 32)}
    number, seconds = counts(reader, "aiodist.operation.duration")["all_reduce"]
    assert (number, seconds > 0) == (6, True)


async def test_metrics_alone_and_nothing(sdk: Sdk) -> None:
    _, spans, meters, reader = sdk
    telemetry.enable(spans=False, meter_provider=meters)
    async with aiodist.local(1) as (group,):
        await group.barrier()
    assert counts(reader, "aiodist.operation.size")["barrier"][0] == 1
    telemetry.disable()
    async with aiodist.local(1) as (group,):
        await group.barrier()
        assert not group._actor.endpoint.recorder.observers
    assert counts(reader, "aiodist.operation.size")["barrier"][0] == 1
    assert spans.get_finished_spans() == ()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ImportError):
        telemetry.enable()
