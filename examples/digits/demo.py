"""``make demo``: a coordinator, four ranks that train on handwritten digits, and the result.

Everything runs on this machine, over loopback, with the commands that a user would type.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

RANKS = 4
TRAIN = Path(__file__).with_name("train.py")
STEP = re.compile(r"\[0\] step (\d+)/(\d+) loss ([\d.]+)")

console = Console()


def aiodist(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "aiodist_cli", *arguments]


@contextmanager
def coordinator() -> Iterator[str]:
    """A coordinator in a process of its own: its address."""
    command = aiodist("coordinator", "--listen", "tcp://127.0.0.1:0")
    env = os.environ | {"AIODIST_COORDINATOR_LOG_LEVEL": "warning"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            greeting = process.stdout.readline()  # listening on ADDRESS
            if not greeting:
                sys.exit("the coordinator did not start")
            yield greeting.split()[-1]
        finally:
            process.terminate()


def train(address: str, report: Path) -> int:
    """Run the ranks and show how far they are; the exit status of the run."""
    command = aiodist("run", "-n", str(RANKS), "--coordinator", address)
    command += [str(TRAIN), "--report", str(report)]
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    with progress, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        task = progress.add_task("starting the ranks", total=None)
        for line in process.stdout:
            if match := STEP.match(line):
                step, total, loss = match.groups()
                progress.update(
                    task, completed=int(step), total=int(total), description=f"loss {loss}"
                )
            else:
                progress.console.print(line.rstrip(), markup=False, highlight=False)
    return process.returncode


def show(report: dict[str, float]) -> None:
    table = Table(title="handwritten digits, data-parallel", title_justify="left")
    table.add_column("result")
    table.add_column("value", justify="right")
    table.add_row("ranks", f"{report['ranks']}")
    table.add_row("parameters", f"{report['parameters']:,}")
    table.add_row("test accuracy", f"[bold green]{report['accuracy']:.1%}")
    table.add_row("largest difference to a single process", f"{report['difference']:.1e}")
    table.add_row("steps/s", f"{report['steps'] / report['seconds']:.0f}")
    share = report["communicating"] / report["seconds"]
    table.add_row("time in communication, waiting included", f"{share:.0%}")
    table.add_row("sent by rank 0", f"{report['sent'] / 2**20:.1f} MiB")
    table.add_row("received by rank 0", f"{report['received'] / 2**20:.1f} MiB")
    console.print(table)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, coordinator() as address:
        console.print(f"coordinator at {address}; starting {RANKS} ranks …", highlight=False)
        report = Path(folder, "report.json")
        status = train(address, report)
        if report.exists():
            show(json.loads(report.read_text()))
    if status == 0:
        console.print("[green]The weights equal those of a single process on the same batches.")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
