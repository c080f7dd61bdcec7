"""What `aiodist bench` shows and writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from aiodist_cli import bench_plot, bench_report
from aiodist_cli.bench_cases import Case, Effort, Result, Summary
from aiodist_cli.bench_report import Report, markdown, tables

SMALL, LARGE = Case("all_reduce", 8, 2), Case("all_reduce", 1 << 20, 2)
OTHER = Case("broadcast", 8, 4)


def summary(median: float) -> Summary:
    return Summary(10, median, 2 * median, 1.5 * median)


RESULTS = [
    Result(SMALL, "aiodist", summary(1e-6)),
    Result(SMALL, "gloo", summary(160e-6), processor=90e-6),
    Result(LARGE, "aiodist", summary(50e-6)),
    Result(LARGE, "gloo", None, "Gloo: rank 1 died"),
    Result(OTHER, "aiodist", summary(2e-6)),
    Result(OTHER, "gloo", None, "Gloo: rank 1 died"),
]


def shown() -> str:
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        for table in tables(RESULTS):
            console.print(table)
    return capture.get()


def test_a_table_for_each_operation() -> None:
    text = shown()
    assert "all_reduce, float32, 2 ranks" in text
    assert "broadcast, float32, 4 ranks" in text
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    assert [row for row in rows if row] == [
        ["8 B", "aiodist", "1.00 µs", "2.00 µs", "1.50 µs", "–", "8.00 MB/s", "1"],
        ["", "Gloo", "160 µs", "320 µs", "240 µs", "90.0 µs", "50.0 kB/s", "160 ×"],
        ["1 MiB", "aiodist", "50.0 µs", "100 µs", "75.0 µs", "–", "21.0 GB/s", "1"],
        ["", "Gloo", "failed", "", "", "", "", ""],
        ["8 B", "aiodist", "2.00 µs", "4.00 µs", "3.00 µs", "–", "4.00 MB/s", "1"],
        ["", "Gloo", "failed", "", "", "", "", ""],
    ]


def test_markdown() -> None:
    assert markdown(RESULTS, [("gloo", "aiodist"), ("mpich", "aiodist")]).splitlines() == [
        "all_reduce, n=2",
        "",
        "| size | aiodist | Gloo | Gloo / aiodist |",
        "| --- | --- | --- | --- |",
        "| 8 B | 1.00 µs (2.00 µs, 1.50 µs) | 160 µs (320 µs, 240 µs) | 160 |",
        "| 1 MiB | 50.0 µs (100 µs, 75.0 µs) | failed | – |",
        "",
        "broadcast, n=4",
        "",
        "| size | aiodist | Gloo | Gloo / aiodist |",
        "| --- | --- | --- | --- |",
        "| 8 B | 2.00 µs (4.00 µs, 3.00 µs) | failed | – |",
    ]


def test_a_failure_is_told_once() -> None:
    report = Report(Effort(), RESULTS)
    assert report.failures == ["Gloo, all_reduce 1 MiB, n=2: Gloo: rank 1 died"]


def test_json() -> None:
    report = Report(Effort(2, 0.1), RESULTS[:1], {"aiodist": "aiodist 1"}, ["MPI: none"])
    found = json.loads(json.dumps(report.as_json({"cores": 2})))
    assert found == {
        "schema": bench_report.SCHEMA,
        "machine": {"cores": 2},
        "settings": {"rounds": 2, "seconds": 0.1, "iterations": None, "dtype": "float32"},
        "libraries": {"aiodist": "aiodist 1"},
        "notes": ["MPI: none"],
        "results": [
            {
                "op": "all_reduce",
                "nbytes": 8,
                "ranks": 2,
                "fill": False,
                "column": "aiodist",
                "count": 10,
                "median": 1e-6,
                "p99": 2e-6,
                "mean": pytest.approx(1.5e-6),
                "bandwidth": pytest.approx(8e6),
                "processor": None,
            }
        ],
    }


def test_machine() -> None:
    found = bench_report.machine()
    assert set(found) == {"cpu", "cores", "system", "python", "aiodist", "time"}
    assert found["cores"] >= 1


def test_lines_of_the_plot() -> None:
    backwards = [*reversed(RESULTS[:4])]
    assert bench_plot.lines(backwards) == {
        "gloo": ([8], [160e-6]),
        "aiodist": ([8, 1 << 20], [1e-6, 50e-6]),
    }


@pytest.mark.parametrize("suffix", bench_plot.FORMATS)
def test_the_plot_is_written(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    for path in (first, second):
        assert bench_plot.problem(path) is None
        bench_plot.write(RESULTS, path)
    assert first.read_bytes() == second.read_bytes()
    if suffix == ".svg":
        text = first.read_text()
        for words in ("all_reduce, float32, 2 ranks", "Gloo", "1 MiB", "100 µs"):
            assert f">{words}<" in text


def test_why_no_plot_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_plot.problem(Path("x.gif")) == (
        "a plot is written as one of .svg, .png, .pdf, 'x.gif' is none of them"
    )
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench_plot.problem(Path("x.svg")) == (
        "a plot needs matplotlib: pip install 'aiodist[bench]'"
    )
