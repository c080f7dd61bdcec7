"""How commands fail."""

from __future__ import annotations

import typer

from aiodist.errors import printable
from aiodist.wire.address import parse_address


class CommandError(typer.Exit):
    """End the command with `status`, after `message` was printed to stderr in printable form."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(status)
        typer.echo("\n".join(map(printable, message.split("\n"))), err=True)


def usage_error(message: str, option: str | None = None) -> typer.BadParameter:
    """Wrong use of the command: typer shows it with the usage line and exits with status 2."""
    return typer.BadParameter(message, param_hint=option)


def usable_address(given: str, option: str) -> str:
    """Check and return the address of a coordinator. Raises a usage error if it is invalid."""
    try:
        parse_address(given)
    except ValueError as error:
        raise usage_error(str(error), option) from error
    return given
