"""The metrics of what a coordinator found."""

from __future__ import annotations

from typing import Any

import pytest
from averagers_shown import averager
from prometheus_client.parser import text_string_to_metric_families
from surveyed import channel, group, member, participant

from aiodist.coordinator.totals import Totals
from aiodist.membership.effects import Note
from aiodist.wire.counts import SECONDS, Counts, Payload, Times
from aiodist_server import metrics

LABELS = {"group": 'a "quoted" name'}


def health(*, state: tuple[float, int] | None = None) -> metrics.Health:
    """How a coordinator fares to which nothing has happened."""
    return metrics.Health(Totals(), state, metrics.Sums())


def found(**more: Any) -> dict[str, Any]:
    doing = {
        "busy": 2.5, "waits": [{"seconds": 1.0}, {"seconds": 4.0}],
        "collectives": 7, "sent": 2**53, "received": 30, "saved": 40,
    }  # fmt: skip
    group = {
        "name": LABELS["group"],
        "run_id": "r1",
        "epoch": 3,
        "members": [
            {"rank": 0, "silent": 0.5, "doing": doing},
            {"rank": 2, "silent": 9.0, "doing": None},
        ],
        "waiting": [{"rank": None}],
        "lost": {"1": "gone"},
        "findings": [{"culprits": [2, 5]}, {"culprits": [2]}],
        "store": {"keys": 4, "bytes": 100},
        "channel": "",
    }
    return {"draining": False, "groups": [group | more], "channels": []}


def samples(answer: dict[str, Any]) -> dict[tuple[str, str], float]:
    """By name and rank ("": of the group, or of all)."""
    body, content_type = metrics.exposition(answer, health())
    assert content_type.startswith("text/plain")
    text = body.decode()
    read = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(("aiodist_group", "aiodist_rank_", "aiodist_draining")):
                labels = dict(sample.labels)
                rank = labels.pop("rank", "")
                assert labels in (LABELS, {})
                assert family.documentation.endswith(".")
                read[sample.name, rank] = sample.value
    return read


def test_all_of_them() -> None:
    assert samples(found()) == {
        ("aiodist_draining", ""): 0,
        ("aiodist_groups", ""): 1,
        ("aiodist_group_epoch", ""): 3,
        ("aiodist_group_ranks", ""): 2,
        ("aiodist_group_waiting", ""): 1,
        ("aiodist_group_lost", ""): 1,
        ("aiodist_group_culprits", ""): 2,
        ("aiodist_group_store_keys", ""): 4,
        ("aiodist_group_store_bytes", ""): 100,
        ("aiodist_rank_answered", "0"): 1,
        ("aiodist_rank_answered", "2"): 0,
        ("aiodist_rank_silent_seconds", "0"): 0.5,
        ("aiodist_rank_silent_seconds", "2"): 9,
        ("aiodist_rank_loop_busy_seconds", "0"): 2.5,
        ("aiodist_rank_waits_seconds", "0"): 4,
        ("aiodist_rank_collectives_total", "0"): 7,
        ("aiodist_rank_sent_bytes_total", "0"): 2**53,
        ("aiodist_rank_received_bytes_total", "0"): 30,
        ("aiodist_rank_saved_bytes_total", "0"): 40,
    }


def test_a_group_that_forms() -> None:
    read = samples(found(epoch=None, members=[], lost={}, findings=[]))
    assert read["aiodist_group_epoch", ""] == 0
    assert not [name for name, rank in read if rank]


@pytest.mark.parametrize("name", ["process_resident_memory_bytes", "process_open_fds"])
def test_this_process_is_told_of_as_well(name: str) -> None:
    body, _ = metrics.exposition({"draining": True, "groups": [], "channels": []}, health())
    assert f"\n{name} " in body.decode()


@pytest.mark.parametrize(
    ("version", "format"), [("1.0.0", "application/openmetrics-text"), ("x.y.z", "text/plain")]
)
def test_the_format_is_the_one_that_was_asked_for(version: str, format: str) -> None:
    accept = f"application/openmetrics-text; version={version}"
    body, content_type = metrics.exposition(found(), health(), accept)
    assert content_type.startswith(f"{format}; version=")
    assert body.endswith(b"# EOF\n") == (version == "1.0.0")


