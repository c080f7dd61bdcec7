"""How commands fail."""

from __future__ import annotations

import typer


class CommandError(typer.Exit):
    """Ends the command with `status` after `message` was printed to stderr."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(status)
        typer.echo(message, err=True)


def usage_error(message: str, option: str | None = None) -> typer.BadParameter:
    """A wrong use of the command: typer shows it with the usage line and exits with status 2."""
    return typer.BadParameter(message, param_hint=option)
