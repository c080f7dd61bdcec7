"""One look at all kinds of arrays: their memory as a numpy array of the carrier dtype."""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from aiodist.buffers import overlaps, tensors
from aiodist.buffers.dtypes import CARRIERS, TORCH, carrier, name_of
from aiodist.buffers.paths import Where

Flat = NDArray[Any]
"""A one-dimensional, contiguous, little-endian array of a carrier dtype."""

_BYTE: Final = np.dtype(np.uint8)
BUFFERS: Final = (bytearray, memoryview, array)
"""What is a buffer and nothing else: its memory is taken for a numpy array. bytes are a value of
their own, and stay what they are."""

Kind = Literal["numpy", "torch", "scalar", "other", "device"]
"""numpy array, torch tensor, numpy scalar, anything else with `__dlpack__`; in messages, an array
of a device (where it comes to the host, a torch tensor, or a numpy array if there is no torch)."""


@lru_cache(maxsize=1024)
def shown(name: str, shape: tuple[int, ...]) -> str:
    """How texts show an array: `float32[3,4]`."""
    return f"{name}[{','.join(map(str, shape))}]"


class Array:
    """An array of a user.

    `value` is the user's object, `name` the dtype, `base` its memory as a numpy array of the same
    shape (any strides, any byte order). `is_flat`: whether that memory is what travels, as it is:
    contiguous and little-endian. `frozen` says why the memory cannot be written in place
    ("is read-only"); None: it can.
    """

    __slots__ = ("base", "frozen", "is_flat", "kind", "name", "value")

    def __init__(
        self, value: Any, kind: Kind, name: str, base: NDArray[Any], frozen: str | None
    ) -> None:
        self.value = value
        self.kind: Kind = kind
        self.name = name
        self.base = base
        self.frozen = frozen
        self.is_flat: bool = base.flags.c_contiguous and base.dtype == carrier(name)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def __str__(self) -> str:
        return shown(self.name, self.base.shape)

    def read(self) -> Flat:
        """The elements: the memory itself where it is flat, else a copy."""
        base = self.base
        if not self.is_flat:
            base = np.array(base, dtype=carrier(self.name), order="C")
        return base.reshape(-1)

    def stage(self) -> tuple[Flat, Flat | None]:
        """Where to write new elements: the memory itself where it is flat, else an uninitialised
        staging array. The second item is what to `commit` when it is filled."""
        if self.is_flat:
            return self.base.reshape(-1), None
        staged = np.empty(self.base.size, carrier(self.name))
        return staged, staged

    def commit(self, staged: Flat | None) -> None:
        """New elements are written: copy them where they were staged, and tell autograd."""
        if staged is not None:
            np.copyto(self.base, staged.reshape(self.base.shape))
        if self.kind == "torch":
            tensors.mark_written(self.value)


