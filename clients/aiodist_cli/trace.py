"""`aiodist trace`: what all ranks did, in one clock, for Perfetto."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from aiodist_cli.errors import CommandError
from aiodist_cli.trace_join import Joined, join

EPILOG = """A run on this host:

    aiodist run -n 4 --trace run.json train.py

Ranks that were started by anything else, on any host:

    AIODIST_TRACE=traces/ torchrun --nproc-per-node 4 train.py

    aiodist trace traces/ -o run.json

Exit status: 0, or 1 if there is no trace, or none that can be read; 2 for wrong usage.
"""

_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What `join` raises for JSON that is no part of a trace."""


def trace(
    where: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR",
            help="Directories that AIODIST_TRACE named, or files in them: for example one "
            "directory for each host.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Where the trace goes.")
    ] = Path("trace.json"),
) -> None:
    """Join the files of traced ranks into one trace, for https://ui.perfetto.dev.

    Ranks write into the directory of AIODIST_TRACE when they leave their group, or end.
    """
    typer.echo(joined(_files(where), output, "aiodist trace"), err=True)


def _files(where: Iterable[Path]) -> list[Path]:
    """The files that are named, and those of ranks in the directories: joined traces may be there,
    too. A file that is reached by several paths counts once."""
    found = {
        os.path.realpath(file): file
        for path in where
        for file in (sorted(path.glob("*-rank*-pid*.json")) if path.is_dir() else [path])
    }
    return [*found.values()]


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no trace of a rank: {error}") from error


def _join(parts: Mapping[Path, Any]) -> Joined:
    """Join the contents of files. Raises ValueError that names the one that cannot be joined."""
    try:
        return join([*parts.values()])
    except _MALFORMED as error:
        for file, part in parts.items():
            try:
                join([part])
            except _MALFORMED as wrong:
                raise ValueError(f"{file} is no trace of a rank: {wrong!r}") from wrong
        raise ValueError(f"these files cannot be joined: {error!r}") from error


def joined(files: Iterable[Path], output: Path, command: str) -> str:
    """Write the trace of all `files`, and describe it. Raises CommandError in the name of
    `command`."""
    try:
        parts = {file: _read(file) for file in files}
        if not parts:
            raise CommandError(f"{command}: no rank of aiodist has written a trace")
        found = _join(parts)
        # In place, because the file may be a pipe or a mount, or have an owner and mode of its own.
        output.write_text(json.dumps(found.trace), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CommandError(f"{command}: no trace: {error}") from error
    last = f"; only the last operations of {found.incomplete}" if found.incomplete else ""
    return (
        f"{output}: {found.ranks} ranks, {found.operations} operations, {found.clocks}{last}; "
        "open it at https://ui.perfetto.dev"
    )
