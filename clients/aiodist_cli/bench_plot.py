"""The plot of `aiodist bench`: time over size, both logarithmic, one line for each library."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiodist_cli.bench_cases import Result, format_seconds, format_size
from aiodist_cli.bench_report import groups, label

FORMATS = (".svg", ".png", ".pdf")

_STYLES = {"gloo": "#d1495b", "openmpi": "#66a182", "intelmpi": "#2e4057", "mpich": "#8d96a3"}
_OWN = ("#00798c", "#edae49", "#7d53de", "#003d5b")
_WIDTH, _HEIGHT = 5.2, 3.8


def problem(path: Path) -> str | None:
    """Why no plot can be written to `path`; None if it can."""
    if path.suffix not in FORMATS:
        return f"a plot is written as one of {', '.join(FORMATS)}, {path.name!r} is none of them"
    if importlib.util.find_spec("matplotlib") is None:
        return "a plot needs matplotlib: pip install 'aiodist[bench]'"
    return None


def lines(results: Sequence[Result]) -> dict[str, tuple[list[int], list[float]]]:
    """By column: sizes in bytes and median times in seconds, in the order of sizes."""
    found: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        if result.summary is not None:
            point = (result.case.nbytes, result.summary.median)
            found.setdefault(result.column, []).append(point)
    return {
        column: ([size for size, _ in sorted(points)], [time for _, time in sorted(points)])
        for column, points in found.items()
    }


def write(results: Sequence[Result], path: Path) -> None:
    """Write the plot, with one panel for each operation and number of ranks."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = list(groups(results))
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    # So that the same results give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "aiodist", "svg.fonttype": "none"}):
        figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flat
        for axes, (op, ranks, members) in zip(grid, panels, strict=False):
            _draw(axes, f"{op}, float32, {ranks} ranks", members)
        for axes in list(grid)[len(panels) :]:
            axes.set_visible(False)
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
        figure.savefig(path, metadata=metadata)


def _draw(axes: Any, title: str, results: Sequence[Result]) -> None:
    own = iter(_OWN * (len(results) // len(_OWN) + 1))
    for column, (sizes, times) in lines(results).items():
        colour = _STYLES.get(column) or next(own)
        mine = column.startswith("aiodist")
        axes.plot(
            sizes,
            times,
            marker="o",
            markersize=4,
            linewidth=2.2 if mine else 1.4,
            color=colour,
            label=label(column),
            zorder=3 if mine else 2,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({result.case.nbytes for result in results}))
    axes.xaxis.set_major_formatter(lambda size, _: format_size(int(size)))
    axes.yaxis.set_major_formatter(lambda seconds, _: _decade(seconds))
    axes.minorticks_off()
    axes.tick_params(axis="x", rotation=30)
    axes.grid(alpha=0.3)
    axes.set_title(title, fontsize=10)
    axes.set_ylabel("median time")
    axes.legend(fontsize=8, frameon=False)


def _decade(seconds: float) -> str:
    """A power of ten without decimals: "10 µs"."""
    number, unit = format_seconds(seconds).split()
    return f"{float(number):g} {unit}"
