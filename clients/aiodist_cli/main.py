"""The `aiodist` command."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from aiodist_cli import bench, coordinator, doctor, run, status, top, trace, weights

app = typer.Typer(
    name="aiodist",
    help="Collective communication for async Python: start ranks, serve and inspect groups.",
    epilog="Each command has its own --help, with an example.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"aiodist {importlib.metadata.version('aiodist')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass


# Everything after SCRIPT belongs to the script, even if it looks like an option.
app.command(epilog=run.EPILOG, context_settings={"allow_interspersed_args": False})(run.run)
app.command(epilog=coordinator.EPILOG)(coordinator.coordinator)
app.command(epilog=status.EPILOG)(status.status)
app.command(epilog=top.EPILOG)(top.top)
app.command(epilog=trace.EPILOG)(trace.trace)
app.command(epilog=bench.EPILOG)(bench.bench)
app.command(epilog=doctor.EPILOG)(doctor.doctor)
app.add_typer(weights.app)
