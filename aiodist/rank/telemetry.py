"""Operations as spans and metrics of OpenTelemetry: `aiodist.telemetry.enable()`.

Nothing is reported by default, because a span takes longer than many operations. A program that has
set up OpenTelemetry for its requests may not want a span for each operation.
"""

from __future__ import annotations

import contextvars
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from aiodist.rank.actor import RankActor
from aiodist.recorder import MESSAGES, Add, AtOnce, Entry, Record, Recorder
from aiodist.transports.surroundings import tell_time_exactly
from aiodist.wire.counts import SECONDS
from aiodist.work import SENDS

if TYPE_CHECKING:
    from opentelemetry.metrics import Histogram, MeterProvider
    from opentelemetry.trace import Tracer, TracerProvider

__all__ = ["disable", "enable"]

log = logging.getLogger("aiodist.telemetry")


class _Sinks(NamedTuple):
    """The targets of reports. None: not asked for."""

    tracer: Tracer | None
    seconds: Histogram | None
    size: Histogram | None


class _Telemetry:
    """One for each process."""

    def __init__(self) -> None:
        self.sinks: _Sinks | None = None  # of ranks that join from now on; None: no reports


_settings = _Telemetry()


def enable(
    *,
    spans: bool = True,
    metrics: bool = True,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> None:
    """Report the operations of all ranks of this process that connect from now on.

    `spans`: one for each operation, from the call to its end, as a child of the current span at the
    call. `metrics`: the histograms ``aiodist.operation.duration`` (s) and
    ``aiodist.operation.size`` (By), by operation. `tracer_provider` and `meter_provider` default to
    the global ones. Needs the package opentelemetry-api (the extra `otel`), and the SDK to export
    anything. What it raises is logged once for each rank, and operations go on.

    Raises ImportError if opentelemetry-api is not installed.

    For example::

        aiodist.telemetry.enable(spans=False)  # the histograms alone
        aiodist.telemetry.disable()
    """
    tracer = seconds = size = None
    if spans:
        from opentelemetry import trace

        tracer = trace.get_tracer("aiodist", tracer_provider=tracer_provider)
    if metrics:
        from opentelemetry import metrics as otel_metrics

        meter = otel_metrics.get_meter("aiodist", meter_provider=meter_provider)
        seconds = meter.create_histogram(
            "aiodist.operation.duration",
            unit="s",
            description="How long operations took.",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        size = meter.create_histogram(
            "aiodist.operation.size", unit="By", description="Payload of operations, of one rank."
        )
    _settings.sinks = _Sinks(tracer, seconds, size)


def disable() -> None:
    """Report nothing of ranks that connect from now on."""
    _settings.sinks = None


def watch(actor: RankActor) -> None:
    """Report what `actor`, which has joined a group, does, if reports were asked for."""
    if _settings.sinks is not None:
        tell_time_exactly(actor.loop)
        recorder = actor.endpoint.recorder
        recorder.observe(_Reporter(_settings.sinks, recorder, actor.loop.time))


class _Reporter:
    """Reports the operations of one rank: an `aiodist.recorder.Observer`."""

    def __init__(self, sinks: _Sinks, recorder: Recorder, now: Callable[[], float]) -> None:
        self._sinks = sinks
        self._entry_of = recorder.entry_of
        self._now = now
        self._has_failed = False  # and that was logged

    def after(self, add: Add) -> Add:
        def added(one: AtOnce) -> None:
            add(one)
            self._report(self._entry_of(one))

        return added

    def ended(self, record: Record) -> None:
        # In the context of the call: the spans that are current there are its parents.
        context = contextvars.copy_context() if record.context is None else record.context
        context.run(self._report, record.entry(self._now()))

    def _report(self, entry: Entry) -> None:
        # The operation has a result by now, and other ranks have it. An exporter of the program
        # may fail without a harm to them.
        try:
            self._pass_on(entry)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                log.warning(
                    "OpenTelemetry raised when it heard of %s: operations go on, and this is logged"
                    " once",
                    entry.name,
                    exc_info=True,
                )

    def _pass_on(self, entry: Entry) -> None:
        sinks = self._sinks
        attributes: dict[str, Any] = {"aiodist.operation": entry.op}
        if entry.state != "done":
            attributes["error.type"] = entry.error.partition(":")[0] or entry.state
        if sinks.seconds is not None and sinks.size is not None:
            sinks.seconds.record(entry.seconds, attributes)
            sinks.size.record(entry.nbytes, attributes)
        if sinks.tracer is not None:
            _span(sinks.tracer, entry, attributes, self._now())


def _span(tracer: Tracer, entry: Entry, attributes: dict[str, Any], now: float) -> None:
    from opentelemetry.trace import SpanKind, Status, StatusCode

    more = {
        "group": entry.scope.group, "epoch": entry.scope.epoch, "rank": entry.scope.rank,
        "size": entry.scope.size, "bytes": entry.nbytes, "number": entry.seq, "peer": entry.peer,
        "tag": None if entry.tag is None else str(entry.tag), "call": entry.call or None,
        "algorithm": " + ".join(entry.plans) or None,
    }  # fmt: skip
    attributes |= {f"aiodist.{name}": value for name, value in more.items() if value is not None}
    kind = SpanKind.INTERNAL
    if entry.op in MESSAGES:
        kind = SpanKind.PRODUCER if entry.op in SENDS else SpanKind.CONSUMER
    began = time.time_ns() - int((now - entry.started) * 1e9)
    span = tracer.start_span(entry.op, kind=kind, attributes=attributes, start_time=began)
    if entry.state == "failed":
        span.set_status(Status(StatusCode.ERROR, entry.error))
    span.end(began + int(entry.seconds * 1e9))
