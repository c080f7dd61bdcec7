"""`aiodist doctor`: checks whether aiodist can work on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aiodist_cli import checks
from aiodist_cli.checks import Check, Level

EPILOG = """    aiodist doctor --json

Exit status: 0 if aiodist can work here, 1 if something that it needs is missing.
"""

_STYLES: Mapping[Level, str] = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine: versions, cores, host identity, loopback, limits, environment."""
    results = checks.all_checks(os.environ)
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in results], indent=2))
    else:
        _show(results)
    raise typer.Exit(any(check.level == "fail" for check in results))


def _show(results: list[Check]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in results:
        table.add_row(f"[{_STYLES[check.level]}]{check.level}[/]", check.name, escape(check.found))
    console = Console()
    console.print(table)
    for check in results:
        if check.advice:
            # A command may have square brackets, and must not be broken, because users copy it.
            advice = f"[{_STYLES[check.level]}]{check.name}:[/] {escape(check.advice)}"
            console.print(advice, soft_wrap=True)