def text_of(made: metrics.Health) -> list[str]:
    body, _ = metrics.exposition({"draining": False, "groups": [], "channels": []}, made)
    return [line for line in body.decode().splitlines() if not line.startswith("#")]


def test_what_has_happened_so_far() -> None:
    made = health(state=(12.5, 2))
    made.totals.note(Note("lost"))
    made.totals.note(Note("join refused"))
    made.totals.refused["token"] += 3
    counts = [0] * (len(SECONDS) + 1)
    counts[0], counts[2], counts[-1] = 5, 3, 1
    said = Counts(
        (1, 2, 3, 4), (Payload("tcp", 10, 20),), (Times("barrier", 0, tuple(counts), 60.5),)
    )
    made.totals.heard(7, said)
    lines = text_of(made)
    assert {
        'aiodist_events_total{event="lost"} 1.0',
        'aiodist_events_total{event="join_refused"} 1.0',
        'aiodist_events_total{event="aborted"} 0.0',
        'aiodist_refused_connections_total{reason="token"} 3.0',
        'aiodist_operation_failures_total{reason="timeout"} 2.0',
        'aiodist_operation_failures_total{reason="mismatch"} 4.0',
        'aiodist_payload_bytes_total{direction="sent",transport="tcp"} 10.0',
        'aiodist_payload_bytes_total{direction="received",transport="tcp"} 20.0',
        'aiodist_operation_seconds_bucket{le="1e-05",op="barrier",size="1KiB"} 5.0',
        'aiodist_operation_seconds_bucket{le="0.00016",op="barrier",size="1KiB"} 8.0',
        'aiodist_operation_seconds_bucket{le="+Inf",op="barrier",size="1KiB"} 9.0',
        'aiodist_operation_seconds_sum{op="barrier",size="1KiB"} 60.5',
        "aiodist_state_file_age_seconds 12.5",
        "aiodist_state_file_failures_total 2.0",
    } <= {*lines}
    assert any(line.startswith('aiodist_build_info{protocol="') for line in lines)


def test_without_a_state_file_nothing_is_said_of_it() -> None:
    assert not [line for line in text_of(health()) if "state_file" in line]


def of_channels(
    *channels: dict[str, Any], made: metrics.Health | None = None, **more: Any
) -> dict[str, float]:
    answer = {"draining": False, "groups": [], "channels": list(channels), **more}
    body, _ = metrics.exposition(answer, made or health())
    return {
        f"{sample.name}{sample.labels['channel']}": sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
        if sample.name.startswith("aiodist_channel_")
    }


def test_a_channel() -> None:
    out = participant(0, version=7, lag=0, behind=0.0, memory=2000, sent=900, changed=0.25)
    out["publishes"] = True
    takers = [
        participant(1, saved=70, chain=3, fallbacks=2),
        participant(2, version=None, lag=None, behind=8.5, memory=5, saved=7, fallbacks=1),
    ]
    silent = participant(3) | {"said": None}
    assert of_channels(channel(out, *takers, silent)) == {
        "aiodist_channel_versionpolicy": 7,
        "aiodist_channel_version_bytespolicy": 1000,
        "aiodist_channel_publisherspolicy": 1,
        "aiodist_channel_subscriberspolicy": 3,
        "aiodist_channel_silentpolicy": 1,
        "aiodist_channel_lag_versionspolicy": 2,
        "aiodist_channel_behind_secondspolicy": 8.5,
        "aiodist_channel_memory_bytespolicy": 2005,
        "aiodist_channel_published_bytes_totalpolicy": 900,
        "aiodist_channel_changed_ratiopolicy": 0.25,
        "aiodist_channel_chain_lengthpolicy": 3,
        "aiodist_channel_saved_bytes_totalpolicy": 77,
        "aiodist_channel_fallbacks_totalpolicy": 3,
    }
    bare = of_channels(channel(newest=None, nbytes=0))
    assert {name for name, value in bare.items() if value} == set()
    assert not [name for name in bare if "_version" in name and "lag" not in name]


