"""What a coordinator and its members say, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import PlatformCollector, ProcessCollector
from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_GROUP = ("group", "run")
_RANK = (*_GROUP, "rank")


def exposition(found: Mapping[str, Any], accept: str = "") -> tuple[bytes, str]:
    """What `Coordinator.survey` found, and what this process needs of memory, time and files, in
    the format that a header Accept asks for; and the name of that."""
    registry = CollectorRegistry()
    registry.register(_Found(found))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Found(Collector):
    def __init__(self, found: Mapping[str, Any]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return families(self._found)


def families(found: Mapping[str, Any]) -> Iterator[Metric]:
    """The metrics of an answer of `Coordinator.survey`."""
    groups = found["groups"]
    yield GaugeMetricFamily(
        "aiodist_draining", "1 if the coordinator takes no new members.", float(found["draining"])
    )
    yield GaugeMetricFamily("aiodist_groups", "Groups that it serves.", len(groups))
    yield from _of_groups(groups)
    yield from _of_ranks(groups)


def _of_groups(groups: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    def gauge(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"aiodist_group_{name}", text, labels=_GROUP)

    epoch = gauge("epoch", "How often its members have changed; 0 while it forms.")
    ranks = gauge("ranks", "Ranks that are in it.")
    waiting = gauge("waiting", "Members that wait to join.")
    lost = gauge("lost", "Ranks that were lost in this epoch.")
    culprits = gauge("culprits", "Ranks that hold up others, see aiodist status.")
    keys = gauge("store_keys", "Keys in its store.")
    nbytes = gauge("store_bytes", "Bytes in its store.")
    for group in groups:
        labels = (group["name"], group["run_id"])
        epoch.add_metric(labels, group["epoch"] or 0)
        ranks.add_metric(labels, len(group["members"]))
        waiting.add_metric(labels, len(group["waiting"]))
        lost.add_metric(labels, len(group["lost"]))
        culprits.add_metric(labels, len({c for f in group["findings"] for c in f["culprits"]}))
        keys.add_metric(labels, group["store"]["keys"])
        nbytes.add_metric(labels, group["store"]["bytes"])
    yield from (epoch, ranks, waiting, lost, culprits, keys, nbytes)


def _of_ranks(groups: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    def gauge(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"aiodist_rank_{name}", text, labels=_RANK)

    def counter(name: str, text: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"aiodist_rank_{name}", text, labels=_RANK)

    answered = gauge("answered", "1 if it said within a second what it is doing.")
    silent = gauge("silent_seconds", "Since its last sign of life.")
    busy = gauge("loop_busy_seconds", "For so long its event loop has had no turn; 0: it turns.")
    waits = gauge("waits_seconds", "How long its oldest operation that is pending has waited.")
    collectives = counter("collectives", "Collectives that it has called.")
    sent = counter("sent_bytes", "Payload that it has sent, and shown in shared memory.")
    received = counter("received_bytes", "Payload that it has received, and read there.")
    for group in groups:
        for member in group["members"]:
            labels = (group["name"], group["run_id"], str(member["rank"]))
            doing = member["doing"]
            answered.add_metric(labels, float(doing is not None))
            silent.add_metric(labels, member["silent"])
            if doing is None:
                continue
            busy.add_metric(labels, doing["busy"])
            waits.add_metric(labels, max((wait["seconds"] for wait in doing["waits"]), default=0.0))
            collectives.add_metric(labels, doing["collectives"])
            sent.add_metric(labels, doing["sent"])
            received.add_metric(labels, doing["received"])
    yield from (answered, silent, busy, waits, collectives, sent, received)
