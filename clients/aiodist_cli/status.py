"""`aiodist status`: what a coordinator knows."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from aiodist.errors import AiodistError
from aiodist.runtime.control import ControlClient
from aiodist_cli.errors import CommandError

EPILOG = """    aiodist status tcp://127.0.0.1:29500

Exit status: 0 if the coordinator answered, 1 if it did not or refused, 2 for wrong usage.
"""


def status(
    address: Annotated[
        str,
        typer.Argument(metavar="ADDRESS", help="The coordinator's, such as tcp://10.0.0.1:29500."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long to wait for the answer.")
    ] = 5.0,
) -> None:
    """Show the groups of a coordinator, with their ranks and who waits to join.

    If the coordinator asks for a token, put it into AIODIST_TOKEN.
    """
    try:
        found = asyncio.run(_ask(address, timeout))
    except (AiodistError, TimeoutError, ValueError) as error:
        raise CommandError(f"aiodist status: {error}") from error
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console().print(render(found, time.time()))


async def _ask(address: str, timeout: float) -> dict[str, Any]:
    client = await ControlClient.open(
        address, token=os.environ.get("AIODIST_TOKEN"), timeout=timeout, retry=False
    )
    try:
        return {"address": address, **await client.status(timeout=timeout)}
    finally:
        client.close()


def render(found: Mapping[str, Any], now: float) -> Group:
    """The answer of a coordinator as tables; `now` in seconds since the Unix epoch."""
    state = " (draining: it takes no new members)" if found["draining"] else ""
    groups = found["groups"]
    count = f"{len(groups)} group{'' if len(groups) == 1 else 's'}"
    return Group(
        Text(f"coordinator {found['address']}{state}: {count}"),
        *(_group_table(group, now) for group in groups),
    )


def _group_table(group: Mapping[str, Any], now: float) -> Table:
    if group["epoch"] is None:
        state = f"forming, {len(group['waiting'])} of {group['wanted']} here"
    else:
        state = f"epoch {group['epoch']}, {len(group['members'])} of {group['size']} ranks"
    table = Table(title=Text(f"group {group['name']}: {state}"), title_justify="left")
    for column in ("rank", "name", "host", "pid", "state"):
        table.add_column(column, justify="right" if column in ("rank", "pid") else "left")
    for member in group["members"]:
        _add(table, member, f"member for {_duration(now - member['joined_at'])}")
    for joiner in group["waiting"]:
        _add(table, joiner, "waiting to join")
    for rank, reason in group["lost"].items():
        table.add_row(str(rank), "", "", "", Text(f"lost: {reason}", style="red"))
    for rank in group.get("absent", ()):
        table.add_row(str(rank), "", "", "", "not back since the coordinator was restarted")
    for rank in group["left"]:
        table.add_row(str(rank), "", "", "", "left")
    return table


def _add(table: Table, member: Mapping[str, Any], state: str) -> None:
    rank = "any" if member["rank"] is None else str(member["rank"])
    # Text: names come from the network and are no markup.
    table.add_row(rank, Text(member["name"]), Text(member["host"]), str(member["pid"]), state)


def _duration(seconds: float) -> str:
    """ "12 s", "3 min", "5.2 h"."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
