"""`aiodist weights`: channels of weights."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table

from aiodist.channels.publisher import publisher
from aiodist.channels.subscriber import subscriber
from aiodist.control.client import ControlClient
from aiodist.environment import token_in
from aiodist.errors import AiodistError
from aiodist.transports.certificates import contexts_in
from aiodist_cli import tls
from aiodist_cli.errors import CommandError, run_until_signal, usable_address, usage_error
from aiodist_cli.files import push as pushing
from aiodist_cli.files.checkpoints import Watch
from aiodist_cli.files.folder import Folder, FolderError
from aiodist_cli.files.pull import FailedError, Pulling
from aiodist_cli.files.push import Pushing
from aiodist_cli.status import Address, ask, plain
from aiodist_cli.tables import console

app = typer.Typer(
    name="weights",
    help="Move files of weights, and look after channels.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

PUSH_EPILOG = """    aiodist weights push policy checkpoints/ tcp://10.0.0.1:29500 --watch

Exit status: 0 if a signal stopped it or `--until` is reached, 1 if it failed, 2 for wrong usage.
"""

PULL_EPILOG = """    aiodist weights pull policy tcp://10.0.0.1:29500 --to models/policy --follow

Exit status: 0 if the folder has the version (with `--follow`: if a signal stopped it), 1 if it
failed, 2 for wrong usage, 128 + n if signal n came before the version.
"""

LIST_EPILOG = """    aiodist weights list tcp://10.0.0.1:29500

Exit status: 0 if the coordinator answered, 1 if it did not or refused, 2 for wrong usage.
"""

FORGET_EPILOG = """    aiodist weights forget policy tcp://127.0.0.1:29500

