"""Encode values of users: as metadata and the bytes of arrays.

`encode` makes a message of a value without copying its arrays. `aiodist.buffers.values` decodes:
`parse` reads the metadata of a message without trusting it. The `Incoming` that it returns makes
the memory for the bytes of the arrays, and finally the value::

    sender                              wire                    receiver

    encode(value) -> Encoded.meta       tree, dtypes, shapes    parse(meta) -> Incoming
                                                                .allocate(out) -> .buffers
                     Encoded.buffers    bytes of the arrays     each buffer filled, in order
                                                                .finish() -> the value

**Why two parts.** The metadata is small, and has to be read as a whole. The bytes of arrays are
large, and need no reading. Because the metadata comes first, the receiver knows the place of each
array before its first byte comes. So a socket can be read straight into the user's array. A message
that is too large, or does not fit into `out`, is refused before it takes any memory.
"""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack
import numpy as np

from aiodist.buffers import arrays, tokens
from aiodist.buffers.arrays import Flat, view
from aiodist.buffers.dtypes import carrier
from aiodist.buffers.foreign import Giver
from aiodist.buffers.packed_numbers import fits
from aiodist.buffers.paths import Path, Where
from aiodist.buffers.tokens import MAX_DEPTH, PLAIN, Spec
from aiodist.compiled import core

_KEPT: Final = 1024
"""How many are kept. Then all are dropped in one step, because ranks may run in several threads."""
_described: Final[dict[tuple[Any, Any], tuple[bytes, tuple[Spec, ...]]]] = {}
"""Metadata and specs of recent values that are one flat array, by its dtype and shape."""


class Encoded:
    """A value, ready to be sent.

    `meta` is what `parse` takes. `buffers` are byte views of the arrays, in order, without empty
    ones; they keep the memory alive. `nbytes` is their sum. `specs` has dtype and shape of each
    array. `gaps` tells, for each foreign array, how many buffers come before it, and `elsewhere`
    the bytes of these arrays.
    """

    __slots__ = ("buffers", "elsewhere", "gaps", "meta", "nbytes", "specs")

    def __init__(
        self,
        meta: bytes,
        buffers: list[memoryview],
        specs: tuple[Spec, ...],
        gaps: Sequence[int] = (),
    ) -> None:
        self.meta = meta
        self.buffers = buffers
        self.nbytes = sum([b.nbytes for b in buffers]) if buffers else 0
        self.specs = specs
        self.gaps = gaps
        self.elsewhere = sum([s.nbytes for s in specs if s.kind == "device"]) if gaps else 0

    def fill(self, copies: Sequence[memoryview]) -> None:
        """Take copies of the foreign arrays, which are on the host from here on."""
        self.buffers = self.filled(copies)
        self.nbytes += self.elsewhere
        self.elsewhere, self.gaps = 0, ()

    def filled(self, copies: Sequence[Any]) -> list[Any]:
        """Return all buffers, with the foreign arrays, or copies of them, in their places."""
        # The wire does not mark the ends of arrays: the receiver cuts the bytes by the sizes in the
        # metadata, in the order of the tree. So arrays that were left out, because they are on a
        # device, must be put back in their places, which `gaps` tells. For a tree with arrays of
        # the host (h) and a device (d)::
        #
        #     tree       h0   d0   h1   d1   d2
        #     buffers    h0        h1               gaps = (1, 2, 2)
        #     filled     h0   d0   h1   d1   d2
        #
        # A gap counts buffers, and not arrays, because empty arrays have no buffer.
        joined: list[Any] = []
        start = 0
        for gap, data in zip(self.gaps, copies, strict=True):
            joined += self.buffers[start:gap]
            if data.nbytes:
                joined.append(data)
            start = gap
        return joined + self.buffers[start:]


def encode(
    value: object, *, allow_pickle: bool | None = False, foreign: Giver | None = None
) -> Encoded:
    """Make the message of a value. `foreign` takes out arrays that are not on the host.

    `allow_pickle`: None if users of the caller have no such option. Then errors do not name it.

    Arrays that are contiguous and little-endian are not copied. Raises TypeError, naming the path,
    for a leaf that cannot travel, and ValueError for a tree over 100 levels deep.
    """
    array: Any = value
    # Nearly all values are one plain array. Its metadata depends only on dtype and shape, and a
    # lookup takes far less time than making it. Trees are not looked up, because a key would need a
    # walk over the tree, which is most of the cost of encoding it.
    flat = arrays.plain(array)
    if flat is not None:
        found = _described.get((array.dtype, array.shape))
        if found is not None:
            meta, specs = found
            return Encoded(meta, [byte_view(flat)] if flat.nbytes else [], specs)
    elif core is not None:
        # Foreign arrays are left to the walk below, because each may be taken out only once.
        refuses = None if foreign is None else foreign.is_foreign
        encoder = _Encoder(allow_pickle, None, refuses)
        try:
            written = core.write_value(value, sys.maxsize, encoder.leaf)
        except (TypeError, ValueError):
            written = None  # the walk raises it again, and names the place
        if written is not None:
            return Encoded(written, encoder.buffers, tuple(encoder.specs))
    encoder = _Encoder(allow_pickle, foreign)
    encoder.put(value, "value", 0)
    meta, specs = tokens.pack(encoder.tokens), tuple(encoder.specs)
    encoded = Encoded(meta, encoder.buffers, specs, encoder.gaps)
    if flat is not None and encoder.direct:
        _keep(array, encoded.meta, encoded.specs)
    return encoded


