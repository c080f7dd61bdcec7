"""`python -m benchmarks figures`: what is found, beside what is asked."""

from __future__ import annotations

import argparse
import json
import re

import pytest

from aiodist_cli.bench_cases import Case, Effort, Result, Summary
from aiodist_cli.bench_peers import PeerMissing
from aiodist_cli.bench_report import Fact, Report
from aiodist_cli.bench_team import TeamError
from benchmarks import asked, hosts, suites
from benchmarks.__main__ import as_json, main, parser
from benchmarks.asked import HEAD, SHARED
from benchmarks.namespaces import parse_iperf3
from benchmarks.suites import SUITES

SMALL, MIDDLE = Case("all_reduce", 8, 2), Case("all_reduce", 1 << 20, 2)


def result(case: Case, column: str, median: float) -> Result:
    return Result(case, column, Summary(1, median, median, median))


def found_by(name: str, *results: Result, facts: tuple[Fact, ...] = ()) -> Report:
    return Report(Effort(), [*results], facts=[*facts], name=name)


def row(outcome: Report, case: str) -> dict[str, str]:
    (found,) = [row for row in asked.rows(outcome) if row[0] == case]
    return dict(zip(HEAD, found, strict=True))


@pytest.mark.parametrize(("error", "failed"), [(TeamError, True), (PeerMissing, False)])
def test_a_benchmark_that_fails_is_told_by_the_exit_status(
    error: type[Exception], failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(report: Report, progress: object) -> None:
        raise error("it died")

    monkeypatch.setattr(suites, "SUITES", {"small": fail})
    assert main(["small"]) == failed


def test_ratios_are_of_the_fastest_mpi() -> None:
    outcome = found_by("all_reduce")
    outcome.results = [
        result(SMALL, "aiodist", 4e-6),
        result(SMALL, "gloo", 100e-6),
        result(SMALL, "openmpi", 2e-6),
        result(SMALL, "intelmpi", 1e-6),
    ]
    found = row(outcome, "all_reduce 8 B, n=2")
    assert found["fastest MPI"].startswith("Intel MPI 1.00 µs")
    assert found["× Gloo (asked)"] == "25.0 (25)"
    assert found["× MPI (asked)"] == "0.25 (0.2)"
    assert found["met"] == "yes"
    outcome.results[0] = result(SMALL, "aiodist", 4.1e-6)
    assert row(outcome, "all_reduce 8 B, n=2")["met"] == "no"


def test_what_was_not_found_is_not_met() -> None:
    outcome = found_by("all_reduce", result(SMALL, "aiodist", 1e-6))
    assert row(outcome, "all_reduce 8 B, n=2")["met"] == "?"
    outcome.results.append(result(SMALL, "gloo", 1e-6))
    assert row(outcome, "all_reduce 8 B, n=2")["met"] == "no"
    outcome.results = [Result(SMALL, "aiodist", None, "it died")]
    found = row(outcome, "all_reduce 8 B, n=2")
    assert (found["aiodist: median (p99, mean)"], found["met"]) == ("failed", "?")


def test_memory_of_the_group_has_lines_only_where_there_is_such() -> None:
    outcome = found_by("all_reduce", result(MIDDLE, "aiodist", 1e-6))
    assert not [row for row in asked.rows(outcome) if "group.empty" in row[0]]
    outcome.results += [result(MIDDLE, SHARED, 1e-6), result(MIDDLE, "openmpi", 1.3e-6)]
    found = row(outcome, "all_reduce 1 MiB, n=2, group.empty")
    assert (found["× MPI (asked)"], found["met"]) == ("1.30 (1.2)", "yes")


def test_facts() -> None:
    outcome = found_by("memory", facts=(Fact("growth", "7 MiB", "at most 16 MiB", True),))
    assert list(asked.rows(outcome)) == [
        ("growth", "7 MiB (asked: at most 16 MiB)", "", "", "", "", "yes")
    ]
    assert next(asked.rows(found_by("x", facts=(Fact("a", "b"),))))[-1] == ""


def test_every_benchmark_with_cases_can_run() -> None:
    others = {"citizen", "ddp", "hosts", "memory", "resharding", "small", "wan", "tensor_parallel"}
    assert set(asked.ASKED) | others == set(SUITES)
    assert [str(case) for case in asked.cases_by_ranks("namespaces")[2]] == [
        "all_reduce 8 B, n=2",
        "all_reduce 1 MiB, n=2",
        "all_reduce 64 MiB, n=2",
    ]
    sizes = {n: len(cases) for n, cases in asked.cases_by_ranks("all_reduce").items()}
    assert sizes == {2: 5, 4: 5}


def test_iperf3() -> None:
    end = {"sum_received": {"bits_per_second": 8e9}}
    with pytest.raises(PeerMissing, match="iperf3 answered"):
        parse_iperf3(json.dumps({"end": end}))
    end["sum_received_bidir_reverse"] = {"bits_per_second": 16e9}
    assert parse_iperf3(json.dumps({"end": end})) == 1.5e9
    with pytest.raises(PeerMissing, match="iperf3 answered ''"):
        parse_iperf3("")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["figures", "--only", "citizen,x"], "there is no benchmark 'x': expected all_reduce"),
        (["citizen", "--plot", "x.gif"], "a plot is written as one of"),
        (["citizen", "--json", "no/such/x.json"], "--json: there is no folder"),
    ],
)
def test_wrong_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert problem in capsys.readouterr().err


def test_help_has_examples() -> None:
    text = parser().format_help()
    assert "python -m benchmarks figures --only" in text
    named = re.findall(r"^  python -m benchmarks ([a-z]\w*)", text, re.MULTILINE)
    assert "links" in named
    assert all(parser().parse_args([name]) for name in named)


def test_json() -> None:
    outcome = found_by("memory", facts=(Fact("a", "b"),))
    found = as_json(Report(Effort()), [outcome])
    assert found["benchmarks"] == {
        "memory": {
            "results": [],
            "facts": [{"name": "a", "found": "b", "asked": "", "met": None}],
        }
    }


def test_which_hosts_and_cases_are_measured() -> None:
    assert hosts.layouts_of("2,4x2") == [(2, 1), (4, 2)]
    assert hosts.cells_of("broadcast:8B,all_reduce:64KiB") == [
        ("broadcast", 8),
        ("all_reduce", 64 * 1024),
    ]
    assert [op for op, _ in hosts.cells_of("all_gather")] == ["all_gather"] * 4


@pytest.mark.parametrize("text", ["", "1", "4x0", "x2", "4xb", "-4"])
def test_what_are_no_hosts(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected as in 4x2"):
        hosts.layouts_of(text)


def test_what_are_no_cases() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no operation 'all_reduc'"):
        hosts.cells_of("all_reduc:8B")
    with pytest.raises(argparse.ArgumentTypeError):
        hosts.cells_of("broadcast:much")
