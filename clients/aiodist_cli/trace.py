"""`aiodist trace`: what all ranks did, in one clock, for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from aiodist_cli.errors import CommandError
from aiodist_cli.trace_join import join

EPILOG = """A run on this host:

    aiodist run -n 4 --trace run.json train.py

Ranks that were started by anything else, on any host:

    AIODIST_TRACE=traces/ torchrun --nproc-per-node 4 train.py

    aiodist trace traces/ -o run.json

Exit status: 0, or 1 if there is no trace, or none that can be read; 2 for wrong usage.
"""


def trace(
    where: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR",
            help="Directories that AIODIST_TRACE named, or files in them; one for each host, say.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Where the trace goes.")
    ] = Path("trace.json"),
) -> None:
    """Join the files of traced ranks into one trace, for https://ui.perfetto.dev.

    Ranks write into the directory of AIODIST_TRACE when they leave their group, or end.
    """
    typer.echo(joined(_files(where), output), err=True)


def _files(where: Iterable[Path]) -> list[Path]:
    return [
        file
        for path in where
        for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])
    ]


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no trace of a rank: {error}") from error


def joined(files: Iterable[Path], output: Path) -> str:
    """Write the trace of all `files`, and describe it. Raises CommandError."""
    try:
        parts = [_read(file) for file in files]
        if not parts:
            raise CommandError("no rank of aiodist has written a trace")
        found = join(parts)
        output.write_text(json.dumps(found.trace), encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"no trace: {type(error).__name__}: {error}") from error
    hosts = (
        "one clock"
        if found.hosts == 1
        else f"clocks of {found.hosts} hosts, wrong by {found.error * 1e6:.0f} us at most"
    )
    return (
        f"{output}: {found.ranks} ranks, {found.operations} operations, {hosts}; open it at "
        "https://ui.perfetto.dev"
    )
