"""Decode values of users: what `aiodist.buffers.encoding` has encoded.

`parse` reads the metadata of a message without trusting it. The `Incoming` that it returns makes
the memory for the bytes of the arrays, and finally the value.
"""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import msgpack
import numpy as np

from aiodist.buffers import arrays, tokens
from aiodist.buffers.arrays import Flat, check_same, view, writable
from aiodist.buffers.dtypes import carrier
from aiodist.buffers.encoding import byte_view
from aiodist.buffers.foreign import Taker, Target
from aiodist.buffers.packed_numbers import NUMBERS, fits
from aiodist.buffers.paths import Path, Where
from aiodist.buffers.tokens import MAX_DEPTH, NO_ARRAYS, PLAIN, Spec
from aiodist.compiled import core
from aiodist.errors import MessageTooLargeError, ProtocolError

_END: Final = object()
_SHORT: Final = 128
"""The most bytes of metadata that are looked up before they are parsed. That of one array is
shorter. Longer metadata describes a tree, which hardly ever repeats."""
_KEPT: Final = 1024
"""How many are kept."""
_EXTENSIONS: Final = frozenset((*range(0xC7, 0xCA), *range(0xD4, 0xD9)))
"""The first bytes of the tokens of arrays, among others."""


class _Leaf:
    """An array of a tree that is still to come."""

    __slots__ = ("index", "spec")

    def __init__(self, index: int, spec: Spec) -> None:
        self.index = index
        self.spec = spec