def _keep(array: Any, meta: bytes, specs: tuple[Spec, ...]) -> None:
    """Keep the metadata of an array that travels as it lies in memory.

    One of the other byte order has the same name, but its bytes have to be turned each time.
    """
    if len(_described) >= _KEPT:
        _described.clear()
    _described[array.dtype, array.shape] = meta, specs


def encode_plain(value: object, most: int) -> bytes | None:
    """Make the metadata of a value without arrays.

    None: it has arrays, or cannot travel, or the metadata has more than `most` bytes.
    """
    encoded = encode_within(value, most, refuses=_is_array)
    return None if encoded is None or encoded.specs else encoded.meta


def encode_within(
    value: object, most: int, *, refuses: Callable[[Any], bool] | None = None
) -> Encoded | None:
    """Make the message of a value of at most `most` bytes, all on the host and without pickles.

    None: the value is something else, or has a leaf that `refuses` says True to. `encode` says what
    is wrong, if anything is.
    """
    if core is not None and (written := core.write_value(value, most)) is not None:
        return Encoded(written, [], ())  # without arrays
    encoder = _Encoder(False, None, refuses, most)
    try:
        if core is not None:
            meta = core.write_value(value, most, encoder.leaf)
        else:
            encoder.put(value, "value", 0)
            meta = tokens.pack(encoder.tokens)
    except (TypeError, ValueError):
        return None
    if meta is None:
        return None
    encoded = Encoded(meta, encoder.buffers, tuple(encoder.specs))
    return encoded if len(meta) + encoded.nbytes <= most else None


def _is_array(leaf: object) -> bool:
    return not isinstance(leaf, np.generic) and view(leaf, "value") is not None


