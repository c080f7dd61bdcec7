"""Where in a tree of values something is, for error texts: `value['a'][3]`."""

from __future__ import annotations


class Path:
    """One step down a tree. Text is made only when somebody asks for it."""

    __slots__ = ("key", "parent")

    def __init__(self, parent: Path | str, key: object) -> None:
        self.parent = parent
        self.key = key

    def __str__(self) -> str:
        return f"{self.parent}[{self.key!r}]"


Where = Path | str
"""A place in a tree, or the name of its root."""
