"""Trees of users whose leaves may be parts of arrays: what is published, and what is wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from aiodist.buffers.paths import Path, Where
from aiodist.buffers.tokens import MAX_DEPTH, TOO_DEEP
from aiodist.collectives.shards import Shard, is_part, part
from aiodist.schedules.resharding import Box, text


class Extent(NamedTuple):
    """Which part of an array somebody has."""

    box: Box
    shape: tuple[int, ...]
    """Of the whole array."""

    def __str__(self) -> str:
        return f"{text(self.box)} of an array of shape {self.shape}"


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, length) for length in shape)


def mapped(tree: Any, work: Callable[[Any, Where], Any], where: Where = "", depth: int = 0) -> Any:
    """The tree with what `work` makes of each leaf, given where that is. Raises ValueError where it
    is too deep: one that contains itself would never end."""
    if depth > MAX_DEPTH:
        raise ValueError(TOO_DEEP)
    below = depth + 1
    if isinstance(tree, dict):
        return {key: mapped(item, work, Path(where, key), below) for key, item in tree.items()}
    # A named tuple does not travel, and is told so by who encodes it.
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        kind = list if isinstance(tree, list) else tuple
        return kind(mapped(item, work, Path(where, at), below) for at, item in enumerate(tree))
    return work(tree, where)


def unwrapped(params: Any, *, shares: int) -> tuple[Any, dict[str, Extent]]:
    """A tree that is published, with the arrays of its parts instead of these; and which parts
    these are, by where they are in it. Raises TypeError for DTensors that are not one part, and
    ValueError where there is one share and a part is not the whole."""
    found: dict[str, Extent] = {}

    def work(leaf: Any, where: Where) -> Any:
        if not is_part(leaf):
            return leaf
        shard = part(leaf, f"value{where}")
        found[str(where)] = extent = Extent(shard.box, shard.shape)
        if shares == 1 and shard.box != whole(shard.shape):
            raise ValueError(
                f"value{where} is {extent}, and this is the only publisher: give all that hold"
                " parts `part=(rank, how many)`"
            )
        return shard.array

    return mapped(params, work), found


def parts_wanted(into: Any) -> dict[str, Shard]:
    """The arrays that are to be written to, by where they are in the tree `into`: parts, and whole
    ones. Numbers and strings are not wanted."""
    found: dict[str, Shard] = {}

    def work(leaf: Any, where: Where) -> None:
        if leaf is not None and not isinstance(leaf, (int, float, complex, str, bytes)):
            found[str(where)] = part(leaf, f"into{where}")

    mapped(into, work)
    return found


def has_parts(tree: Any) -> bool:
    """Whether there are parts among its leaves."""
    found: list[Any] = []
    mapped(tree, lambda leaf, where: found.append(is_part(leaf)))
    return any(found)


def joined(trees: Sequence[Any]) -> Any:
    """One tree that has all that any of these has: trees of shares, of which each may have some of
    the arrays alone. Lists and tuples are as long as the longest one."""
    first = next((tree for tree in trees if tree is not None), None)
    if isinstance(first, dict):
        dicts = [tree for tree in trees if isinstance(tree, dict)]
        keys = dict.fromkeys(key for tree in dicts for key in tree)
        return {key: joined([tree[key] for tree in dicts if key in tree]) for key in keys}
    if isinstance(first, (list, tuple)):
        lists = [tree for tree in trees if isinstance(tree, (list, tuple))]
        longest = max(map(len, lists))
        return type(first)(
            joined([tree[at] for tree in lists if at < len(tree)]) for at in range(longest)
        )
    return first