def test_participants_of_channels_make_no_series() -> None:
    """Neither by their groups, each of which has a name that never comes again; nor do runs."""
    groups = [group(member(0), name=f"channel policy/{number}", channel="policy")
              for number in range(5)]  # fmt: skip
    one = of_channels(channel(participant(1)), groups=groups)
    many = of_channels(
        *[channel(*map(participant, range(9)), run_id=f"r{run}") for run in range(5)]
    )
    assert one.keys() == many.keys() - {
        f"aiodist_channel_{name}policy" for name in ("published_bytes_total", "changed_ratio")
    }
    answer = {"draining": False, "groups": groups, "channels": []}
    assert samples(answer) == {("aiodist_draining", ""): 0, ("aiodist_groups", ""): 0}


def test_no_label_names_a_run() -> None:
    """Two runs of one name, as one ends and the next begins: the newer one is told, once."""
    older, newer = found()["groups"][0], found()["groups"][0] | {"run_id": "r2", "epoch": 9}
    read = samples({"draining": False, "groups": [older, newer], "channels": []})
    assert read["aiodist_group_epoch", ""] == 9
    assert read["aiodist_groups", ""] == 2


def test_averagers() -> None:
    own = {"groups": [], "averagers": [averager()], "channels": [], "draining": False}
    body, _ = metrics.exposition(own, health())
    lines = set(body.decode().splitlines())
    assert {
        'aiodist_averager_members{averager="outer"} 3.0',
        'aiodist_averager_quorum{averager="outer"} 2.0',
        'aiodist_averager_rounds_total{averager="outer",part="encoder"} 7.0',
        'aiodist_averager_grace_seconds{averager="outer",part="encoder"} 0.5',
        'aiodist_averager_round_seconds{averager="outer",part="encoder"} 1.5',
        'aiodist_averager_contributors{averager="outer",part="encoder"} 2.0',
        'aiodist_averager_late_members{averager="outer",part="encoder"} 1.0',
        'aiodist_averager_late_seconds{averager="outer",part="encoder"} 3.0',
        'aiodist_averager_saved_bytes_total{averager="outer"} 3000.0',
    } <= lines


def test_counters_of_channels_do_not_fall() -> None:
    """When participants leave or are silent, and when new ones come."""
    made = health()

    def counted(*saved: int | None) -> list[float]:
        """`saved`: by each subscriber; None: it is silent."""
        out = participant(0, sent=100) | {"publishes": True}
        takers = [
            participant(number, saved=count, fallbacks=count)
            if count is not None
            else participant(number) | {"said": None}
            for number, count in enumerate(saved, 1)
        ]
        read = of_channels(channel(out, *takers), made=made)
        names = ("published_bytes", "saved_bytes", "fallbacks")
        return [read[f"aiodist_channel_{name}_totalpolicy"] for name in names]

    assert counted(10, 20, 30) == [100, 60, 60]
    assert counted(12, None, 31) == [100, 63, 63]
    assert counted(12, 25) == [100, 68, 68]  # the last one is gone
    assert counted(5, 25, 33) == [100, 70, 70]  # it is back; no member takes back what it has said
    read = of_channels(channel(participant(1, saved=12)), made=made)  # the publisher has left
    assert read["aiodist_channel_published_bytes_totalpolicy"] == 100
    assert of_channels(made=made) == {}


def test_counters_of_averagers_do_not_fall() -> None:
    made = health()

    def saved(members: list[dict[str, Any]]) -> str:
        own = {"groups": [], "channels": [], "draining": False}
        body, _ = metrics.exposition(own | {"averagers": [averager(members=members)]}, made)
        return next(x for x in body.decode().splitlines() if x.startswith("aiodist_averager_saved"))

    members = averager()["members"]
    whole = 'aiodist_averager_saved_bytes_total{averager="outer"} 3000.0'
    assert saved(members) == whole
    assert saved([members[0], members[1] | {"said": None}]) == whole
    assert saved([]) == whole
