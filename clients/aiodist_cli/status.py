"""`aiodist status`: the groups of a coordinator, what their ranks are doing, and which hold up
others."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from aiodist.control.client import ControlClient
from aiodist.environment import token_in
from aiodist.errors import AiodistError, printable
from aiodist.membership import words
from aiodist.transports.certificates import contexts_in
from aiodist_cli import tls
from aiodist_cli.errors import CommandError, usable_address
from aiodist_cli.tables import NarrowingTable, console

EPILOG = """    aiodist status tcp://127.0.0.1:29500

Exit status: 0 if the coordinator answered, 1 if it did not or refused, 2 for wrong usage.
"""

Address = Annotated[
    str,
    typer.Argument(
        metavar="ADDRESS",
        envvar="AIODIST_ADDRESS",
        help="The coordinator's, such as tcp://10.0.0.1:29500.",
    ),
]

_MOST = 8
"""The number of culprits that are shown of one finding."""

MOST_PARTICIPANTS = 64
"""The number of participants that are shown of one channel."""


def status(
    address: Address,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long to wait for the answer.")
    ] = 5.0,
    tls_ca: tls.Ca = None,
    tls_cert: tls.Cert = None,
    tls_key: tls.Key = None,
) -> None:
    """Show the groups of a coordinator: their ranks, what each is doing, and which processes wait
    to join.

    All members are asked. If one does not answer within a second, you see its last answer, or when
    it last gave a sign of life. If ranks hold up others, they are named below the table, with the
    lines of their program. Channels of weights come last, with the version of each participant, and
    how far it is behind.

    If the coordinator asks for a token, put it into AIODIST_TOKEN.
    """
    usable_address(address, "ADDRESS")
    tls.use(tls_ca, tls_cert, tls_key)
    try:
        found = asyncio.run(ask(address, token_in(os.environ), timeout))
    except (AiodistError, TimeoutError, ValueError) as error:
        raise CommandError(f"aiodist status: {error}") from error
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        console().print(render(found, time.time()))


async def ask(address: str, token: str | None, timeout: float) -> dict[str, Any]:
    """Ask a coordinator and its members. Raises AiodistError, TimeoutError, ValueError."""
    ssl, _ = contexts_in(os.environ, address)
    client = await ControlClient.open(address, token=token, ssl=ssl, timeout=timeout, retry=False)
    try:
        return {"address": address, **await client.status(timeout=timeout, ask_members=True)}
    finally:
        client.close()


def render(found: Mapping[str, Any], now: float) -> Group:
    """The answer of a coordinator as tables; `now` in seconds since the Unix epoch."""
    parts: list[RenderableType] = [headline(found)]
    for group in groups_of(found):
        parts += [_group_table(group, now), *findings(group)]
    return Group(*parts, *channel_tables(found), *averager_tables(found))


def headline(found: Mapping[str, Any]) -> Text:
    """The line that names the coordinator."""
    state = " (draining: it takes no new members)" if found["draining"] else ""
    count = len(groups_of(found))
    groups = f"{count} group{'' if count == 1 else 's'}"
    return plain(f"coordinator {found['address']}{state}: {groups}")


def groups_of(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The groups, without the groups of one of channels and averagers."""
    # Older coordinators do not mark these.
    return [
        group for group in found["groups"] if not group.get("channel") and not group.get("averager")
    ]


def title(group: Mapping[str, Any]) -> Text:
    """The name of a group, its epoch, the number of its members, and what codecs have saved."""
    if group["epoch"] is None:
        state = f"forming, {len(group['waiting'])} of {group['wanted']} here"
    else:
        state = f"epoch {group['epoch']}, {len(group['members'])} of {group['size']} ranks"
    saved = saved_by(group["members"], "doing")
    return plain(f"group {group['name']}: {state}" + (f", {saved} by codecs" if saved else ""))


def channel_tables(
    found: Mapping[str, Any], most: int = MOST_PARTICIPANTS
) -> Iterator[RenderableType]:
    """Channels of weights, with at most `most` participants each.

    A line shows the version of a participant, how far it is behind, and what it has moved.
    """
    for channel in found.get("channels", ()):
        newest = "no version yet"
        if channel["newest"] is not None:
            newest = f"version {channel['newest']}, {decimal(channel['nbytes'])}"
        heading = plain(f"channel {channel['name']}: {newest}")
        table = NarrowingTable(
            heading, ("pid", "host", "memory", "recv", "sent", "deltas", "newest")
        )
        shown = sorted(channel["participants"], key=_urgency)[:most]
        has_deltas = any(one["said"] and differences(one["said"]) for one in shown)
        for column in ("", "name", "host", "pid", "version", "behind", "newest", "memory", "sent",
                       "recv", *["deltas"] * has_deltas):  # fmt: skip
            is_text = column in ("", "name", "host", "behind", "deltas")
            table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
        # Publishers come first, then the subscribers that are furthest behind.
        for one in shown:
            table.add_row(*_participant_cells(one)[: len(table.columns)])
        yield table
        if (more := len(channel["participants"]) - most) > 0:
            yield Text(f"and {more} more, none of which is further behind")


