"""The metrics of what a coordinator found."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aiodist_server import metrics

LABELS = {"group": 'a "quoted" name', "run": "r1"}


def found(**more: Any) -> dict[str, Any]:
    doing = {
        "busy": 2.5, "waits": [{"seconds": 1.0}, {"seconds": 4.0}],
        "collectives": 7, "sent": 2**53, "received": 30,
    }  # fmt: skip
    group = {
        "name": LABELS["group"],
        "run_id": LABELS["run"],
        "epoch": 3,
        "members": [
            {"rank": 0, "silent": 0.5, "doing": doing},
            {"rank": 2, "silent": 9.0, "doing": None},
        ],
        "waiting": [{"rank": None}],
        "lost": {"1": "gone"},
        "findings": [{"culprits": [2, 5]}, {"culprits": [2]}],
        "store": {"keys": 4, "bytes": 100},
    }
    return {"draining": False, "groups": [group | more]}


def samples(answer: dict[str, Any]) -> dict[tuple[str, str], float]:
    """By name and rank ("": of the group, or of all)."""
    body, content_type = metrics.exposition(answer)
    assert content_type.startswith("text/plain")
    text = body.decode()
    read = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("aiodist_"):
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
    }


def test_a_group_that_forms() -> None:
    read = samples(found(epoch=None, members=[], lost={}, findings=[]))
    assert read["aiodist_group_epoch", ""] == 0
    assert not [name for name, rank in read if rank]


@pytest.mark.parametrize("name", ["process_resident_memory_bytes", "process_open_fds"])
def test_this_process_is_told_of_as_well(name: str) -> None:
    body, _ = metrics.exposition({"draining": True, "groups": []})
    assert f"\n{name} " in body.decode()


def test_the_format_is_the_one_that_was_asked_for() -> None:
    body, content_type = metrics.exposition(found(), "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