class _Number:
    """A number of a tree that `Incoming.build` gets."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Pickled:
    """An object of a tree that came as a pickle.

    Only `Incoming.finish` unpickles it, after it is known that this rank allows it.
    """

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


class Incoming:
    """A message whose metadata has come, and whose array bytes are to come.

    `nbytes` is the size of its arrays. Call `allocate`, fill `buffers` in order, then call
    `finish`. `foreign` is what it was allocated with, and `targets` are the places of its arrays.
    """

    __slots__ = (
        "_allow_pickle",
        "_out",
        "_staged",
        "_tree",
        "buffers",
        "foreign",
        "has_pickles",
        "is_plain",
        "nbytes",
        "specs",
        "targets",
    )

    def __init__(
        self, tree: Any, specs: list[Spec], allow_pickle: bool, has_pickles: bool = False
    ) -> None:
        self._tree = tree  # the value, with a `_Leaf` for each array and a `_Pickled` for a pickle
        self.specs = specs  # dtype and shape of each array
        self.has_pickles = has_pickles  # whether an object came as a pickle
        self.is_plain = not (specs or has_pickles)
        self.nbytes = sum([spec.nbytes for spec in specs])
        self._allow_pickle = allow_pickle
        self.buffers: list[memoryview] = []  # memory for the bytes to come
        self.foreign: Any = None  # has the places of arrays on devices
        self._out: Any = None  # the user's memory for it
        self.targets: list[Target] = []  # the final place of each array
        # Memory that is filled instead of a target that is not contiguous, or not of this byte
        # order. `finish` copies it.
        self._staged: list[Flat | None] = []

    def describe(self) -> str:
        """Describe the value in short: `float32[3,4]`, `list[3]`, `int`."""
        return describe(self._tree)

    @property
    def array(self) -> Spec | None:
        """The one array that the value is; None if it is anything else."""
        return self._tree.spec if isinstance(self._tree, _Leaf) else None

    @property
    def has_foreign(self) -> bool:
        """Whether it contains arrays that were on a device."""
        return any(spec.kind == "device" for spec in self.specs)

    def allocate(
        self, out: object = None, *, name: str = "out", foreign: Taker | None = None
    ) -> None:
        """Make the memory for the bytes, and set `buffers`: writable byte views, in order.

        Empty ones are left out. Without `out` these are new arrays of the kinds, dtypes and shapes
        that were sent. Otherwise `out` is an array, or a tree of lists, tuples and dicts with an
        array wherever the value has one, and is written in place. `foreign` has places for arrays
        that go to a device, or come from one separately.

        Raises TypeError or ValueError, naming the place in `name`, if something does not fit. The
        Incoming is then unchanged and may be allocated again.
        """
        if self.is_plain and out is None:
            return
        # Everything is checked before this object changes, so that the caller may try again with
        # another `out` after an error in the last array of a tree.
        made: list[Target | None] = [None] * len(self.specs)
        for where, leaf, place in _walk(self._tree, out, name if out is not None else "value"):
            if isinstance(leaf, _Pickled):
                if not self._allow_pickle:
                    raise TypeError(
                        f"{where} came pickled: connect with allow_pickle=True to accept that"
                    )
            elif isinstance(leaf, _Leaf):
                spec = leaf.spec
                taken = None
                if foreign is not None:
                    taken = foreign.take(spec, None if out is None else place, where)
                if taken is not None:
                    made[leaf.index] = taken
                elif out is None:
                    made[leaf.index] = arrays.empty(spec.kind, spec.name, spec.shape, where)
                else:
                    array = writable(place, where)
                    check_same("the incoming array", spec.name, spec.shape, array, where)
                    made[leaf.index] = array
            elif foreign is not None and out is not None and foreign.is_foreign(place):
                raise _misfit(leaf, place, where)
        self._out = out
        self.foreign = foreign
        self.targets = [array for array in made if array is not None]
        staged = [array.stage() for array in self.targets]
        self._staged = [copy for _, copy in staged]
        self.buffers = [byte_view(target) for target, _ in staged if target.nbytes]

    def finish(self, numbers: Sequence[Any] = ()) -> Any:
        """Return the value, because all bytes are in `buffers`. Call it once. `numbers`: see
        `build`.

        With `out`, this is `out` itself if it is an array or if the value holds only arrays.
        Otherwise it is the value that came, with the arrays of `out` in it.
        """
        if self.is_plain and self._out is None and not numbers:
            return self._tree
        for array, staged in zip(self.targets, self._staged, strict=True):
            array.commit(staged)
        if self._out is not None and _only_arrays(self._tree):
            return self._out
        return self.build([array.value for array in self.targets], numbers)

    def build(self, arrays: Sequence[Any], numbers: Sequence[Any] = ()) -> Any:
        """Return the value with these as its arrays, and as its numbers if they were taken out."""
        return _build(self._tree, arrays, numbers)

    def take_out_numbers(self) -> int:
        """Let `build` get the numbers, in preorder, and return how many there are. Keys stay."""
        numbers = itertools.count()
        self._tree = _without_numbers(self._tree, numbers)
        return next(numbers)

    def anew(self) -> Incoming:
        """Return the same, not allocated yet."""
        return Incoming(self._tree, self.specs, self._allow_pickle, self.has_pickles)

    def outline(self) -> Any:
        """Return the `outline` of the value, with dtype and shape of each array."""

        def leaf(item: Any) -> Any:
            if isinstance(item, _Pickled):
                return None
            if isinstance(item, _Leaf):
                return None if item.spec.kind == "device" else item.spec[1:3]
            return WORD

        return outline(self._tree, leaf)


WORD: Final = "word"
"""Stands for a leaf that is not an array in an `outline`."""


def outline(tree: Any, leaf: Callable[[Any], Any], depth: int = 0) -> Any:
    """Return the form of a tree: equal for two of which one fits the other (see `_walk`).

    `leaf` returns what stands for a leaf; None: it is not known whether others fit. The result is
    None then.
    """
    if depth > MAX_DEPTH:
        return None
    if isinstance(tree, dict):
        # Keys of one text may differ, as NaNs do, and others are equal to keys of other texts.
        if not all(type(key) in (str, int, bytes) for key in tree):
            return None
        items = {repr(key): outline(item, leaf, depth + 1) for key, item in tree.items()}
        return None if None in items.values() else ("dict", *sorted(items.items()))
    if isinstance(tree, (list, tuple)):
        parts = [outline(item, leaf, depth + 1) for item in tree]
        return None if None in parts else ("list", *parts)
    return leaf(tree)


def _without_numbers(tree: Any, numbers: Iterator[int]) -> Any:
    kind = type(tree)
    if kind is list or kind is tuple:
        return kind([_without_numbers(item, numbers) for item in tree])
    if kind is dict:
        return {key: _without_numbers(item, numbers) for key, item in tree.items()}
    is_data = kind in NUMBERS and (kind is not int or fits(tree))
    return _Number(next(numbers)) if is_data else tree


def _build(tree: Any, arrays: Sequence[Any], numbers: Sequence[Any]) -> Any:
    kind = type(tree)
    if kind is _Leaf:
        return arrays[tree.index]
    if kind is _Number:
        return numbers[tree.index]
    if kind is list:
        return [_build(item, arrays, numbers) for item in tree]
    if kind is tuple:
        return tuple([_build(item, arrays, numbers) for item in tree])
    if kind is dict:
        return {key: _build(item, arrays, numbers) for key, item in tree.items()}
    if kind is _Pickled:
        try:
            return pickle.loads(tree.data)
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # For example a CancelledError, which would pass for one of the task or link that reads.
            text = f"unpickling raised {type(error).__name__}: {error}"
            raise RuntimeError(text) from error
    return tree


def _only_arrays(tree: Any) -> bool:
    if isinstance(tree, (list, tuple)):
        return all(map(_only_arrays, tree))
    if isinstance(tree, dict):
        return all(map(_only_arrays, tree.values()))
    return isinstance(tree, _Leaf)


# `out` may be of another kind than the value: a list takes a tuple, and a numpy array takes a
# tensor, if both have arrays in the same places. So trees are compared by their shape, and only
# leaves by dtype. For a leaf that is not an array, `out` may not have an array, or a tree that may
# have arrays. These would look as if they had been written. A pickle may be such a tree itself.
def _walk(tree: Any, out: Any, where: Where) -> Iterator[tuple[Where, Any, Any]]:
    """Yield (place, leaf, item of `out` there) of each leaf, without pairs that hold no array.

    `out` None: nothing is matched.
    """
    if isinstance(tree, dict):
        if out is not None and (not isinstance(out, dict) or out.keys() != tree.keys()):
            raise _misfit(tree, out, where)
        for key, item in tree.items():
            place = None if out is None else out[key]
            if type(item) not in NO_ARRAYS or type(place) not in NO_ARRAYS:
                yield from _walk(item, place, Path(where, key))
    elif isinstance(tree, (list, tuple)):
        if out is not None and (not isinstance(out, (list, tuple)) or len(out) != len(tree)):
            raise _misfit(tree, out, where)
        for index, item in enumerate(tree):
            place = None if out is None else out[index]
            if type(item) not in NO_ARRAYS or type(place) not in NO_ARRAYS:
                yield from _walk(item, place, Path(where, index))
    else:
        is_word = not isinstance(tree, (_Leaf, _Pickled))
        if is_word and isinstance(out, (dict, list, tuple)):
            raise _misfit(tree, out, where)
        # A numpy scalar is replaced, as a Python number is.
        is_kept = out is None or isinstance(out, np.generic) or view(out, where) is None
        if not isinstance(tree, _Leaf) and not is_kept:
            raise _misfit(tree, out, where)
        yield where, tree, out


def _misfit(tree: Any, out: Any, where: Where) -> Exception:
    if isinstance(tree, dict) and isinstance(out, dict):
        keys = sorted(map(repr, tree.keys() ^ out.keys()))
        return ValueError(
            f"{where}: the keys differ from those of the incoming dict: "
            f"{', '.join(keys[:5])}{', …' if len(keys) > 5 else ''} on one side alone"
        )
    is_number = describe(tree) in ("bool", "int", "float", "complex")
    hint = ": send np.array(x)" if is_number and not isinstance(out, (list, tuple, dict)) else ""
    return TypeError(f"{where}: is {describe(out)}, the incoming value is {describe(tree)}{hint}")


def parse(
    meta: bytes | memoryview, *, max_bytes: int = sys.maxsize, allow_pickle: bool = False
) -> Incoming:
    """Read the metadata of a message. Allocates nothing for the arrays.

    Raises ProtocolError for bytes that `encode` does not make, and MessageTooLargeError if metadata
    or arrays are over `max_bytes`.
    """
    if len(meta) > max_bytes:
        raise MessageTooLargeError(_too_large(len(meta), "metadata", max_bytes))
    is_one = 2 <= len(meta) <= _SHORT and meta[0] == 1 and meta[1] in _EXTENSIONS
    array = _array_in(bytes(meta)) if is_one else None
    if array is not None:
        incoming = Incoming(_Leaf(0, array), [array], allow_pickle)
    else:
        reader = _Reader()
        tree = reader.read(meta)
        incoming = Incoming(tree, reader.specs, allow_pickle, reader.has_pickles)
    if incoming.nbytes > max_bytes:
        raise MessageTooLargeError(_too_large(incoming.nbytes, "arrays", max_bytes))
    return incoming


# A peer that sends many different metadata only pushes out the entries of others: entries are
# short, and their number is bounded. Errors are not kept, but raised again each time.
@lru_cache(maxsize=_KEPT)
def _array_in(meta: bytes) -> Spec | None:
    """Return the array that a value is, by its metadata; None if it is anything else."""
    reader = _Reader()
    return reader.specs[0] if isinstance(reader.read(meta), _Leaf) else None


def _too_large(nbytes: int, what: str, max_bytes: int) -> str:
    return (
        f"a message with {nbytes} bytes of {what} is over max_message_bytes={max_bytes}: "
        "raise it, or send less at once"
    )


class _Reader:
    """Builds the tree of a list of tokens. MAX_DEPTH bounds the recursion.

    Nothing here trusts the sender. The claimed size of a container reserves no memory, because
    items are taken one by one from tokens that have come. So a container of four billion items ends
    with an error. No class is looked up by name, and the sender cannot choose a function to call: a
    pickle stays bytes.
    """

    def __init__(self) -> None:
        self._stream: Iterator[Any] = iter(())
        self.specs: list[Spec] = []
        self.has_pickles = False

    def read(self, meta: bytes | memoryview) -> Any:
        """Return the tree. Call it once. Raises ProtocolError."""
        if core is not None:
            tree = core.read_value(meta, self.extension)
            if tree is not NotImplemented:
                return tree
            self.specs, self.has_pickles = [], False
        return self.read_tokens(tokens.unpack(meta))

    def read_tokens(self, stream: list[Any]) -> Any:
        """Return the tree of these tokens."""
        self._stream = iter(stream)
        tree = self._value(0)
        if next(self._stream, _END) is not _END:
            raise ProtocolError("the metadata holds more than one value")
        return tree

    def _value(self, depth: int) -> Any:
        token: Any = next(self._stream, _END)
        kind = type(token)
        if kind in PLAIN or kind is int:
            return token
        if kind is not msgpack.ExtType:
            what = "nothing" if token is _END else f"a {kind.__name__}"
            raise ProtocolError(f"expected a value in the metadata, got {what}")
        code, data = token
        if code in (tokens.LIST, tokens.TUPLE, tokens.DICT):
            if depth >= MAX_DEPTH:
                raise ProtocolError(f"a value nested over {MAX_DEPTH} levels deep")
            return self._container(code, tokens.read_count(data), depth + 1)
        return self.extension(code, data)

    def extension(self, code: int, data: bytes) -> Any:
        """Return the leaf that this extension is."""
        if code == tokens.ARRAY:
            leaf = _Leaf(len(self.specs), tokens.read_array(data))
            self.specs.append(leaf.spec)
            return leaf
        if code == tokens.BIG_INT:
            return int.from_bytes(data, "little", signed=True)
        if code == tokens.COMPLEX:
            return tokens.read_complex(data)
        if code == tokens.SCALAR:
            return tokens.read_scalar(data)
        if code == tokens.PICKLE:
            self.has_pickles = True
            return _Pickled(data)
        raise ProtocolError(f"an extension of unknown type {code} in the metadata")

    def _container(self, code: int, count: int, depth: int) -> Any:
        if code == tokens.DICT:
            tree: dict[Any, Any] = {}
            for _ in range(count):
                key = self._value(depth)
                if not _is_key(key):
                    raise ProtocolError(f"a key of type {type(key).__name__} in the metadata")
                tree[key] = self._value(depth)
            if len(tree) != count:
                raise ProtocolError("a dict with equal keys in the metadata")
            return tree
        items = [self._value(depth) for _ in range(count)]
        return items if code == tokens.LIST else tuple(items)


def read(meta: memoryview, data: memoryview) -> tuple[Any, list[Spec]]:
    """Return the value that `meta` describes, and its arrays. These are copied from `data`, where
    their bytes are in order.

    Raises ProtocolError, and TypeError if the value has pickles, or an array that cannot be made
    here.
    """
    if core is not None and not data:
        plain = core.read_value(meta)
        if plain is not NotImplemented:
            return plain, []
    reader = _Copier(data)
    value = reader.read(meta)
    if reader.at != len(data):
        raise ProtocolError(f"{len(data)} bytes came for arrays of {reader.at}")
    return value, reader.specs


class _Copier(_Reader):
    """Makes the value at once, with new arrays."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self.at = 0  # where the next array begins

    def extension(self, code: int, data: bytes) -> Any:
        leaf = super().extension(code, data)
        if type(leaf) is _Pickled:
            raise TypeError("pickles are read by `parse` only")
        if type(leaf) is not _Leaf:
            return leaf
        spec, at = leaf.spec, self.at if leaf.index else 0
        self.at = at + spec.nbytes
        if self.at > len(self._data) or spec.kind == "device":
            raise ProtocolError(f"the bytes of an array {spec} did not come")
        if spec.kind == "numpy":
            return np.ndarray(spec.shape, carrier(spec.name), self._data, at).copy()
        made = arrays.empty(spec.kind, spec.name, spec.shape, "value")
        if spec.nbytes:
            byte_view(made.read())[:] = self._data[at : self.at]
        return made.value


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return type(key) in PLAIN or type(key) is int


def describe(value: object) -> str:
    """Describe a value in short, for texts: `float32[1024]`, `list[3]`, `int`."""
    if isinstance(value, _Leaf):
        return str(value.spec)
    if isinstance(value, (list, tuple, dict)):
        kind = next(k for k in (list, tuple, dict) if isinstance(value, k))
        return f"{kind.__name__}[{len(value)}]"
    if value is None:
        return "None"
    if isinstance(value, _Pickled):
        return "a pickled object"
    try:
        array = view(value, "value")
    except (TypeError, ValueError):
        array = None
    if array is None or array.kind == "scalar":
        return type(value).__name__
    return str(array)


def fill(buffers: Sequence[memoryview], data: bytes | memoryview) -> None:
    """Spread `data` over `buffers`, in order. Their sizes add up to its length."""
    at = 0
    for buffer in buffers:
        buffer[:] = data[at : at + buffer.nbytes]
        at += buffer.nbytes
