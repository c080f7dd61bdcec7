"""`aiodist top`: what the ranks of a coordinator do, again and again, and how fast."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table

from aiodist.environment import token_in
from aiodist.errors import AiodistError
from aiodist_cli import tls
from aiodist_cli.errors import CommandError
from aiodist_cli.status import ask, doing_text, findings, headline, plain, title

EPILOG = """    aiodist top tcp://127.0.0.1:29500

    aiodist top tcp://10.0.0.1:29500 --interval 5 --count 12 > log.txt

Exit status: 0 after Ctrl-C, or all tables; 1 if the coordinator did not answer the first time, or
refused; 2 for wrong usage.
"""


def top(
    address: Annotated[
        str,
        typer.Argument(metavar="ADDRESS", help="The coordinator's, such as tcp://10.0.0.1:29500."),
    ],
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="From one table to the next.")
    ] = 1.0,
    count: Annotated[
        int | None, typer.Option(min=1, help="End after so many tables. [default: at Ctrl-C]")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long to wait for an answer.")
    ] = 5.0,
    tls_ca: tls.Ca = None,
    tls_cert: tls.Cert = None,
    tls_key: tls.Key = None,
) -> None:
    """Show what each rank is doing, and how many collectives and bytes a second, until Ctrl-C.

    Collectives are counted when they are called, bytes are payload, over all transports and through
    shared memory. Who holds up others is named below the table. On a terminal, each table takes the
    place of the one before.

    If the coordinator asks for a token, put it into AIODIST_TOKEN.
    """
    tls.use(tls_ca, tls_cert, tls_key)
    console = Console()
    try:
        asyncio.run(_watch(console, address, interval, count, timeout))
    except (AiodistError, TimeoutError, ValueError) as error:
        raise CommandError(f"aiodist top: {error}") from error
    except KeyboardInterrupt:
        pass


async def _watch(
    console: Console, address: str, interval: float, count: int | None, timeout: float
) -> None:
    """Show tables. Raises what `ask` does, if that is the first time."""
    tables = aiter(_tables(address, interval, timeout))
    numbers = itertools.count() if count is None else range(count)
    if not console.is_terminal:
        for _ in numbers:
            console.print(await anext(tables))
        return
    with Live(await anext(tables), console=console, screen=True, auto_refresh=False) as live:
        for _ in itertools.islice(numbers, 1, None):
            live.update(await anext(tables), refresh=True)


async def _tables(address: str, interval: float, timeout: float) -> AsyncIterator[Group]:
    """What is to be shown, every `interval`; the last answer stays where none comes."""
    token, rates = token_in(os.environ), Rates()
    found = await ask(address, token, timeout)
    shown = render(found, rates.since_last(found, time.monotonic()))
    yield shown
    while True:
        await asyncio.sleep(interval)
        try:
            found = await ask(address, token, timeout)
        except (AiodistError, TimeoutError) as error:
            yield Group(shown, plain(f"{error}; asking again"))
        else:
            shown = render(found, rates.since_last(found, time.monotonic()))
            yield shown


_SHORTEST = 0.01
"""Seconds: two answers that are nearer to each other are the same one, of a rank that is busy."""


class Rate(NamedTuple):
    """What a rank does in a second."""

    collectives: float
    sent: float
    received: float


class Rates:
    """What each rank did between two answers of the coordinator."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, Rate]] = {}

    def since_last(self, found: Mapping[str, Any], now: float) -> dict[str, Rate]:
        """By the id of the member; without those that were not there before. `now`: seconds, when
        `found` came."""
        said = {
            member["id"]: (
                now - member["doing"]["age"],
                Rate(*(float(member["doing"][name]) for name in Rate._fields)),
            )
            for group in found["groups"]
            for member in group["members"]
            if member["doing"] is not None
        }
        rates = {}
        for member, (when, counts) in said.items():
            last, older = self._before.get(member, (when, counts))
            if when - last > _SHORTEST:
                rates[member] = Rate(
                    *((new - old) / (when - last) for new, old in zip(counts, older, strict=True))
                )
        here = {member["id"] for group in found["groups"] for member in group["members"]}
        known = self._before | said
        self._before = {member: known[member] for member in known.keys() & here}
        return rates


def render(found: Mapping[str, Any], rates: Mapping[str, Rate]) -> Group:
    """The answer of a coordinator as tables."""
    parts: list[RenderableType] = [headline(found)]
    for group in found["groups"]:
        parts += [_table(group, rates), *findings(group)]
    return Group(*parts)


def _table(group: Mapping[str, Any], rates: Mapping[str, Rate]) -> Table:
    table = Table(title=title(group), title_justify="left")
    for column in ("rank", "name", "calls/s", "sent/s", "recv/s"):
        table.add_column(column, justify="left" if column == "name" else "right", no_wrap=True)
    table.add_column("doing")  # the one that gets narrower, and stays one line high
    for member in group["members"]:
        rate = rates.get(member["id"])
        doing = plain(doing_text(member))
        doing.no_wrap, doing.overflow = True, "ellipsis"
        table.add_row(
            str(member["rank"]),
            plain(member["name"]),
            *([""] * 3 if rate is None else _rate_cells(rate)),
            doing,
        )
    return table


def _rate_cells(rate: Rate) -> list[str]:
    calls = f"{rate.collectives:.0f}" if rate.collectives >= 10 else f"{rate.collectives:.1f}"
    return [calls, decimal(round(rate.sent)), decimal(round(rate.received))]
