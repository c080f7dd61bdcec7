"""`aiodist coordinator`: the standalone coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from aiodist_cli.errors import CommandError, usage_error

EPILOG = """\
    aiodist coordinator --listen tcp://10.0.0.1:29500 --token-file token.txt

The first line on stdout is its address; with --http the second is the address of the page. The
first SIGTERM, SIGHUP or Ctrl-C lets groups end, a second one stops at once. Options that you leave
out are read from AIODIST_COORDINATOR_LISTEN and so on.

Exit status: 0 if a signal stopped it, 1 if it could not start, 2 for wrong usage, 3 if it could not
write its state file any more.
"""


class LogFormat(StrEnum):
    console = "console"
    json = "json"


def coordinator(
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Where to listen; port 0 takes a free one. [default: tcp://127.0.0.1:29500]",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the token that members must have."),
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure", help="Let other hosts in without a token."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate of a tls:// address.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its key, if it is in another file.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keeps groups and stores over restarts."),
    ] = None,
    force: Annotated[
        bool | None,
        typer.Option("--force", help="Start even if the last writes in --state are lost."),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve a page with what groups do, and metrics, at this address.",
        ),
    ] = None,
    drain: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="How long groups may take to end. [default: 30]"),
    ] = None,
    log_format: Annotated[
        LogFormat | None, typer.Option(help="Format of the log on stderr. [default: console]")
    ] = None,
) -> None:
    """Serve many groups, of jobs that come and go, until a signal comes."""
    given = {name: value for name, value in locals().items() if value is not None}
    try:
        import aiodist_server
    except ImportError as error:
        raise CommandError(
            f"aiodist coordinator: {error}. Install what it needs: pip install 'aiodist[server]'"
        ) from error
    try:
        config = aiodist_server.Config(**given)
    except ValueError as error:
        raise usage_error(_plain(error, given)) from error
    raise typer.Exit(aiodist_server.serve(config))


def _plain(error: ValueError, given: Mapping[str, Any]) -> str:
    """The messages of a pydantic error without its formatting."""
    problems: list[dict[str, Any]] = getattr(error, "errors", list)()
    texts = (
        ": ".join(
            [
                *(_source(field, given) for field in problem["loc"]),
                problem["msg"].removeprefix("Value error, "),
            ]
        )
        for problem in problems
    )
    return "; ".join(texts) or str(error)


def _source(field: str, given: Mapping[str, Any]) -> str:
    """The option that set this field if it was `given`, else the variable."""
    if field in given:
        return "--" + field.replace("_", "-")
    return f"AIODIST_COORDINATOR_{field.upper()}"
