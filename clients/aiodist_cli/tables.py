"""Tables that leave out columns if the terminal is too narrow for all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import copy

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

ENOUGH = 24
"""The least width of a column whose text may be broken or cut off."""

WIDE = 160
"""The width of an output that is no terminal, so that a log or a pipe has everything."""

_AROUND = 3
"""Characters of a column beside its text: a space on both sides, and a line."""


def console() -> Console:
    """stdout, as wide as its terminal or as COLUMNS says."""
    made = Console()
    if not made.is_terminal and not os.environ.get("COLUMNS"):
        made.width = WIDE
    return made


class NarrowingTable(Table):
    """A table whose headings and numbers are never cut off.

    rich would shorten all columns a little, until none can be read. This table leaves out the
    `expendable` columns (by heading, in that order) instead. A column is broken or cut off only if
    it was added with ``no_wrap=False``.
    """

    def __init__(self, title: str | Text, expendable: Sequence[str]) -> None:
        super().__init__(title=title, title_justify="left")
        self._expendable = expendable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        narrow = copy(self)
        narrow.columns = self._within(options.max_width)
        return Table.__rich_console__(narrow, console, options)

    def _within(self, width: int) -> list[Column]:
        columns = self.columns
        for name in self._expendable:
            if sum(map(_needed, columns)) + 1 <= width:
                break
            columns = [column for column in columns if column.header != name]
        columns = [copy(column) for column in columns]
        for index, column in enumerate(columns):
            column._index = index
        return columns


def _needed(column: Column) -> int:
    """The least characters that a column takes, with its borders."""
    longest = max([cell_len(str(cell)) for cell in column.cells], default=0)
    if not column.no_wrap:
        longest = min(longest, ENOUGH)
    return max(longest, cell_len(str(column.header))) + _AROUND
