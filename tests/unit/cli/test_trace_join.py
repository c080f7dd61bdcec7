"""What traced ranks have written, joined into one trace."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from aiodist_cli import trace, trace_join
from aiodist_cli.errors import CommandError
from aiodist_cli.trace_join import Clock

CALL = "all_reduce(SUM, float32[16384])"


def operation(
    op: str, start: float, end: float, *, seq: int | None = 0, tag: Any = None, peer: Any = None,
    state: str = "done", plans: tuple[str, ...] = ("pull_whole.all_reduce",),
) -> list[Any]:  # fmt: skip
    call = CALL if op == "all_reduce" else ""
    return [0, op, tag, seq, call, peer, 65536, start, end, state, "", list(plans)]


def part(rank: int, *operations: list[Any], machine: str = "m", **more: Any) -> dict[str, Any]:
    return {
        "aiodist": 3, "group": "g", "rank": rank, "pid": 10 + rank, "host": "h", "machine": machine,
        "name": "", "complete": True, "clock": {}, "events": [],
        "scopes": [["g", 1, rank, 2, "aa", ["tcp", None] if rank else [None, "tcp"]]],
        "operations": list(operations),
    } | more  # fmt: skip


def events(*parts: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """Those with these fields."""
    found = trace_join.join(parts).trace["traceEvents"]
    return [one for one in found if all(one.get(key) == wanted[key] for key in wanted)]


def slices(*parts: dict[str, Any]) -> list[tuple[int, str, float, float]]:
    return [
        (one["pid"], one["name"], one["ts"], one["dur"]) for one in events(*parts, ph="X")
    ]  # fmt: skip


def test_waiting_is_apart_from_moving() -> None:
    parts = part(0, operation("all_reduce", 1.0, 4.0)), part(1, operation("all_reduce", 3.0, 4.5))
    assert slices(*parts) == [
        (0, "all_reduce", 0.0, 3e6),
        (0, "waiting for rank 1", 0.0, 2e6),
        (0, "moving", 2e6, 1e6),
        (1, "all_reduce", 2e6, 1.5e6),
        (1, "moving", 2e6, 1.5e6),
    ]
    whole = events(*parts, name="all_reduce", ph="X", pid=0)[0]["args"]
    assert whole == {
        "group": "g", "epoch": 1, "rank": 0, "bytes": 65536, "state": "done", "number": 0,
        "call": CALL, "op": "SUM", "dtype": "float32", "algorithm": "pull_whole.all_reduce",
        "transport": "memory", "waited_us": 2e6, "moved_us": 1e6,
    }  # fmt: skip


def test_an_arrow_leads_from_who_came_last_to_those_who_waited() -> None:
    parts = part(0, operation("all_reduce", 1.0, 4.0)), part(1, operation("all_reduce", 3.0, 4.5))
    (begins,), (ends,) = events(*parts, ph="s"), events(*parts, ph="f")
    assert (begins["pid"], begins["ts"], ends["pid"], ends["ts"]) == (1, 2e6, 0, 2e6)
    assert begins["id"] == ends["id"]
    assert ends["bp"] == "e"  # to the slice that it ends in, and not to the next one


def test_no_arrow_leads_to_a_rank_that_gave_up_before() -> None:
    parts = (
        part(0, operation("barrier", 1.0, 2.0, state="failed")),
        part(1, operation("barrier", 3.0, 3.1, state="failed")),
    )
    assert not events(*parts, cat="flow")
    assert (0, "waiting for rank 1", 0.0, 1e6) in slices(*parts)


def test_what_a_rank_waited_for_that_has_no_trace_is_not_known() -> None:
    assert slices(part(0, operation("all_reduce", 1.0, 4.0))) == [(0, "all_reduce", 0.0, 3e6)]
    scopes = [["g", 1, rank, 3, "aa", [None, None, None]] for rank in range(2)]
    two_of_three = [
        part(rank, operation("all_reduce", 1.0 + rank, 4.0), scopes=[scopes[rank]])
        for rank in range(2)
    ]
    assert not events(*two_of_three, cat="flow")


def test_collectives_of_other_numbers_and_tags_have_nothing_to_do_with_each_other() -> None:
    tags = (None, "None", 0, "0", 1, "1")
    for one, tag in product(tags, tags):
        calls = [operation("all_reduce", 1.0, 2.0, tag=one), operation("barrier", 3.0, 4.0, seq=1)]
        others = [operation("all_reduce", 1.0, 2.0, tag=tag)]
        if one is not None and tag is not None:
            calls.append(operation("send", 5.0, 6.0, seq=None, tag=one, peer=1))
            others.append(operation("recv", 5.0, 6.0, seq=None, tag=tag, peer=0))
        arrows = len(others) if one == tag else 0
        assert len(events(part(0, *calls), part(1, *others), ph="s")) == arrows


def test_what_has_another_tag_has_another_name() -> None:
    tags = (None, "None", 0, "0")
    calls = [operation("barrier", float(n), n + 0.5, tag=tag) for n, tag in enumerate(tags)]
    calls.append(operation("send", 9.0, 9.5, seq=None, tag=0, peer=1))
    names = [name for _, name, *_ in slices(part(0, *calls))]
    assert names == ["barrier", "barrier 'None'", "barrier 0", "barrier '0'", "send"]


def test_a_clock_that_is_ahead_is_brought_into_the_common_one() -> None:
    """Rank 1 is on another host, whose clock shows 100 s more; the answers took 20 and 60 us."""
    parts = (
        part(0, operation("all_reduce", 1.0, 4.0), clock={"c": [[0.5, 50.0, 1e-5]]}),
        part(
            1, operation("all_reduce", 103.0, 104.5), machine="n",
            clock={"c": [[100.5, -50.0, 3e-5]]},
        ),
    )  # fmt: skip
    joined = trace_join.join(parts)
    assert (joined.ranks, joined.operations) == (2, 2)
    assert joined.clocks.startswith("clocks of 2 hosts, ")
    assert joined.error == pytest.approx(4e-5)
    assert [one[2] for one in slices(*parts)] == pytest.approx([0.0, 0.0, 2e6, 2e6, 2e6])


def test_ranks_of_one_host_have_one_clock() -> None:
    """However wrong each comparison is."""
    parts = (
        part(0, operation("all_reduce", 1.0, 4.0), clock={"c": [[0.5, 7.0, 0.5]]}),
        part(1, operation("all_reduce", 3.0, 4.5), clock={"c": [[0.6, 6.5, 0.1]]}),
    )
    assert trace_join.join(parts).error == 0.0
    assert [one[2] for one in slices(*parts)] == [0.0, 0.0, 2e6, 2e6, 2e6]


def test_one_host_needs_no_coordinators_clock() -> None:
    """Two that one host was compared with are seconds apart."""
    calls = [operation("all_reduce", t, t + 1, seq=int(t)) for t in (1.0, 11.0, 21.0)]
    clock = {"own": [[0.5, 0.0, 1e-5], [20.5, 0.0, 1e-5]], "outer": [[10.5, 9e4, 1e-5]]}
    joined = trace_join.join([part(0, *calls, clock=clock)])
    assert (joined.error, joined.clocks) == (0.0, "one clock")
    assert [one[2] for one in slices(part(0, *calls, clock=clock))] == [0.0, 1e7, 2e7]


HOSTS = {"l": 0.0, "m": 100.0, "n": 5000.0, "o": 7e4}
"""What the clock of each host shows at the second 0 of the coordinator "c"."""


def compared(host: str, coordinator: str, *times: float, error: float = 1e-5) -> dict[str, Any]:
    """What a rank of `host` writes of its clock."""
    ahead = {"c": 0.0, "d": 1e5, "e": -300.0}[coordinator]
    return {coordinator: [[HOSTS[host] + t, ahead - HOSTS[host], error] for t in times]}


def on(host: str, rank: int, *clocks: dict[str, Any]) -> dict[str, Any]:
    """A rank of `host` that calls at the second 1 + `rank` of "c"."""
    begins = HOSTS[host] + rank + 1.0
    clock = {name: rows for one in clocks for name, rows in one.items()}
    call = operation("barrier", begins, begins + 1, tag=rank)
    return part(rank, call, machine=host, host=host.upper(), clock=clock)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_host_with_comparisons_with_two_coordinators_leads_from_one_to_the_other(
    order: tuple[int, ...],
) -> None:
    """However many ranks have compared with which, and when."""
    hosts = [
        [compared("l", "c", 0.0, 20.0)],
        [compared("m", "c", 0.5, 10.0), compared("m", "d", 5.0)],
        [compared("n", "d", 6.0, 50.0, error=2e-5)],
    ]
    parts = [on("lmn"[one], rank, *hosts[one]) for rank, one in enumerate(order)]
    joined = trace_join.join(parts)
    assert [one[2] for one in slices(*parts)] == pytest.approx([0.0, 1e6, 2e6])
    assert joined.error == pytest.approx(1e-5 + 4e-5)
    assert joined.clocks == "clocks of 3 hosts, wrong by 50 us at most"


def test_comparisons_with_a_coordinator_that_is_far_away_make_no_time_worse() -> None:
    far = [compared(host, "d", 1.0, 8.0, 25.0, error=0.02) for host in "lm"]
    far[1]["d"][0][1] += 0.03  # which its error allows
    parts = [
        on(host, rank, far[rank], compared(host, "c", 0.0, 20.0)) for rank, host in enumerate("lm")
    ]
    assert trace_join.join(parts).error == pytest.approx(2e-5)
    assert [one[2] for one in slices(*parts)] == pytest.approx([0.0, 1e6])


def test_a_chain_of_coordinators() -> None:
    parts = [
        on("o", 0, compared("o", "e", 1.0)),
        on("n", 1, compared("n", "d", 1.0), compared("n", "e", 2.0)),
        on("m", 2, compared("m", "d", 1.0), compared("m", "c", 2.0)),
        on("l", 3, compared("l", "c", 1.0)),
    ]
    assert [one[2] for one in slices(*parts)] == pytest.approx([0.0, 1e6, 2e6, 3e6])


def test_hosts_that_no_comparison_leads_to_are_named() -> None:
    parts = [
        on("l", 0, compared("l", "c", 1.0)),
        on("m", 1, compared("m", "c", 1.0)),
        on("n", 2, compared("n", "d", 1.0)),
        on("o", 3),
    ]
    joined = trace_join.join(parts)
    told = "clocks of 4 hosts, wrong by 20 us at most, not comparable: N, O"
    assert (joined.clocks, joined.trace["otherData"]["clocks"]) == (told, told)
    assert [one[2] for one in slices(*parts)][:2] == pytest.approx([0.0, 1e6])


def test_a_coordinator_that_starts_again_goes_on_telling_the_time() -> None:
    """The clock of host "m" then drifts by 1 ms, which only comparisons with the second start
    show."""
    later = HOSTS["m"] + 1000.0
    drifted = {"d": [[later, 1e5 - HOSTS["m"] + 1e-3, 1e-5]]}
    parts = [
        on("l", 0, compared("l", "c", 0.0, 1.0), compared("l", "d", 1000.0)),
        on("m", 1, compared("m", "c", 0.0, 1.0), drifted),
    ]
    parts[1]["operations"] = [operation("barrier", later, later + 1)]
    assert [one[2] for one in slices(*parts)] == pytest.approx([0.0, 999_001_000.0])


def test_a_clock_that_drifts() -> None:
    clock = Clock([[0.0, 10.0, 1e-5], [1.0, 99.0, 1e-3], [100.0, 10.001, 2e-5]])
    assert clock.common(-5.0) == 5_000_000_000
    assert clock.common(50.0) == 60_000_500_000
    assert clock.common(200.0) == 210_001_000_000
    assert clock.error == 2e-5
    assert Clock([]).common(3.0) == 3_000_000_000


def test_slices_lie_within_each_other_to_the_nanosecond() -> None:
    """Otherwise Perfetto leaves them out."""
    times = [3.0 + n / 7e6 for n in range(3000)]
    calls = [
        [operation("all_reduce", times[n + rank], times[n + 2], seq=n) for n in range(0, 2998, 2)]
        for rank in (0, 1)
    ]
    tracks: dict[Any, list[tuple[int, int]]] = {}
    for one in events(part(0, *calls[0]), part(1, *calls[1]), ph="X"):
        start = round(one["ts"] * 1000)
        span = start, start + round(one["dur"] * 1000)
        tracks.setdefault((one["pid"], one["tid"]), []).append(span)
    assert len(tracks) == 2
    for spans in tracks.values():
        around: list[int] = []  # the ends of the slices around the next one
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1] <= start:
                around.pop()
            assert not around or end <= around[-1]
            around.append(end)


def test_messages_of_one_tag_are_matched_in_their_order() -> None:
    sends = [operation("send", t, t + 0.1, seq=None, tag=0, peer=1) for t in (1.0, 5.0)]
    sends.append(operation("send", 0.0, 0.1, seq=None, tag="other", peer=1))
    sends.append(operation("send", 0.5, 0.6, seq=None, tag=0, peer=1, state="cancelled"))
    receives = [operation("recv", t, t + 1, seq=None, tag=0, peer=0) for t in (4.5, 2.0)]
    found = slices(part(0, *sends), part(1, *receives))
    assert (1, "waiting for rank 0", 4.5e6, 0.5e6) in found
    assert [one for one in found if one[0] == 1 and one[1] != "recv"] == [
        (1, "waiting for rank 0", 4.5e6, 0.5e6),
        (1, "moving", 5e6, 0.5e6),
        (1, "moving", 2e6, 1e6),
    ]


@pytest.mark.parametrize("incomplete", [0, 1])
def test_messages_of_a_rank_that_kept_only_its_last_operations_are_not_matched(
    incomplete: int, tmp_path: Path
) -> None:
    """Otherwise the first kept receive would get the first kept message, which is another one."""
    sends = [operation("send", t, t + 0.1, seq=None, tag=0, peer=1) for t in (1.0, 2.0, 5.0)]
    receives = [operation("recv", t, t + 0.5, seq=None, tag=0, peer=0) for t in (1.1, 2.1, 4.9)]
    whole = [sends, receives]
    assert len(events(*(part(n, *calls) for n, calls in enumerate(whole)), ph="s")) == 3
    del whole[incomplete][0]
    barriers = [operation("barrier", 6.0 + rank, 8.0) for rank in range(2)]
    files = [tmp_path / f"{rank}.json" for rank in range(2)]
    for rank, file in enumerate(files):
        calls = [*whole[rank], barriers[rank]]
        file.write_text(json.dumps(part(rank, *calls, complete=rank != incomplete)))
    text = trace.joined(files, tmp_path / "run.json", "aiodist trace")
    found = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert [one["name"] for one in found if one["ph"] == "s"] == ["barrier"]
    waits = [one["ts"] for one in found if one["name"].startswith("waiting")]
    assert len(waits) == 1  # in the barrier
    assert f"; only the last operations of rank {incomplete} of g; open it at" in text


def test_an_ssend_waits_for_its_receive() -> None:
    sending = operation("ssend", 1.0, 3.0, seq=None, tag=0, peer=1)
    receiving = operation("recv", 2.0, 3.0, seq=None, tag=0, peer=0)
    assert (0, "waiting for rank 1", 0.0, 1e6) in slices(part(0, sending), part(1, receiving))


@pytest.mark.parametrize(
    ("op", "peer", "plans", "transport"),
    [
        ("all_reduce", None, ("pull_whole.all_reduce",), "memory"),
        ("all_reduce", None, ("team_whole.all_reduce",), "memory + tcp"),
        ("all_reduce", None, ("ring.all_reduce",), "tcp"),
        ("all_reduce", None, ("pull_whole.all_gather", "ring.all_reduce"), "memory + tcp"),
        ("broadcast", None, (), "tcp"),
        ("send", 1, (), "tcp"),
        ("send", 0, (), None),  # to itself
        ("recv", None, (), None),  # from anyone, and nothing has come
        ("get", 1, (), "tcp"),
        ("put", 0, (), None),
    ],
)
def test_over_what_it_went(op: str, peer: Any, plans: tuple[str, ...], transport: Any) -> None:
    (one,) = events(part(0, operation(op, 1.0, 2.0, peer=peer, plans=plans)), ph="X")
    assert one["args"].get("transport") == transport


def test_what_runs_at_the_same_time_is_on_tracks_beside_each_other() -> None:
    calls = [operation("all_reduce", t, t + 2.0, tag=t) for t in (1.0, 2.0, 3.0)]
    message = operation("send", 1.5, 1.6, seq=None, tag=0, peer=1)
    get = operation("get", 1.5, 1.6, seq=None, peer=1)
    found = events(part(0, *calls, message, get, events=[[1.0, "epoch 1"]]))
    tracks = {one["tid"]: one["args"]["name"] for one in found if one["name"] == "thread_name"}
    placed = [tracks[one["tid"]] for one in found if one["ph"] in "Xi"]
    assert placed == [
        "membership", "collectives", "collectives (2)", "collectives", "messages", "windows",
    ]  # fmt: skip
    kinds = [one["cat"] for one in found if one["ph"] == "X"]
    assert kinds == ["collectives", "collectives", "collectives", "messages", "windows"]


def test_thousands_may_run_at_the_same_time() -> None:
    waiting = [operation("recv", 1.0 + n, 5000.0, seq=None, tag=n, peer=1) for n in range(2001)]
    found = events(part(0, *waiting))
    names = [one["args"]["name"] for one in found if one["name"] == "thread_name"]
    numbered = [f"messages ({n})" for n in range(2, 2002)]
    assert names == ["messages", *numbered, "membership"]
    # Viewers sort them by one of these, or show the one with the number of the process first.
    threads = [one["tid"] for one in found if one["name"] == "thread_name"]
    assert threads == sorted(threads)
    assert min(threads) > 100_000
    order = [one["args"]["sort_index"] for one in found if one["name"] == "thread_sort_index"]
    assert order == threads
    assert len({one["tid"] for one in found if one["ph"] == "X"}) == 2001


def test_it_is_json_and_parts_of_other_versions_are_refused() -> None:
    json.dumps(trace_join.join([part(0, events=[[1.0, "epoch 1"]])]).trace)
    other = trace_join.join([part(0, complete=False)]).trace["otherData"]
    assert other["incomplete"] == "rank 0 of g"
    with pytest.raises(ValueError, match="version 3, not 2"):
        trace_join.join([part(0, aiodist=2)])


@pytest.mark.parametrize(
    "text",
    [
        '{"group":',
        "[1]",
        "null",
        "[" * 100_000,
        json.dumps(part(0, aiodist=2)),
        '{"aiodist": 3, "group": "g"}',
        json.dumps(part(0, clock={"c": [[1]]})),
        json.dumps(part(0, operation("send", 1.0, float("inf")))),
    ],
)
def test_a_file_that_is_no_trace_is_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(part(1)))
    bad.write_text(text)
    with pytest.raises(CommandError):
        trace.joined([good, bad], tmp_path / "run.json", "aiodist trace")
    assert capsys.readouterr().err.startswith(f"aiodist trace: no trace: {bad} is no trace of a ")


def test_each_part_in_a_directory_counts_once_and_a_joined_trace_does_not(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"g-rank{rank}-pid1-1.json").write_text(json.dumps(part(rank)))
    (tmp_path / "linked").symlink_to(tmp_path)
    paths = [tmp_path, tmp_path / "linked", tmp_path / "g-rank1-pid1-1.json"]
    for name, where in (("trace.json", paths[:1]), ("again.json", paths)):
        trace.trace(where, tmp_path / name)
    assert (tmp_path / "trace.json").read_text() == (tmp_path / "again.json").read_text()
