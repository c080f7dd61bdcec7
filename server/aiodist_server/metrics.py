"""What a coordinator and its members tell, in the text format of Prometheus."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from prometheus_client import PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from aiodist.coordinator.totals import Totals
from aiodist.wire.counts import SECONDS
from aiodist.wire.limits import PROTOCOL_VERSION

Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)

_GROUP = ("group",)
_RANK = (*_GROUP, "rank")

SIZE_NAMES = ("1KiB", "64KiB", "1MiB", "64MiB", "more")
"""The classes of `aiodist.wire.counts.SIZES`, as labels."""


KEPT = 1000
"""The members of a label whose last counts are known. One that is gone may come back, and answers
may overtake each other."""


class Sums:
    """Sums of counts that members report since they joined.

    A sum includes members that are gone or silent, because a counter must not fall. What a member
    did after the last request for metrics is not in it.
    """

    def __init__(self) -> None:
        # By metric and label: the sum, and the last count of each member. Those that are gone come
        # first.
        self._known: dict[str, dict[str, tuple[int, dict[str, int]]]] = {}

    def of(self, metric: str, counts: Mapping[str, Mapping[str, int | None]]) -> dict[str, int]:
        """Return the sums of a metric by label.

        `counts`: of the members that are there, by label and the id of the member; None for a
        silent one. Labels that are not among them are forgotten.
        """
        before = self._known.get(metric, {})
        found = self._known[metric] = {}
        for label, members in counts.items():
            total, last = before.get(label, (0, {}))
            for who, count in members.items():
                known = last.pop(who, 0)
                last[who] = max(count or 0, known)  # behind those that are gone
                total += last[who] - known
            while len(last) > max(KEPT, len(members)):
                del last[next(iter(last))]
            if last or total:
                found[label] = total, last
        return {label: total for label, (total, _) in found.items()}


class Health(NamedTuple):
    """What a coordinator knows of itself.

    `totals` are its own counts, `state` is its `Coordinator.state_health`, and `sums` are those of
    what its members have told.
    """

    totals: Totals
    state: tuple[float, int] | None
    sums: Sums


def exposition(found: Mapping[str, Any], health: Health, accept: str = "") -> tuple[bytes, str]:
    """Return all metrics in a format of the header Accept, and the name of that format.

    They are what `Coordinator.survey` found, the coordinator's own health, and memory, time and
    files of this process. A header that makes no sense gets the plain text format.
    """
    registry = CollectorRegistry()
    registry.register(_Found(found, health))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # it compares versions that are no numbers
        encode, content_type = choose_encoder("")
    return encode(registry), content_type


class _Found(Collector):
    def __init__(self, found: Mapping[str, Any], health: Health) -> None:
        self._found = found
        self._health = health

    def collect(self) -> Iterable[Metric]:
        yield from families(self._found, self._health.sums)
        yield from _of_totals(self._health.totals)
        yield from _of_itself(self._health.state)


def families(found: Mapping[str, Any], sums: Sums) -> Iterator[Metric]:
    """Yield the metrics of an answer of `Coordinator.survey`."""
    # No label names a run, because each run would make series of its own, which stay as long as the
    # metrics are kept. If one run ends as the next of its name begins, the newer one is told. No
    # label names a participant of a channel either, because each is a group with a new name.
    plains = [
        group for group in found["groups"] if not group["channel"] and not group.get("averager")
    ]
    groups = {group["name"]: group for group in plains}.values()
    channels = {channel["name"]: channel for channel in found["channels"]}.values()
    yield GaugeMetricFamily(
        "aiodist_draining", "1 if the coordinator takes no new members.", float(found["draining"])
    )
    yield GaugeMetricFamily("aiodist_groups", "Groups that it serves.", len(plains))
    yield from _of_groups(groups)
    yield from _of_ranks(groups)
    yield from _of_channels(channels, sums)
    averagers = {one["name"]: one for one in found.get("averagers", ())}.values()
    yield from _of_averagers(averagers, sums)


def _family(
    kind: type[Family], prefix: str, labels: tuple[str, ...], name: str, text: str, *more: str
) -> Family:
    return kind(f"aiodist_{prefix}{name}", text, labels=(*labels, *more))


def _of_groups(groups: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    gauge = partial(_family, GaugeMetricFamily, "group_", _GROUP)
    epoch = gauge("epoch", "How often its members have changed; 0 while it forms.")
    ranks = gauge("ranks", "Ranks that are in it.")
    waiting = gauge("waiting", "Members that wait to join.")
    lost = gauge("lost", "Ranks that were lost in this epoch.")
    culprits = gauge("culprits", "Ranks that hold up others, see aiodist status.")
    keys = gauge("store_keys", "Keys in its store.")
    nbytes = gauge("store_bytes", "Bytes in its store.")
    for group in groups:
        labels = (group["name"],)
        epoch.add_metric(labels, group["epoch"] or 0)
        ranks.add_metric(labels, len(group["members"]))
        waiting.add_metric(labels, len(group["waiting"]))
        lost.add_metric(labels, len(group["lost"]))
        culprits.add_metric(labels, len({c for f in group["findings"] for c in f["culprits"]}))
        keys.add_metric(labels, group["store"]["keys"])
        nbytes.add_metric(labels, group["store"]["bytes"])
    yield from (epoch, ranks, waiting, lost, culprits, keys, nbytes)


def _of_ranks(groups: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    gauge = partial(_family, GaugeMetricFamily, "rank_", _RANK)
    counter = partial(_family, CounterMetricFamily, "rank_", _RANK)
    answered = gauge("answered", "1 if it said within a second what it is doing.")
    silent = gauge("silent_seconds", "Since its last sign of life.")
    busy = gauge("loop_busy_seconds", "How long its event loop has had no turn; 0: it turns.")
    waits = gauge("waits_seconds", "How long its oldest operation that is pending has waited.")
    collectives = counter("collectives", "Collectives that it has called.")
    sent = counter("sent_bytes", "Payload that it has sent, and shown in shared memory.")
    received = counter("received_bytes", "Payload that it has received, and read there.")
    saved = counter("saved_bytes", "What it did not have to send, because of codecs.")
    for group in groups:
        for member in group["members"]:
            labels = (group["name"], str(member["rank"]))
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
            saved.add_metric(labels, doing["saved"])
    yield from (answered, silent, busy, waits, collectives, sent, received, saved)


def _of_channels(channels: Iterable[Mapping[str, Any]], sums: Sums) -> Iterator[Metric]:
    gauge = partial(_family, GaugeMetricFamily, "channel_", ("channel",))

    def counter(name: str, text: str, field: str, *, publishes: bool) -> CounterMetricFamily:
        counts = {
            channel["name"]: {
                one["id"]: one["said"] and one["said"][field]
                for one in channel["participants"]
                if one["publishes"] is publishes
            }
            for channel in channels
        }
        return _summed(f"aiodist_channel_{name}", text, "channel", sums, counts)

    version = gauge("version", "The newest version that it has.")
    nbytes = gauge("version_bytes", "The size of that.")
    publishers = gauge("publishers", "Its publishers that give a sign of life.")
    subscribers = gauge("subscribers", "Its subscribers.")
    silent = gauge("silent", "Participants that give no sign of life, and are no loss yet.")
    lag = gauge("lag_versions", "By how much the oldest version of a subscriber is lower.")
    behind = gauge(
        "behind_seconds", "The longest time that a subscriber has lacked a newer version."
    )
    memory = gauge("memory_bytes", "Memory that versions take, on all hosts.")
    sent = counter("published_bytes", "What its publisher has sent.", "sent", publishes=True)
    changed = gauge("changed_ratio", "The share of the newest version that has changed.")
    chain = gauge(
        "chain_length", "By how many differences a subscriber got its last version, at most."
    )
    saved = counter(
        "saved_bytes",
        "What did not have to come to subscribers, because differences came.",
        "saved",
        publishes=False,
    )
    fallbacks = counter(
        "fallbacks",
        "Chunks that came whole, because differences did not bring them.",
        "fallbacks",
        publishes=False,
    )
    for channel in channels:
        labels = (channel["name"],)
        here = channel["participants"]
        heard = [one for one in here if one["said"] is not None]
        takers = [one["said"] for one in heard if not one["publishes"]]
        givers = [one["said"] for one in heard if one["publishes"]]
        if channel["newest"] is not None:
            version.add_metric(labels, channel["newest"])
            nbytes.add_metric(labels, channel["nbytes"])
        publishers.add_metric(labels, len(givers))
        subscribers.add_metric(labels, len([one for one in here if not one["publishes"]]))
        silent.add_metric(labels, len(here) - len(heard))
        # Only of subscribers that have a version. For the others, the seconds tell how far they are
        # behind.
        lags = [said["lag"] for said in takers if said["lag"] is not None]
        lag.add_metric(labels, max(lags, default=0))
        behind.add_metric(labels, max((said["behind"] for said in takers), default=0.0))
        memory.add_metric(labels, sum(one["said"]["memory"] for one in heard))
        chain.add_metric(labels, max((said["chain"] for said in takers), default=0))
        if givers:
            changed.add_metric(labels, max(said["changed"] for said in givers))
    yield from (version, nbytes, publishers, subscribers, silent, lag, behind, memory, sent)
    yield from (changed, chain, saved, fallbacks)


def _summed(
    name: str, text: str, label: str, sums: Sums, counts: Mapping[str, Mapping[str, int | None]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=(label,))
    for value, total in sums.of(name, counts).items():
        family.add_metric((value,), total)
    return family


def _of_averagers(averagers: Iterable[Mapping[str, Any]], sums: Sums) -> Iterator[Metric]:
    gauge = partial(_family, GaugeMetricFamily, "averager_", ("averager",))
    members = gauge("members", "Members that take part.")
    quorum = gauge("quorum", "The fewest members that must contribute to a round.")
    counter = partial(_family, CounterMetricFamily, "averager_", ("averager",))
    rounds = counter("rounds", "Rounds that are recorded.", "part")
    grace = gauge("grace_seconds", "How long a round waits after its quorum.", "part")
    seconds = gauge("round_seconds", "How long the last round took.", "part")
    contributors = gauge("contributors", "Members whose contributions it has.", "part")
    late = gauge("late_members", "Members that were late for one of its last rounds.", "part")
    behind = gauge("late_seconds", "By how much the latest of them was late.", "part")
    counts = {
        averager["name"]: {
            one["id"]: one["said"] and one["said"]["saved"] for one in averager["members"]
        }
        for averager in averagers
    }
    saved = _summed(
        "aiodist_averager_saved_bytes",
        "What its members did not have to send, because of its codec.",
        "averager",
        sums,
        counts,
    )
    for averager in averagers:
        name = averager["name"]
        members.add_metric((name,), len(averager["members"]))
        quorum.add_metric((name,), averager["quorum"])
        for part in averager["parts"]:
            labels = (name, part["part"])
            rounds.add_metric(labels, part["round"])
            grace.add_metric(labels, part["grace"])
            if part["rounds"]:
                last = part["rounds"][-1]
                seconds.add_metric(labels, last["seconds"])
                contributors.add_metric(labels, len(last["contributors"]))
            late.add_metric(labels, len(part["late"]))
            behind.add_metric(labels, max((by for _, by in part["late"].values()), default=0.0))
    yield from (members, quorum, rounds, grace, seconds, contributors, late, behind, saved)


def _of_totals(totals: Totals) -> Iterator[Metric]:
    """Yield what has happened since the coordinator started, in all groups."""
    counter = partial(_family, CounterMetricFamily, "", ())
    events = counter("events", "What happened to groups and their ranks.", "event")
    for event, count in totals.events.items():
        events.add_metric((event.replace(" ", "_"),), count)
    refused = counter("refused_connections", "Connections that were not let in.", "reason")
    for reason, count in totals.refused.items():
        refused.add_metric((reason,), count)
    failures = counter("operation_failures", "Operations of ranks that have failed.", "reason")
    for reason, count in totals.failures.items():
        failures.add_metric((reason,), count)
    labels = ("transport", "direction")
    payload = counter("payload_bytes", "Payload of all ranks.", *labels)
    for direction, moved in (("sent", totals.sent), ("received", totals.received)):
        for transport, nbytes in moved.items():
            payload.add_metric((transport, direction), nbytes)
    seconds = HistogramMetricFamily(
        "aiodist_operation_seconds",
        "How long operations took, since members were first asked.",
        labels=("op", "size"),
    )
    for (op, size), latency in totals.latencies.items():
        bounds = [*(f"{bound:g}" for bound in SECONDS), "+Inf"]
        buckets = zip(bounds, accumulate(latency.counts), strict=True)
        seconds.add_metric((op, SIZE_NAMES[size]), list(buckets), latency.seconds)
    yield from (events, refused, failures, payload, seconds)


def _of_itself(state: tuple[float, int] | None) -> Iterator[Metric]:
    """Yield the versions of the coordinator, and the health of its state file."""
    build = GaugeMetricFamily(
        "aiodist_build_info", "What runs here.", labels=("version", "protocol", "python")
    )
    version = importlib.metadata.version("aiodist")
    build.add_metric((version, str(PROTOCOL_VERSION), platform.python_version()), 1.0)
    yield build
    if state is not None:
        age, failures = state
        name = "aiodist_state_file"
        yield GaugeMetricFamily(f"{name}_age_seconds", "Since it was written last.", age)
        text = "How often it could not be made shorter."
        yield CounterMetricFamily(f"{name}_failures", text, failures)