class _Encoder:
    """Walks over a value once, in preorder, and collects what `Encoded` holds."""

    def __init__(
        self,
        allow_pickle: bool | None,
        foreign: Giver | None,
        refuses: Callable[[Any], bool] | None = None,
        most: int = sys.maxsize,
    ) -> None:
        self._room = most  # bytes that may still come
        self.allow_pickle = allow_pickle  # whether other objects may travel, as pickles
        self._refuses = refuses  # whether `leaf` raises TypeError for a leaf
        self._packer: Any = None  # packs tokens for `leaf`
        self.foreign = foreign  # takes arrays that are on devices; None: there are none
        self.gaps: list[int] = []  # for each of those, how many buffers come before it
        self.tokens: list[Any] = []  # the tree, flat
        self.buffers: list[memoryview] = []  # the bytes of its arrays
        self.specs: list[Spec] = []  # dtypes and shapes of its arrays
        self.direct = True  # all arrays travel as they lie in memory

    def put(self, value: Any, where: Where, depth: int) -> None:
        # Exact types first, because they are the most common and need one lookup in a set. Others
        # may be subclasses (np.float64 is a float, np.str_ is a str, True is an int). So we ask for
        # arrays before numbers, because a numpy scalar keeps its dtype.
        kind = type(value)
        self._charge(len(value) if kind is str or kind is bytes else 1)
        if kind in PLAIN:
            self.tokens.append(value)
        elif kind is int:
            self.tokens.append(_int(value))
        elif not self._array(value, where):
            if isinstance(value, (list, tuple, dict)):
                self._container(value, where, depth + 1)
            elif (plain := _plain(value)) is not None:
                self.tokens.append(plain)
            else:
                self._pickle(value, where)

    def leaf(self, value: Any) -> Any:
        """Return the token of a leaf of a type that the compiled part does not know.

        It is a bytearray, or an object of another type that travels in place of the leaf.
        """
        if self._refuses is not None and self._refuses(value):
            raise TypeError("this leaf is not for the compiled part")
        flat = arrays.plain(value)
        if flat is not None and (found := _described.get((value.dtype, value.shape))) is not None:
            meta, specs = found
            self.specs += specs
            self._charge(flat.nbytes)
            if flat.nbytes:
                self.buffers.append(byte_view(flat))
            return bytearray(meta[1:])  # without the number of tokens
        if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.nbytes <= 8:
            self.tokens.append(tokens.scalar(value.dtype.name, value.tobytes()))
        elif not self._array(value, "value"):
            if isinstance(value, dict):
                return dict(value.items())
            if isinstance(value, list):
                return list(value)
            if isinstance(value, tuple) and not hasattr(value, "_fields"):
                return tuple(value)
            if isinstance(value, tuple):
                self._named_tuple(value, "value")
            elif (plain := _plain(value)) is not None:
                self.tokens.append(plain)
            else:
                self._pickle(value, "value")
        token = self.tokens.pop()
        if type(token) is int and fits(token):
            return token
        if flat is not None and self.direct:
            _keep(value, tokens.pack([token]), (self.specs[-1],))
        if self._packer is None:
            self._packer = tokens.packer()
        return bytearray(self._packer.pack(token))

    def _array(self, value: Any, where: Where) -> bool:
        if isinstance(value, (str, bytes, list, tuple, dict)):  # np.str_ is a str
            return False
        if self.foreign is not None and (given := self.foreign.give(value, where)) is not None:
            name, shape = given
            self.tokens.append(tokens.array("device", name, shape))
            nbytes = math.prod(shape) * carrier(name).itemsize
            self.specs.append(Spec("device", name, shape, nbytes))
            self.gaps.append(len(self.buffers))
            return True
        array = view(value, where)
        if array is None:
            return False
        self.direct = self.direct and array.is_flat
        if array.kind == "scalar":
            self.tokens.append(tokens.scalar(array.name, array.read().tobytes()))
            return True
        self._charge(array.base.nbytes)  # before it is read, which may copy it
        flat = array.read()
        kind: arrays.Kind = "torch" if array.kind == "torch" else "numpy"
        self.tokens.append(tokens.array(kind, array.name, array.shape))
        self.specs.append(Spec(kind, array.name, array.shape, flat.nbytes))
        if flat.nbytes:
            self.buffers.append(byte_view(flat))
        return True

    def _charge(self, nbytes: int) -> None:
        self._room -= nbytes
        if self._room < 0:
            raise ValueError("the value takes more bytes than it may")

    def _container(self, value: Any, where: Where, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ValueError(tokens.TOO_DEEP)
        if isinstance(value, dict):
            self.tokens.append(tokens.container(tokens.DICT, len(value)))
            for key, item in value.items():
                self._key(key, where, depth)
                self.put(item, Path(where, key), depth)
            return
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            self._named_tuple(value, where)
            return
        code = tokens.LIST if isinstance(value, list) else tokens.TUPLE
        self.tokens.append(tokens.container(code, len(value)))
        for index, item in enumerate(value):
            self.put(item, Path(where, index), depth)

    # The receiver looks up no class by name, so a named tuple would become a plain tuple, and a
    # program that reads its fields would fail far from here.
    def _named_tuple(self, value: Any, where: Where) -> None:
        if not self.allow_pickle:
            hint = "" if self.allow_pickle is None else " (or give allow_pickle=True on all ranks)"
            raise TypeError(
                f"{where}: a {type(value).__name__}, a named tuple, does not travel as what it is: "
                f"send tuple(…) or ._asdict() of it{hint}"
            )
        self._pickle(value, where)

    # A key has to be hashable and equal to itself at the receiver. Plain values are, and tuples of
    # them, but not arrays. A tuple counts as a level of depth, because its reader recurses for each
    # level.
    def _key(self, key: Any, where: Where, depth: int) -> None:
        if type(key) in PLAIN:
            self.tokens.append(key)
        elif isinstance(key, tuple):
            if depth >= MAX_DEPTH:
                raise ValueError(f"the keys of a dict are nested over {MAX_DEPTH} levels deep")
            self.tokens.append(tokens.container(tokens.TUPLE, len(key)))
            for item in key:
                self._key(item, where, depth + 1)
        elif isinstance(key, (str, int, bytes, float)):
            self.tokens.append(_plain(key))
        else:
            raise TypeError(
                f"{where}: a key of type {type(key).__name__} does not travel: str, int, bytes, "
                "bool, None, float and tuples of these do"
            )

    def _pickle(self, value: Any, where: Where) -> None:
        if not self.allow_pickle:
            hint = " (other objects with allow_pickle=True on all ranks)"
            if self.allow_pickle is None:
                hint = ". Of a torch module, publish its `state_dict()`"
            raise TypeError(
                f"{where}: a value of type {type(value).__name__} does not travel: arrays, "
                f"numbers, str, bytes, None and list, tuple, dict of these do{hint}"
            )
        try:
            data = pickle.dumps(value, protocol=5)
        except Exception as error:  # whatever __reduce__ raises
            raise TypeError(
                f"{where}: this {type(value).__name__} cannot be pickled: {error}"
            ) from error
        self.tokens.append(msgpack.ExtType(tokens.PICKLE, data))


def _plain(value: Any) -> Any | None:
    """Return the token of a number, a string or a subclass of these; None for anything else.

    The methods of the base classes are called by name, because a subclass may override them, as an
    `enum.IntEnum` does.
    """
    if isinstance(value, int):
        return _int(int.__index__(value))
    if isinstance(value, complex):
        return tokens.complex_number(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes(memoryview(value))
    return float.__float__(value) if isinstance(value, float) else None


def _int(value: int) -> Any:
    # msgpack has a limit for ints, and Python does not.
    return value if -(2**63) <= value < 2**64 else tokens.big_int(value)


def byte_view(flat: Flat) -> memoryview:
    """Return the bytes of a flat array; writable if it is."""
    return flat.view(np.uint8).data
