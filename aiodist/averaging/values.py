"""Trees of float arrays as few flat vectors, and back."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers import arrays
from aiodist.buffers.arrays import Flat, Kind, shown
from aiodist.buffers.dtypes import carrier
from aiodist.buffers.paths import Path, Where
from aiodist.buffers.tokens import MAX_DEPTH, TOO_DEEP

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""The dtypes that can be averaged."""

SHOWN = 900
"""The number of characters of a tree that a text about it shows."""


@dataclass(frozen=True, slots=True, repr=False)
class _VectorLeaf:
    """An array of a tree: what it was, and where its elements are in the vector `vector`."""

    kind: Kind
    name: str
    shape: tuple[int, ...]
    vector: int
    start: int
    stop: int

    def __repr__(self) -> str:
        return shown(self.name, self.shape)


class TreeForm:
    """The structure, shapes and dtypes of a tree. `digest` is equal for trees that can be averaged
    with each other, and `text` shows them, so that trees of different digests have different texts.
    `names`: the dtypes of the vectors, and `sizes`: their lengths."""

    def __init__(self, tree: Any, *, coded: bool) -> None:
        """`coded`: all dtypes but float64 share one vector of float32, for a codec. Raises
        TypeError for leaves that are no float arrays, ValueError for a tree without arrays."""
        self.coded = coded
        self.names: list[str] = []
        self.sizes: list[int] = []
        self.leaves: list[_VectorLeaf] = []
        self.arrays: list[arrays.UserArray] = []  # those of `tree`, until they are copied
        self._tree = self._take(tree, "value", 0)
        if not self.leaves:
            raise ValueError("value: a tree without arrays has nothing to average")
        text = repr(_with_sorted_keys(self._tree))
        self.digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        count, digest = len(self.leaves), self.digest.hex()[:8]
        more = f"… ({count} arrays of {sum(self.sizes)} values, digest {digest})"
        self.text = text if len(text) <= SHOWN else text[:SHOWN] + more

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(carrier(one.name).itemsize * (one.stop - one.start) for one in self.leaves)

    def _take(self, tree: Any, where: Where, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"{where}: {TOO_DEEP}")
        if isinstance(tree, dict):
            # In the order of the keys as text, because members may have filled them in any order.
            keys = sorted(tree, key=repr)
            found = {key: self._take(tree[key], Path(where, key), depth + 1) for key in keys}
            return {key: found[key] for key in tree}  # results have the order of the caller
        if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
            kind = list if isinstance(tree, list) else tuple
            items = [self._take(one, Path(where, at), depth + 1) for at, one in enumerate(tree)]
            return kind(items)
        array = arrays.view(tree, where)
        if array is None:
            raise TypeError(
                f"{where}: an averager takes float arrays, not {type(tree).__name__}: give numpy"
                " arrays or torch tensors"
            )
        if array.name not in FLOATS:
            raise TypeError(
                f"{where}: an averager takes {', '.join(FLOATS)}, not {array}: convert it, or"
                " leave it out"
            )
        return self._add(array)

    def _add(self, array: arrays.UserArray) -> _VectorLeaf:
        name = "float32" if self.coded and array.name != "float64" else array.name
        if name not in self.names:
            self.names.append(name)
            self.sizes.append(0)
        vector = self.names.index(name)
        start = self.sizes[vector]
        self.sizes[vector] = stop = start + array.base.size
        leaf = _VectorLeaf(array.kind, array.name, array.shape, vector, start, stop)
        self.leaves.append(leaf)
        self.arrays.append(array)
        return leaf

    def copy(self) -> list[Flat]:
        """The elements of the tree, in new vectors. To be called once."""
        vectors: list[Flat] = [
            np.empty(size, carrier(name)) for name, size in zip(self.names, self.sizes, strict=True)
        ]
        for leaf, array in zip(self.leaves, self.arrays, strict=True):
            target = vectors[leaf.vector][leaf.start : leaf.stop]
            if leaf.name == self.names[leaf.vector]:
                np.copyto(target.reshape(leaf.shape), array.base)
            else:
                target[:] = widened(array.read(), leaf.name)
        self.arrays = []
        return vectors

    def tree(self, vectors: Sequence[Flat]) -> Any:
        """A tree of new arrays, of the dtypes and kinds of the tree that this was made of."""
        return self._build(self._tree, vectors)

    def _build(self, tree: Any, vectors: Sequence[Flat]) -> Any:
        if isinstance(tree, dict):
            return {key: self._build(one, vectors) for key, one in tree.items()}
        if isinstance(tree, (list, tuple)):
            kind = list if isinstance(tree, list) else tuple
            return kind(self._build(one, vectors) for one in tree)
        leaf: _VectorLeaf = tree
        found = vectors[leaf.vector][leaf.start : leaf.stop]
        made = arrays.empty(leaf.kind, leaf.name, leaf.shape, "value")
        flat, staged = made.stage()
        if leaf.name == self.names[leaf.vector]:
            flat[:] = found
        else:
            flat[:] = narrowed(found, leaf.name)
        made.commit(staged)
        return made.value


def _with_sorted_keys(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _with_sorted_keys(tree[key]) for key in sorted(tree, key=repr)}
    return type(tree)(map(_with_sorted_keys, tree)) if isinstance(tree, (list, tuple)) else tree


def widened(vector: Flat, name: str) -> NDArray[Any]:
    """The elements of dtype `name` in the dtype in which they are added: float64 for float64, else
    float32. It may be the same memory."""
    if name == "bfloat16":
        return (vector.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return vector.astype(np.float32) if name == "float16" else vector


def narrowed(values: NDArray[Any], name: str) -> Flat:
    """What `widened` gave, rounded once to dtype `name` (to nearest, ties to even). It may be the
    same memory."""
    if name == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    if name != "bfloat16":
        return values
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(
        16
    )
    found = rounded.astype(np.uint16)
    no_number = np.isnan(values)
    if no_number.any():  # rounding may carry into the exponent
        found[no_number] = np.uint16(0x7FC0)
    return found


def added(vectors: Sequence[Flat], others: Sequence[Flat], names: Sequence[str]) -> list[Flat]:
    """The sums, as new vectors."""
    return [
        narrowed(widened(one, name) + widened(other, name), name)
        for one, other, name in zip(vectors, others, names, strict=True)
    ]


def all_finite(vectors: Sequence[Flat], names: Sequence[str]) -> bool:
    """Whether there is no NaN and no infinity."""
    return all(
        bool(np.isfinite(widened(one, name)).all())
        for one, name in zip(vectors, names, strict=True)
    )


def checked_weight(weight: Any) -> float:
    """The weight of a contribution. Raises TypeError and ValueError for other values."""
    try:
        # Python makes floats of these, too, but they are mistakes.
        if isinstance(weight, (bool, np.bool_, str, bytes, bytearray)):
            raise TypeError
        found = float(weight)
    except (TypeError, ValueError):
        kind = type(weight).__name__
        raise TypeError(f"weight is a number, not {weight!r} ({kind}): give a float") from None
    except OverflowError:
        raise ValueError(
            "weight is a finite number, and this int is too large for a float"
        ) from None
    if not 0 <= found < math.inf:
        raise ValueError(f"weight is a finite number from 0 on, not {weight!r}")
    return found
