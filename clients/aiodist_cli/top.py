"""`aiodist top`: what the ranks of a coordinator do, again and again, and how fast."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.filesize import decimal
from rich.live import Live
from rich.segment import Segment
from rich.table import Table

from aiodist.environment import token_in
from aiodist.errors import AiodistError
from aiodist.membership import rates, words
from aiodist.membership.rates import Counted, Rate
from aiodist_cli import tls
from aiodist_cli.errors import CommandError, run_until_signal, usable_address
from aiodist_cli.keys import pressed
from aiodist_cli.status import (
    MOST_PARTICIPANTS,
    Address,
    ask,
    averager_tables,
    channel_tables,
    doing_text,
    findings,
    groups_of,
    headline,
    plain,
    title,
)
from aiodist_cli.tables import NarrowingTable, console

EPILOG = """    aiodist top tcp://127.0.0.1:29500

    aiodist top tcp://10.0.0.1:29500 --interval 5 --count 12 > log.txt

Exit status: 0 after q, Ctrl-C, or all tables; 1 if the coordinator did not answer the first time,
or refused; 2 for wrong usage; 128 + n if signal n ended it.
"""


def top(
    address: Address,
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Time between two tables.")
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
    """Show what each rank is doing, and how many collectives and bytes a second, until q or Ctrl-C.

    Collectives are counted when they are called. Bytes are payload, over all transports and shared
    memory. Ranks that hold up others are named below the table. Channels of weights come last, with
    the version of each participant, and how far it is behind. On a terminal, each table replaces
    the one before: select a rank with the arrows, press Enter for all details of it, and q to quit.

    If the coordinator asks for a token, put it into AIODIST_TOKEN.
    """
    usable_address(address, "ADDRESS")
    tls.use(tls_ca, tls_cert, tls_key)
    try:
        run_until_signal(_watch(console(), address, interval, count, timeout))
    except (AiodistError, TimeoutError, ValueError) as error:
        raise CommandError(f"aiodist top: {error}") from error
    except SystemExit as end:
        if end.code != 128 + signal.SIGINT:
            raise


class Answer(NamedTuple):
    """The last answer of a coordinator, the rates of ranks, and why there is no newer answer, if
    so."""

    found: Mapping[str, Any]
    rates: Mapping[str, Rate]
    error: str = ""


async def _watch(
    console: Console, address: str, interval: float, count: int | None, timeout: float
) -> None:
    """Show tables. Raises what `ask` does, if the first call fails."""
    answers = _answers(address, interval, timeout)
    view = View()
    left = itertools.count() if count is None else iter(range(count))
    if not console.is_terminal or console.is_dumb_terminal:
        for _ in left:
            console.print(view.render(await anext(answers), None))
        return
    answer = await anext(answers)
    next(left)

    def shown() -> RenderableType:
        return view.render(answer, console.height)

    with pressed() as keys, Live(shown(), console=console, screen=True, auto_refresh=False) as live:
        coming = asyncio.ensure_future(_next(answers)) if next(left, None) is not None else None
        key = asyncio.ensure_future(keys.get())
        try:
            while coming is not None:
                await asyncio.wait({coming, key}, return_when=asyncio.FIRST_COMPLETED)
                if key.done():
                    if not view.press(key.result(), answer.found):
                        return
                    key = asyncio.ensure_future(keys.get())
                if coming.done():
                    answer = coming.result()
                    more = next(left, None) is not None
                    coming = asyncio.ensure_future(_next(answers)) if more else None
                live.update(shown(), refresh=True)
        finally:
            key.cancel()
            if coming is not None:
                coming.cancel()
    console.print(view.render(answer, None))  # the screen of before is back


async def _next(answers: AsyncIterator[Answer]) -> Answer:
    return await anext(answers)


async def _answers(address: str, interval: float, timeout: float) -> AsyncIterator[Answer]:
    """Answers to show, every `interval` seconds. If none comes, the last one is shown with the
    error."""
    token, told = token_in(os.environ), Rates()
    found = await ask(address, token, timeout)
    answer = Answer(found, told.since_last(found, time.monotonic()))
    yield answer
    while True:
        await asyncio.sleep(interval)
        try:
            found = await ask(address, token, timeout)
        except (AiodistError, TimeoutError) as error:
            yield answer._replace(error=f"asking again: {error}")
        else:
            answer = Answer(found, told.since_last(found, time.monotonic()))
            yield answer


class Rates:
    """What each rank did between two answers of the coordinator."""

    def __init__(self) -> None:
        self._before: dict[str, Counted] = {}

    def since_last(self, found: Mapping[str, Any], now: float) -> dict[str, Rate]:
        """Rates by the id of the member, without members that are new.

        `now`: seconds, when `found` came.
        """
        said = {
            member["id"]: rates.counted(member["doing"], now)
            for group in found["groups"]
            for member in group["members"]
            if member["doing"] is not None
        }
        known = {member: rates.between(self._before.get(member), said[member]) for member in said}
        here = {member["id"] for group in found["groups"] for member in group["members"]}
        kept = self._before | said
        self._before = {member: kept[member] for member in kept.keys() & here}
        return {member: rate for member, rate in known.items() if rate is not None}


class View:
    """What is shown of an answer: all groups, maybe with a selected rank, or the details of that
    rank."""

    def __init__(self) -> None:
        self._selected: tuple[int, str] | None = None  # by its place among all ranks, and its id
        self._in_detail = False

    def press(self, key: str, found: Mapping[str, Any]) -> bool:
        """Handle a key. False: quit."""
        at = self._at(found)
        if key == "up" or key == "down":
            step = -1 if key == "up" else 1
            self._select(0 if at is None else at + step, found)
        elif key == "right" and at is not None:
            self._in_detail = True
        elif key == "left":
            if not self._in_detail:
                self._selected = None
            self._in_detail = False
        return key != "quit"

    def _select(self, at: int, found: Mapping[str, Any]) -> None:
        ids = [member["id"] for member in _members(found)]
        if ids:
            at = min(max(at, 0), len(ids) - 1)
            self._selected = at, ids[at]

    def _at(self, found: Mapping[str, Any]) -> int | None:
        """The place of the selected rank. If it is gone, select the rank at its place."""
        if self._selected is None:
            return None
        ids = [member["id"] for member in _members(found)]
        at, selected = self._selected
        if selected not in ids:
            self._in_detail = False
            self._select(at, found)
            return None if not ids else self._selected[0]
        return ids.index(selected)

    def render(self, answer: Answer, height: int | None) -> RenderableType:
        """The answer as tables, in at most `height` lines if given.

        If there is no room for all ranks, those near the selected one are shown.
        """
        found, rates = answer.found, answer.rates
        at = self._at(found)
        parts: list[RenderableType] = [headline(found)]
        if self._in_detail and at is not None:
            group, member = [
                (group, member) for group in groups_of(found) for member in group["members"]
            ][at]
            parts += _detail(group, member, rates)
            return _Screen(parts, HELP_IN_DETAIL, answer.error, height)
        rows = _rows(found, height)
        shown = _window(len(_members(found)), at or 0, rows)
        number = 0
        for group in groups_of(found):
            count = len(group["members"])
            here = range(max(shown.start - number, 0), min(shown.stop - number, count))
            if here or not count:
                selected = None if at is None else at - number
                parts += [_table(group, rates, here, selected), *findings(group)]
            number += count
        parts += channel_tables(found, _participants(found, height))
        parts += averager_tables(found)
        return _Screen(parts, HELP, answer.error, height)


HELP = "up, down: select a rank   right: all of it   left: back   q: quit"
HELP_IN_DETAIL = "left: back   q: quit"


class _Screen:
    """`parts` in at most `height` lines, of which the help and the error have the last two."""

    def __init__(
        self, parts: Iterable[RenderableType], help: str, error: str, height: int | None
    ) -> None:
        self._parts = Group(*parts)
        self._last = [plain(error)] if error else []
        if height is not None:
            self._last.insert(0, plain(help, style="dim"))
            for line in self._last:
                line.no_wrap, line.overflow = True, "ellipsis"
        self._height = height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = None if self._height is None else max(self._height - len(self._last), 0)
        lines = console.render_lines(self._parts, options.reset_height(), pad=False)
        for line in lines[:room]:
            yield from line
            yield Segment.line()
        yield from self._last


_AROUND_TABLE = 5
"""Lines of a table beside its rows: title, and frame."""


def _members(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [member for group in groups_of(found) for member in group["members"]]


def _rows(found: Mapping[str, Any], height: int | None) -> int:
    """The number of ranks for which there is room."""
    if height is None:
        return len(_members(found))
    lines = 3  # the headline, the help, and perhaps an error
    most = _participants(found, height)
    for averager in found.get("averagers", ()):
        lines += _AROUND_TABLE + len(averager["parts"])
    for channel in found.get("channels", ()):
        lines += _AROUND_TABLE + min(len(channel["participants"]), most + 1)
    for group in groups_of(found):
        lines += _AROUND_TABLE + sum(len(text.plain.splitlines()) for text in findings(group))
    return max(height - lines, 3)


def _participants(found: Mapping[str, Any], height: int | None) -> int:
    """The number of participants of each channel for which there is room.

    If there are groups as well, channels get half of the lines.
    """
    channels = len(found.get("channels", ()))
    if height is None or not channels:
        return MOST_PARTICIPANTS
    lines = height // 2 if groups_of(found) else height - 3
    return min(max(lines // channels - _AROUND_TABLE - 1, 2), MOST_PARTICIPANTS)


def _window(count: int, at: int, rows: int) -> range:
    """`rows` of `count` rows, with `at` in the middle if possible."""
    start = min(max(at - rows // 2, 0), max(count - rows, 0))
    return range(start, min(start + rows, count))


def _detail(
    group: Mapping[str, Any], member: Mapping[str, Any], rates: Mapping[str, Rate]
) -> Iterator[RenderableType]:
    """Everything that is known of one rank."""
    table = Table(title=title(group), title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    doing = member["doing"] or {}
    rate = rates.get(member["id"])
    rows = [
        ("rank", str(member["rank"])),
        ("name", member["name"]),
        ("host, pid", f"{member['host']}, {member['pid']}"),
        ("doing", doing_text(member)),
        *(("at", place) for place in doing.get("places", ())),
        *(
            ("waits", f"{words.duration(wait['seconds'])} in {wait['what']} of {wait['group']}, "
                      f"epoch {wait['epoch']}{', for ' * bool(wait['missing'])}{wait['missing']}")
            for wait in doing.get("waits", ())
        ),
        ("last", doing.get("last", "")),
        ("calls/s, sent/s, recv/s", "" if rate is None else ", ".join(_rate_cells(rate))),
        ("calls, sent, received", ", ".join(
            [f"{doing['collectives']}", decimal(doing["sent"]), decimal(doing["received"])]
            if doing else [])),
        ("saved by codecs", decimal(doing["saved"]) if doing.get("saved") else ""),
    ]  # fmt: skip
    for name, text in rows:
        if text:
            table.add_row(name, plain(text))
    yield table
    yield from findings(group)


def _table(
    group: Mapping[str, Any], rates: Mapping[str, Rate], here: range, selected: int | None
) -> Table:
    heading = title(group)
    if len(here) < len(group["members"]):
        heading.append(f" (here {here.start} to {here.stop - 1})")
    table = NarrowingTable(heading, ("name", "recv/s", "sent/s"))
    for column in ("rank", "name", "calls/s", "sent/s", "recv/s"):
        table.add_column(column, justify="left" if column == "name" else "right", no_wrap=True)
    table.add_column("doing")  # this one gets narrower, and stays one line high
    for number in here:
        member = group["members"][number]
        rate = rates.get(member["id"])
        doing = plain(doing_text(member))
        doing.no_wrap, doing.overflow = True, "ellipsis"
        table.add_row(
            str(member["rank"]),
            plain(member["name"]),
            *([""] * 3 if rate is None else _rate_cells(rate)),
            doing,
            style="reverse" if number == selected else "",
        )
    return table


def _rate_cells(rate: Rate) -> list[str]:
    calls = f"{rate.calls:.0f}" if rate.calls >= 10 else f"{rate.calls:.1f}"
    return [calls, decimal(round(rate.sent)), decimal(round(rate.received))]