def averager_tables(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Averagers: for each part the open round, the members that it waits for, and the last
    round."""
    for averager in found.get("averagers", ()):
        grace = "auto" if averager["grace"] is None else f"{averager['grace']:g} s"
        count = len(averager["members"])
        saved = saved_by(averager["members"], "said")
        heading = plain(
            f"averager {averager['name']}: {count} member{'' if count == 1 else 's'}, quorum"
            f" {averager['quorum']}, grace {grace}"
            + (f", {averager['codec']}" if averager["codec"] else "")
            + (f", {saved}" if saved else "")
        )
        table = NarrowingTable(heading, ("late", "missing", "in", "took"))
        for column in ("part", "last round", "took", "in", "late", "now", "missing"):
            is_number = column in ("last round", "took", "in")
            table.add_column(column, justify="right" if is_number else "left")
        for part in averager["parts"]:
            table.add_row(*_part_cells(part))
        yield table


def _part_cells(part: Mapping[str, Any]) -> list[RenderableType]:
    cells: list[RenderableType] = [plain(part["part"]), str(part["round"])]
    if part["rounds"]:
        last = part["rounds"][-1]
        cells += [words.duration(last["seconds"]), str(len(last["contributors"]))]
    else:
        cells += ["", ""]
    lates = [
        f"{name} {words.duration(by)}" + (f" (round {number})" if number != part["round"] else "")
        for name, (number, by) in part["late"].items()
    ]
    cells.append(plain(", ".join(lates)))
    now = f"{part['state']}, {len(part['contributed'])} in"
    return [*cells, now, plain(", ".join(part["missing"]))]


def saved_by(members: Iterable[Mapping[str, Any]], said: str) -> str:
    """What codecs have saved these members, by what they have `said`; "" if nothing."""
    # Older members do not report this.
    saved = sum(one[said].get("saved", 0) for one in members if one.get(said))
    return f"{decimal(saved)} saved" if saved else ""


def _urgency(one: Mapping[str, Any]) -> tuple[bool, float]:
    said = one["said"]
    return not one["publishes"], -math.inf if said is None else -float(said["behind"])


def _participant_cells(one: Mapping[str, Any]) -> list[RenderableType]:
    said = one["said"]
    who: list[RenderableType] = ["publishes" if one["publishes"] else "takes"]
    who += [plain(one["name"]), plain(one["host"]), str(one["pid"])]
    if said is None:
        return [*who, "", plain("no sign of life", style="red")]
    version = "none" if said["version"] is None else str(said["version"])
    lag = f"by {said['lag']}, " if said["lag"] else ""
    behind = f"{lag}{words.duration(said['behind'])}" if said["behind"] else ""
    here = f"{100 * said['here'] // said['nbytes']} %" if said["nbytes"] else ""
    moved = [decimal(said[name]) for name in ("memory", "sent", "received")]
    return [*who, version, behind, here, *moved, differences(said)]


def differences(said: Mapping[str, Any]) -> str:
    """What a participant reports about differences between versions."""
    # Older participants do not report this.
    texts = [f"{said['changed']:.2%} changed"] if said.get("changed") else []
    texts += [f"chain of {said['chain']}"] if said.get("chain", 0) > 1 else []
    texts += [f"{decimal(said['saved'])} saved"] if said.get("saved") else []
    texts += [f"{said['fallbacks']} chunks failed"] if said.get("fallbacks") else []
    return ", ".join(texts)


def _group_table(group: Mapping[str, Any], now: float) -> Table:
    table = NarrowingTable(title(group), ("pid", "host", "name"))
    for column in ("rank", "name", "host", "pid"):
        is_number = column in ("rank", "pid")
        table.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    table.add_column("state")
    table.add_column("doing", overflow="fold")  # its end is the line of the program
    for member in group["members"]:
        state = f"member for {words.duration(now - member['joined_at'])}"
        _add(table, member, state, doing_text(member))
    for joiner in group["waiting"]:
        _add(table, joiner, "waiting to join", "")
    for rank, reason in group["lost"].items():
        table.add_row(str(rank), "", "", "", plain(f"lost: {reason}", style="red"), "")
    for rank in group.get("absent", ()):
        table.add_row(str(rank), "", "", "", "may still come back to the coordinator", "")
    for rank in group["left"]:
        table.add_row(str(rank), "", "", "", "left", "")
    return table


def _add(table: Table, member: Mapping[str, Any], state: str, doing: str) -> None:
    rank = "any" if member["rank"] is None else str(member["rank"])
    name, host = plain(member["name"]), plain(member["host"])
    table.add_row(rank, name, host, str(member["pid"]), state, plain(doing))


def plain(text: str, style: str = "") -> Text:
    """Text from the network: no markup, and no characters that control a terminal."""
    return Text(printable(text), style=style)


def doing_text(member: Mapping[str, Any]) -> str:
    """What a member is doing, and where in its program."""
    places = (member["doing"] or {"places": []})["places"]
    return words.doing(member) + (f" at {places[0]}" if places else "")


def findings(group: Mapping[str, Any]) -> Iterator[Text]:
    """Which ranks hold up others, and what they are doing."""
    members = {member["rank"]: member for member in group["members"]}
    for finding in group["findings"]:
        text = plain(f"{words.verdict(finding)}: ").plain
        yield Text.assemble((text, "bold red"), plain(words.held(finding)))
        for rank in finding["culprits"][:_MOST]:
            yield plain(f"  rank {rank}: {doing_text(members[rank])}")
            for place in (members[rank]["doing"] or {"places": []})["places"][1:]:
                yield plain(f"    {place}")
        if len(finding["culprits"]) > _MOST:
            yield Text(f"  and {len(finding['culprits']) - _MOST} more")
