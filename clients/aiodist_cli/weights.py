"""`aiodist weights`: channels of weights."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

import typer

from aiodist.channels.publisher import publisher
from aiodist.environment import token_in
from aiodist.errors import AiodistError
from aiodist.transports.certificates import contexts_in
from aiodist_cli import tls
from aiodist_cli.errors import CommandError, usable_address

app = typer.Typer(
    name="weights",
    help="Look after channels of weights.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

EPILOG = """    aiodist weights forget policy tcp://127.0.0.1:29500

Exit status: 0 if the channel begins anew, 1 if it does not, 2 for wrong usage.
"""


@app.callback()
def weights() -> None:
    """Look after channels of weights."""


@app.command(epilog=EPILOG)
def forget(
    channel: Annotated[str, typer.Argument(metavar="CHANNEL", help="The name of the channel.")],
    address: Annotated[
        str,
        typer.Argument(metavar="ADDRESS", help="The coordinator's, such as tcp://10.0.0.1:29500."),
    ],
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long to wait for the answer.")
    ] = 30.0,
    tls_ca: tls.Ca = None,
    tls_cert: tls.Cert = None,
    tls_key: tls.Key = None,
) -> None:
    """Have the version numbers of a channel begin anew.

    Numbers only grow otherwise, also if the channel is empty or its trainer starts again. This is
    refused while a publisher or subscribers live: end them first. A trainer can do the same with
    `aiodist.publisher(…, restart=True)`.

    If the coordinator asks for a token, put it into AIODIST_TOKEN.
    """
    usable_address(address, "ADDRESS")
    tls.use(tls_ca, tls_cert, tls_key)

    async def begin_anew() -> None:
        ssl, _ = contexts_in(os.environ, address)
        token = token_in(os.environ)
        async with publisher(
            channel, address=address, restart=True, timeout=timeout, token=token, ssl=ssl
        ):
            pass

    try:
        asyncio.run(begin_anew())
    except (AiodistError, TimeoutError, ValueError) as error:
        raise CommandError(f"aiodist weights forget: {error}") from error
    typer.echo(f"channel {channel}: the next version may have any number")
