"""How commands fail."""

from __future__ import annotations

import typer

from aiodist.wire.address import parse_address


def printable(text: str) -> str:
    """What may come from the network, without what a terminal obeys: escape sequences, and what
    turns the direction of text; in one line."""
    return "".join([char if char.isprintable() else "?" for char in text])


class CommandError(typer.Exit):
    """Ends the command with `status` after `message`, made printable, was printed to stderr."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(status)
        typer.echo("\n".join(map(printable, message.split("\n"))), err=True)


def usage_error(message: str, option: str | None = None) -> typer.BadParameter:
    """A wrong use of the command: typer shows it with the usage line and exits with status 2."""
    return typer.BadParameter(message, param_hint=option)


def usable_address(given: str, option: str) -> str:
    """The address of a coordinator, as it was given. Raises a usage error for what is none."""
    try:
        parse_address(given)
    except ValueError as error:
        raise usage_error(str(error), option) from error
    return given
