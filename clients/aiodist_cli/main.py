"""The `aiodist` command."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

COMMANDS = ("run", "coordinator", "status", "top", "trace", "bench", "doctor", "weights")
"""Each is a module of this package."""


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version as of

        typer.echo(f"aiodist {of('aiodist')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass


def app(first: str = "") -> typer.Typer:
    """Make the `aiodist` command.

    If its `first` argument names a command, the app has this one alone, because it takes long to
    import all of them.
    """
    made = typer.Typer(
        name="aiodist",
        help="Collective communication for async Python: start ranks, serve and inspect groups.",
        epilog="Each command has its own --help, with an example.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(_options)
    for name in [first] if first in COMMANDS else COMMANDS:
        module = importlib.import_module(f"aiodist_cli.{name}")
        if name == "weights":
            made.add_typer(module.app)
            continue
        # Everything after SCRIPT belongs to the script, even if it looks like an option.
        settings = {"allow_interspersed_args": False} if name == "run" else None
        made.command(epilog=module.EPILOG, context_settings=settings)(getattr(module, name))
    return made
