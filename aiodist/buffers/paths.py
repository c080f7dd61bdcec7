"""Places in a tree of values, for error texts: `value['a'][3]`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set


class Path:
    """One step down a tree. The text is made on demand."""

    __slots__ = ("key", "parent")

    def __init__(self, parent: Path | str, key: object) -> None:
        self.parent = parent
        self.key = key

    def __str__(self) -> str:
        return f"{self.parent}[{self.key!r}]"


Where = Path | str
"""A place in a tree, or the name of its root."""


def as_list(value: object, where: Where) -> str:
    """Return the end of an error text: how to make a list of `value`, if it has items."""
    has_items = isinstance(value, Iterable) and getattr(value, "shape", True) != ()
    if not has_items or isinstance(value, (str, bytes, Mapping, Set)):
        return ""
    return f": pass list({where})"