Exit status: 0 if the channel begins anew, 1 if it does not, 2 for wrong usage.
"""

Channel = Annotated[str, typer.Argument(metavar="CHANNEL", help="The name of the channel.")]
Timeout = Annotated[
    float,
    typer.Option(min=0.1, metavar="SECONDS", help="How long to wait for the coordinator at first."),
]
AnswerTimeout = Annotated[
    float, typer.Option(min=0.1, metavar="SECONDS", help="How long to wait for the answer.")
]
AllFiles = Annotated[
    bool,
    typer.Option("--all-files", help="Include files that can run code: .py, pickles, libraries."),
]

FAILURES = (
    *(AiodistError, FolderError, FailedError),
    *(TimeoutError, ValueError, OSError, MemoryError),
)
"""Errors that end a command with status 1 and a line that says why."""


@app.callback()
def weights() -> None:
    """Move files of weights, and look after channels."""


@app.command(epilog=PUSH_EPILOG)
def push(
    channel: Channel,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE_OR_DIR",
            help="A file, the folder of a checkpoint, or a folder of such folders.",
        ),
    ],
    address: Address,
    version: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Its number. [default: the newest and one more]"),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Publish each new checkpoint, as soon as it is complete."),
    ] = False,
    until: Annotated[
        int | None,
        typer.Option(min=1, metavar="N_HOSTS", help="End when so many hosts have the version."),
    ] = None,
    all_files: AllFiles = False,
    timeout: Timeout = 30.0,
    tls_ca: tls.Ca = None,
    tls_cert: tls.Cert = None,
    tls_key: tls.Key = None,
) -> None:
    """Publish a file or a checkpoint to a channel, and serve it until a signal comes.

    Files arrive byte for byte. A checkpoint is complete when all shards of its index are there,
    each is as long as its header says, and no file has changed for 2 seconds. Hidden files are left
    out. Files that can run code are sent only with `--all-files` on both sides.

    If the coordinator asks for a token, put it into AIODIST_TOKEN.
    """
    if watch and until is not None:
        raise usage_error("a push with --watch has no last version: leave one out", "--until")

    async def run() -> None:
        pushing.check_source(source, all_files=all_files, watch=watch)
        async with publisher(channel, address=address, timeout=timeout, **_options(address)) as out:
            pusher = Pushing(out, source, all_files=all_files, first=version)
            clock = asyncio.get_running_loop().time
            if watch:
                await pusher.watch(Watch(), clock)
            else:
                number, content = await pusher.once(Watch(), clock)
                await pushing.serve(out, number, content, math.inf if until is None else until)

    _run("push", run(), address, (tls_ca, tls_cert, tls_key), serves=True)


@app.command(epilog=PULL_EPILOG)
def pull(
    channel: Channel,
    address: Address,
    to: Annotated[Path, typer.Option(metavar="DIR", help="The folder, which is replaced.")],
    follow: Annotated[
        bool, typer.Option("--follow", help="Stay, and take each newer version.")
    ] = False,
    max_bytes: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Take no version of more bytes. [default: any]"),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--exec",
            metavar="CMD",
            help="Run this in a shell for each version, with AIODIST_VERSION and AIODIST_DIR.",
        ),
    ] = None,
    all_files: AllFiles = False,
    timeout: Timeout = 30.0,
    tls_ca: tls.Ca = None,
    tls_cert: tls.Cert = None,
    tls_key: tls.Key = None,
) -> None:
    """Take the newest version of files from a channel into a folder, and forward it to others.

    The folder is replaced in one step, or stays as it is if anything fails. It may only contain
    files of an earlier pull. If the command of `--exec` fails, it is run again.

    If the coordinator asks for a token, put it into AIODIST_TOKEN.
    """

    async def run() -> None:
        with Folder(to, channel) as folder:
            async with subscriber(
                channel, address=address, timeout=timeout, max_bytes=max_bytes, **_options(address)
            ) as weights:
                puller = Pulling(weights, folder, all_files=all_files, command=command)
                await puller.begin()
                await (puller.follow() if follow else puller.once())

    _run("pull", run(), address, (tls_ca, tls_cert, tls_key), serves=follow)


@app.command("list", epilog=LIST_EPILOG)
def list_channels(
    address: Address,
    timeout: AnswerTimeout = 5.0,
    tls_ca: tls.Ca = None,
    tls_cert: tls.Cert = None,
    tls_key: tls.Key = None,
) -> None:
    """Show the channels of a coordinator, with the newest version and how many have it.

    `aiodist status` shows each participant. If the coordinator asks for a token, put it into
    AIODIST_TOKEN.
    """

    async def run() -> None:
        found = await ask(address, token_in(os.environ), timeout)
        console().print(table(found) if found.get("channels") else "no channels")

    _run("list", run(), address, (tls_ca, tls_cert, tls_key))


def table(found: dict[str, Any]) -> Table:
    """The channels in the answer of a coordinator, as a table."""
    shown = Table()
    shown.add_column("channel", overflow="fold")
    for column in ("version", "size", "publishers", "subscribers", "up to date"):
        shown.add_column(column, justify="right", no_wrap=True)
    for channel in found.get("channels", ()):
        newest = channel["newest"]
        publishing = [one for one in channel["participants"] if one["publishes"]]
        taking = [one for one in channel["participants"] if not one["publishes"]]
        have = [one for one in taking if one["said"] and one["said"]["version"] == newest]
        shown.add_row(
            plain(channel["name"]),
            "" if newest is None else str(newest),
            "" if newest is None else decimal(channel["nbytes"]),
            str(len(publishing)),
            str(len(taking)),
            "" if newest is None else str(len(have)),
        )
    return shown


@app.command(epilog=FORGET_EPILOG)
def forget(
    channel: Channel,
    address: Address,
    timeout: AnswerTimeout = 30.0,
    tls_ca: tls.Ca = None,
    tls_cert: tls.Cert = None,
    tls_key: tls.Key = None,
) -> None:
    """Let the version numbers of a channel begin anew.

    Otherwise numbers only grow, even if the channel is empty or its trainer starts again. The
    command is refused while a publisher or subscribers live: end them first. A trainer can do the
    same with `aiodist.publisher(…, restart=True)`.

    If the coordinator asks for a token, put it into AIODIST_TOKEN.
    """

    async def run() -> None:
        options = _options(address)
        # A publisher would wait for a coordinator that is not there.
        client = await ControlClient.open(address, timeout=timeout, retry=False, **options)
        client.close()
        options |= {"address": address, "timeout": timeout}
        async with publisher(channel, **options) as out:
            has_version = out.newest is not None
        async with publisher(channel, restart=True, **options):
            pass  # also without a version, because parts of one may be there
        if not has_version:
            text = f"there is no channel {channel!r} with a version, so there is nothing to forget"
            raise FailedError(text)

    _run("forget", run(), address, (tls_ca, tls_cert, tls_key))
    typer.echo(f"channel {channel}: the next version may have any number")


def _options(address: str) -> dict[str, Any]:
    """The options to reach a coordinator, from the environment."""
    ssl, _ = contexts_in(os.environ, address)
    return {"token": token_in(os.environ), "ssl": ssl}


def _run(
    name: str,
    work: Coroutine[Any, Any, None],
    address: str,
    tls_files: tuple[str | None, str | None, str | None],
    *,
    serves: bool = False,
) -> None:
    """Run a command to its end.

    Raises CommandError if it fails, and SystemExit if a signal stops it before it is done.
    `serves`: it runs until a signal.
    """
    try:
        usable_address(address, "ADDRESS")
        tls.use(*tls_files)
        run_until_signal(work)
    except FAILURES as error:
        raise CommandError(f"aiodist weights {name}: {_why(error)}") from error
    except SystemExit:
        if not serves:
            raise
    finally:
        work.close()


def _why(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return str(error) or type(error).__name__
