"""Parts of arrays that are spread over ranks: `Shard`, and the parts in a tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiodist.buffers.paths import Path, Where
from aiodist.buffers.tokens import MAX_DEPTH, TOO_DEEP
from aiodist.phases.base import as_int, as_shape
from aiodist.schedules.resharding import Box, text


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A part of an array of `shape`: ``whole[index]``, which this rank has as `array`.

    `index` has a slice without a step for each dimension. If it has fewer slices, the remaining
    dimensions are there as a whole. `shape` may be an int, as in numpy. For example,
    ``Shard(rows, (slice(2, 4),), (8, 6))`` is rows 2 and 3 of an array of shape (8, 6).

    Raises TypeError if `index` is not made of slices of ints, or `shape` not of ints. Raises
    ValueError if a slice has a step or is not within `shape`, if a size is negative, or if `array`
    has another shape than the part.

    For example::

        own = slice(group.rank, group.rank + 1)
        row = aiodist.Shard(np.ones((1, 3)), (own,), (group.size, 3))
        whole = await group.reshard({"w": row}, {"w": np.empty((group.size, 3))})
    """

    array: Any
    index: tuple[slice, ...]
    shape: tuple[int, ...]
    box: Box = field(init=False, repr=False)
    """`index` as numbers: the start and stop in each dimension."""

    def __post_init__(self) -> None:
        shape = as_shape(self.shape)
        if any(size < 0 for size in shape):
            raise ValueError(f"shape has no negative sizes, unlike {shape}")
        index = (self.index,) if isinstance(self.index, slice) else tuple(self.index)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "index", index)
        object.__setattr__(self, "box", _box(index, shape))
        own, expected = _shape_of(self.array), tuple(stop - start for start, stop in self.box)
        if own != expected:
            raise ValueError(
                f"the part {text(self.box)} has the shape {expected}; the array given for it has "
                f"{own}"
            )


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    if not all(isinstance(one, slice) for one in index):
        raise TypeError(f"index is a tuple of slices, one for each dimension, not {index!r}")
    if len(index) > len(shape):
        raise ValueError(f"index has {len(index)} slices; the shape {shape} has {len(shape)}")
    box = []
    for dim, length in enumerate(shape):
        one = index[dim] if dim < len(index) else slice(None)
        expected = f"index[{dim}] has an int as start and stop"
        start = 0 if one.start is None else as_int(one.start, expected)
        stop = length if one.stop is None else as_int(one.stop, expected)
        if one.step not in (None, 1) or not 0 <= start <= stop <= length:
            raise ValueError(
                f"index[{dim}] is {one}: a slice without a step is needed, from 0 or later to "
                f"{length} at most, the length of that dimension"
            )
        box.append((start, stop))
    return tuple(box)


def _shape_of(array: Any) -> tuple[int, ...]:
    shape = getattr(array, "shape", None)
    if shape is None:
        raise TypeError(f"an array is needed, not {type(array).__name__}")
    return tuple(map(int, shape))


def parts_of(tree: Any, name: str) -> dict[str, Shard]:
    """Return the parts in a tree of dicts, lists and tuples, by their path in it.

    An array is a whole. A DTensor is the part that its placements give this rank.

    Raises TypeError for other leaves, with their path. `name` stands for the tree in this text.
    Raises ValueError if the tree is too deep, because one that contains itself would never end.
    """
    # Paths have no name of the tree in them, so that a part has the same path in the tree that is
    # held and in the tree that is wanted.
    return {str(where): part(leaf, f"{name}{where}") for where, leaf in _leaves(tree, "")}


def _leaves(tree: Any, where: Where, depth: int = 0) -> Iterator[tuple[Where, Any]]:
    if depth > MAX_DEPTH:
        raise ValueError(TOO_DEEP)
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from _leaves(item, Path(where, key), depth + 1)
    elif isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            yield from _leaves(item, Path(where, index), depth + 1)
    elif tree is not None:
        yield where, tree


def is_part(leaf: Any) -> bool:
    """Whether a leaf may be less than a whole array: a `Shard` or a DTensor."""
    return isinstance(leaf, Shard) or hasattr(leaf, "__create_chunk_list__")


def part(leaf: Any, where: str) -> Shard:
    """Return the part that a leaf is. Raises TypeError with the path `where` for other leaves."""
    if isinstance(leaf, Shard):
        return leaf
    if is_part(leaf):
        return _part_of_dtensor(leaf, where)
    if getattr(leaf, "shape", None) is None:
        raise TypeError(
            f"{where}: an array, an aiodist.Shard or a DTensor is needed, not {type(leaf).__name__}"
        )
    return Shard(leaf, (), leaf.shape)


def _part_of_dtensor(leaf: Any, where: str) -> Shard:
    """Return this rank's part of a DTensor, as torch gives it to writers of checkpoints."""
    if any(placement.is_partial() for placement in leaf.placements):
        raise TypeError(
            f"{where}: the values of a DTensor with a Partial placement are sums that no rank has "
            "yet: redistribute it first"
        )
    chunks = leaf.__create_chunk_list__()
    if len(chunks) != 1:
        raise TypeError(
            f"{where}: a DTensor of which a rank has {len(chunks)} parts that do not lie side by "
            "side: redistribute it first"
        )
    (chunk,) = chunks
    index = tuple(
        slice(start, start + length)
        for start, length in zip(chunk.offsets, chunk.sizes, strict=True)
    )
    return Shard(leaf.to_local(), index, tuple(leaf.shape))