def view(value: Any, where: Where) -> Array | None:
    """`value` as an Array, None if it is none.

    Raises TypeError, naming `where`, for arrays that do not travel: object and record dtypes,
    masked arrays, tensors on other devices, sparse or quantised ones.
    """
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"{where}: a masked array does not travel: send data and mask apart")
        frozen = None if value.flags.writeable else "is read-only"
        # Subclasses have shapes of their own: np.matrix never has one dimension.
        return Array(value, "numpy", _name(value, where), np.asarray(value), frozen)
    if tensors.is_tensor(value):
        try:
            name, base, frozen = tensors.memory(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from error
        return Array(value, "torch", name, base, frozen)
    if isinstance(value, np.generic):
        scalar = np.asarray(value)
        return Array(value, "scalar", _name(scalar, where), scalar, "is a numpy scalar")
    if isinstance(value, BUFFERS):
        try:
            base = np.asarray(memoryview(value))
        except (TypeError, ValueError) as error:  # of a format of Python's own
            raise TypeError(
                f"{where}: numpy cannot read this {type(value).__name__} as numbers ({error}): "
                "pass a numpy array"
            ) from error
        frozen = None if base.flags.writeable else "is read-only"
        return Array(value, "numpy", _name(base, where), base, frozen)
    # Last, as it is the least of them: an array of another library is read where it lies, but by a
    # view that knows nothing of that library's streams or locks, so it is never written.
    if hasattr(value, "__dlpack__") and not isinstance(value, type):
        try:
            base = np.from_dlpack(value)
        except Exception as error:  # whatever the exporter raises
            raise TypeError(
                f"{where}: numpy cannot read this {type(value).__name__} by __dlpack__ ({error}): "
                "pass a numpy array or a torch tensor on the CPU"
            ) from error
        frozen = f"is a {type(value).__name__}, neither a numpy array nor a torch tensor"
        return Array(value, "other", _name(base, where), base, frozen)
    return None


# Three short ways to the memory of an array, for calls that take microseconds as a whole. `view`
# looks at whatever may be an array, and can say what is wrong with it; these say None for anything
# that is out of the ordinary, and the caller takes the long way, which finds the words. They differ
# in what the caller knows already: nothing (`plain`), the dtype and the length, since it keeps
# something by these (`flat`), or the size in bytes (`window`).
#
# A subclass of ndarray is none of theirs: it may have another idea of `reshape`.


def plain(value: Any) -> Flat | None:
    """The memory of a numpy array or torch tensor that is contiguous, writable and nothing special
    (no subclass): flat, without a look at its dtype. None: take the long way."""
    cls = type(value)
    if cls is np.ndarray:
        return value.reshape(-1) if value.flags.carray else None
    return tensors.plain(value) if cls is tensors.plain_type() else None


def flat(value: Any, dtype: np.dtype[Any], length: int) -> Flat | None:
    """The memory of a numpy array or torch tensor (no subclass) of `length` elements whose carrier
    is `dtype`, flat. None: take the long way."""
    if type(value) is np.ndarray:
        return value.reshape(-1) if value.flags.carray else None
    return tensors.flat(value, dtype, length)


def window(value: Any, nbytes: int) -> memoryview | None:
    """The memory of a numpy array or torch tensor (no subclass) as `nbytes` bytes. None: take the
    long way."""
    if type(value) is np.ndarray:
        if not value.flags.carray:
            return None
        try:
            return value.data.cast("B")
        except (TypeError, ValueError):  # of times, and of no elements: buffers know neither
            return value.reshape(-1).view(np.uint8).data
    found = tensors.flat(value, _BYTE, nbytes)
    return None if found is None else found.data


def writable(value: object, where: Where) -> Array:
    """`value` as an Array whose memory can be written in place.

    Raises TypeError for what is no array or not of a kind that is written in place, ValueError
    for a read-only one or one whose elements share memory.
    """
    array = view(value, where)
    if array is None:
        raise TypeError(
            f"{where}: expected a numpy array or torch tensor to write to, "
            f"got {type(value).__name__}"
        )
    check_writable(array, where)
    return array


def check_writable(array: Array, where: Where) -> None:
    """Raise as `writable` does."""
    if array.frozen is not None:
        error = TypeError if array.kind in ("scalar", "other") else ValueError
        raise error(f"{where}: {array} {array.frozen}: nothing can be written there")
    if not array.base.flags.c_contiguous and overlaps.folds(array.base):
        raise ValueError(
            f"{where}: several elements of {array} share one place in memory (it was expanded or "
            "broadcast, or has windows that slide): nothing can be written there"
        )


def check_same(expected: str, name: str, shape: tuple[int, ...], got: Array, where: Where) -> None:
    """Raise TypeError or ValueError unless `got` has this dtype and shape."""
    if got.name != name or got.shape != shape:
        raise misfit(expected, name, shape, got.name, got.shape, where)


def misfit(
    expected: str,
    name: str,
    shape: tuple[int, ...],
    got_name: str,
    got_shape: tuple[int, ...],
    where: Where,
) -> Exception:
    """What is raised for an array of another dtype, or another shape."""
    error = TypeError if got_name != name else ValueError
    text = f"{where}: is {shown(got_name, got_shape)}, {expected} is {shown(name, shape)}"
    return error(text)


def empty(kind: Kind, name: str, shape: tuple[int, ...], where: Where) -> Array:
    """A new, uninitialised array; numpy for all kinds but torch.

    A tensor is made as a numpy array where torch is not installed. Raises TypeError for dtypes
    that only a (newer) torch has.
    """
    if kind == "torch" or (kind == "device" and name in TORCH):
        torch = tensors.require()
        if torch is not None:
            try:
                tensor = tensors.empty(torch, name, shape)
            except TypeError as error:
                raise TypeError(f"{where}: {error}") from error
            return Array(tensor, "torch", name, tensors.memory(tensor)[1], None)
        if name in CARRIERS:
            raise TypeError(f"{where}: {shown(name, shape)} needs torch: install it on this rank")
    array = np.empty(shape, carrier(name))
    return Array(array, "numpy", name, array, None)


def kind_and_name(dtype: Any, like: object) -> tuple[Kind, str]:
    """What a new array is to be: of a dtype of numpy or torch, or as another array is.

    Raises TypeError for what is no dtype, or none that travels, and for both or neither.
    """
    if (dtype is None) == (like is None):
        raise TypeError("give a dtype, or like= an array to have its kind and dtype")
    if like is not None:
        array = view(like, "like")
        if array is None:
            raise TypeError(f"like: expected an array, got {type(like).__name__}")
        return ("torch" if array.kind == "torch" else "numpy"), array.name
    if tensors.is_dtype(dtype):
        name = tensors.dtype_name(dtype)
        if name is None:
            raise TypeError(f"dtype: {dtype} does not travel")
        return "torch", name
    return "numpy", _name(np.empty(0, dtype), "dtype")


def over(memory: Flat, kind: Kind, name: str, shape: tuple[int, ...]) -> Any:
    """The array of that kind, dtype and shape over flat memory of bytes."""
    array = memory.view(carrier(name)).reshape(shape)
    return tensors.wrap(array, name) if kind == "torch" else array


def _name(array: NDArray[Any], where: Where) -> str:
    name = name_of(array.dtype)
    if name is None:
        raise TypeError(
            f"{where}: a numpy array of dtype {array.dtype} does not travel: "
            "numbers, bools, times and fixed-size strings do"
        )
    return name
