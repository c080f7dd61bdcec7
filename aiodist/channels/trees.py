"""Trees of users whose leaves may be parts of arrays, to publish or to write to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from aiodist.buffers.paths import Path, Where
from aiodist.buffers.tokens import MAX_DEPTH, TOO_DEEP
from aiodist.collectives.shards import Shard, is_part, part
from aiodist.schedules.resharding import Box, text


class Extent(NamedTuple):
    box: Box
    shape: tuple[int, ...]
    """The shape of the whole array."""

    def __str__(self) -> str:
        return f"{text(self.box)} of an array of shape {self.shape}"


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, length) for length in shape)


def mapped(tree: Any, work: Callable[[Any, Where], Any], where: Where = "", depth: int = 0) -> Any:
    """The tree with what `work` returns for each leaf and its place.

    Raises ValueError if it is too deep, because a tree that contains itself would never end.
    """
    if depth > MAX_DEPTH:
        raise ValueError(TOO_DEEP)
    below = depth + 1
    if isinstance(tree, dict):
        return {key: mapped(item, work, Path(where, key), below) for key, item in tree.items()}
    # The encoder refuses named tuples.
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        kind = list if isinstance(tree, list) else tuple
        return kind(mapped(item, work, Path(where, at), below) for at, item in enumerate(tree))
    return work(tree, where)


def unwrapped(params: Any, *, shares: int) -> tuple[Any, dict[str, Extent]]:
    """A tree to publish, with the arrays of its parts, and the extents of these parts by place.

    Raises TypeError for DTensors that are not one part, and ValueError if the only publisher has a
    part that is not the whole.
    """
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


def parts_wanted(into: Any) -> tuple[dict[str, Shard], dict[str, Any]]:
    """The arrays to write to, by their place in the tree `into`: parts, and whole arrays. And the
    numbers and strings there."""
    found: dict[str, Shard] = {}
    others: dict[str, Any] = {}

    def work(leaf: Any, where: Where) -> None:
        if isinstance(leaf, (int, float, complex, str, bytes)):
            others[str(where)] = leaf
        elif leaf is not None:
            found[str(where)] = part(leaf, f"into{where}")

    mapped(into, work)
    return found, others


def has_parts(tree: Any) -> bool:
    """Whether some of its leaves are parts."""
    found: list[Any] = []
    mapped(tree, lambda leaf, where: found.append(is_part(leaf)))
    return any(found)


def joined(trees: Sequence[Any]) -> Any:
    """Join the trees of shares, each of which may have only some of the arrays.

    Lists and tuples are as long as the longest one.
    """
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
