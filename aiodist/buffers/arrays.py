"""All kinds of arrays, seen alike: their memory as a numpy array of the carrier dtype."""

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
"""Types that are buffers and nothing else. Their memory counts as a numpy array. bytes are not
among them, because they are a value of their own."""

Kind = Literal["numpy", "torch", "scalar", "other", "device"]
"""numpy array, torch tensor, numpy scalar, anything else with `__dlpack__`, or an array of a
device.

"device" occurs in messages. On the host such an array becomes a torch tensor, or a numpy array if
there is no torch.
"""


@lru_cache(maxsize=1024)
def shown(name: str, shape: tuple[int, ...]) -> str:
    """Show an array in a text: `float32[3,4]`."""
    return f"{name}[{','.join(map(str, shape))}]"


class UserArray:
    """An array of a user.

    `value` is the user's object, and `name` its dtype. `base` is its memory as a numpy array of the
    same shape, with any strides and byte order. `is_flat`: this memory can travel as it is, because
    it is contiguous and little-endian. `frozen` says why the memory cannot be written in place ("is
    read-only"), or is None.
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
        """Return the elements: the memory itself if it is flat, else a copy."""
        base = self.base
        if not self.is_flat:
            base = np.array(base, dtype=carrier(self.name), order="C")
        return base.reshape(-1)

    def stage(self) -> tuple[Flat, Flat | None]:
        """Return memory for new elements: the memory itself if it is flat, else an uninitialised
        array.

        The second item is what to `commit` when it is filled.
        """
        if self.is_flat:
            return self.base.reshape(-1), None
        staged = np.empty(self.base.size, carrier(self.name))
        return staged, staged

    def commit(self, staged: Flat | None) -> None:
        """Take the new elements: copy them if they were staged, and tell autograd."""
        if staged is not None:
            np.copyto(self.base, staged.reshape(self.base.shape))
        if self.kind == "torch":
            tensors.mark_written(self.value)


def view(value: Any, where: Where) -> UserArray | None:
    """Return `value` as an Array, or None if it is not an array.

    Raises TypeError, naming `where`, for arrays that do not travel: object and record dtypes,
    masked arrays, tensors on other devices, sparse or quantised ones.
    """
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"{where}: a masked array does not travel: send data and mask apart")
        frozen = None if value.flags.writeable else "is read-only"
        # asarray, because subclasses may have shapes of their own: np.matrix never has one
        # dimension.
        return UserArray(value, "numpy", _name(value, where), np.asarray(value), frozen)
    if tensors.is_tensor(value):
        try:
            name, base, frozen = tensors.memory(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from error
        return UserArray(value, "torch", name, base, frozen)
    if isinstance(value, np.generic):
        scalar = np.asarray(value)
        return UserArray(
            value, "scalar", _name(scalar, where), scalar, "is a numpy scalar, not an array"
        )
    if isinstance(value, BUFFERS):
        try:
            base = np.asarray(memoryview(value))
        except (TypeError, ValueError) as error:  # its format is one of Python's own
            raise TypeError(
                f"{where}: numpy cannot read this {type(value).__name__} as numbers ({error}): "
                "pass a numpy array"
            ) from error
        frozen = None if base.flags.writeable else "is read-only"
        return UserArray(value, "numpy", _name(base, where), base, frozen)
    # Last, because its view is the weakest: it knows nothing of the other library's streams or
    # locks. So such an array is read in place, but never written.
    if hasattr(value, "__dlpack__") and not isinstance(value, type):
        try:
            base = np.from_dlpack(value)
        except Exception as error:  # whatever the exporter raises
            raise TypeError(
                f"{where}: numpy cannot read this {type(value).__name__} by __dlpack__ ({error}): "
                "pass a numpy array or a torch tensor on the CPU"
            ) from error
        frozen = f"is a {type(value).__name__}, neither a numpy array nor a torch tensor"
        return UserArray(value, "other", _name(base, where), base, frozen)
    return None


# Three short ways to the memory of an array, for calls that take microseconds. `view` examines
# anything that may be an array, and can say what is wrong with it. These return None for anything
# unusual, and the caller then takes the long way. They differ in what the caller knows already:
# nothing (`plain`), dtype and length (`flat`), or the size in bytes (`window`).
#
# Subclasses of ndarray take the long way, because they may redefine `reshape`.


def plain(value: Any) -> Flat | None:
    """Return the flat memory of a contiguous, writable numpy array or tensor, of any dtype in the
    byte order of this machine.

    Returns None for a subclass or anything else unusual: take the long way.
    """
    cls = type(value)
    if cls is np.ndarray:
        return value.reshape(-1) if value.flags.carray and value.dtype.isnative else None
    return tensors.plain(value) if cls is tensors.plain_type() else None


def flat(value: Any, dtype: np.dtype[Any], length: int) -> Flat | None:
    """Return the flat memory of a numpy array or tensor of `length` elements with carrier `dtype`.

    Returns None for a subclass or anything else unusual: take the long way.
    """
    if type(value) is np.ndarray:
        return value.reshape(-1) if value.flags.carray else None
    return tensors.flat(value, dtype, length)


def window(value: Any, nbytes: int) -> memoryview | None:
    """Return the memory of a numpy array or tensor as `nbytes` bytes.

    Returns None for a subclass or anything else unusual: take the long way.
    """
    if type(value) is np.ndarray:
        if not value.flags.carray:
            return None
        try:
            return value.data.cast("B")
        except (TypeError, ValueError):  # buffers know neither times nor empty arrays
            return value.reshape(-1).view(np.uint8).data
    found = tensors.flat(value, _BYTE, nbytes)
    return None if found is None else found.data


def writable(value: object, where: Where) -> UserArray:
    """Return `value` as an Array whose memory can be written in place.

    Raises TypeError if it is not an array, or not of a kind that is written in place. Raises
    ValueError if it is read-only, or if several of its elements share memory.
    """
    array = view(value, where)
    if array is None:
        raise TypeError(
            f"{where}: expected a numpy array or torch tensor to write to, "
            f"got {type(value).__name__}"
        )
    check_writable(array, where)
    return array


def check_writable(array: UserArray, where: Where) -> None:
    """Raise as `writable` does."""
    if array.frozen is not None:
        error = TypeError if array.kind in ("scalar", "other") else ValueError
        raise error(f"{where}: {array} {array.frozen}: nothing can be written there")
    if not array.base.flags.c_contiguous and overlaps.folds(array.base):
        raise ValueError(
            f"{where}: several elements of {array} share one place in memory (it was expanded or "
            "broadcast, or has windows that slide): nothing can be written there"
        )


def check_same(
    expected: str, name: str, shape: tuple[int, ...], got: UserArray, where: Where
) -> None:
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
    """Make the error for an array of another dtype or shape."""
    error = TypeError if got_name != name else ValueError
    text = f"{where}: is {shown(got_name, got_shape)}, {expected} is {shown(name, shape)}"
    return error(text)


def empty(kind: Kind, name: str, shape: tuple[int, ...], where: Where) -> UserArray:
    """Make a new, uninitialised array: a numpy array, or a tensor for the kind "torch".

    If torch is not installed, a tensor becomes a numpy array. Raises TypeError for dtypes that only
    a (newer) torch has.
    """
    if kind == "torch" or (kind == "device" and name in TORCH):
        torch = tensors.require()
        if torch is not None:
            try:
                tensor = tensors.empty(torch, name, shape)
            except TypeError as error:
                raise TypeError(f"{where}: {error}") from error
            return UserArray(tensor, "torch", name, tensors.memory(tensor)[1], None)
        if name in CARRIERS:
            raise TypeError(f"{where}: {shown(name, shape)} needs torch: install it on this rank")
    array = np.empty(shape, carrier(name))
    return UserArray(array, "numpy", name, array, None)


def kind_and_name(dtype: Any, like: object) -> tuple[Kind, str]:
    """Return kind and dtype of a new array: of `dtype` (numpy's or torch's), or like an array.

    Raises TypeError if the dtype does not travel, and unless exactly one of the two is given.
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
    """Return the array of that kind, dtype and shape over flat memory of bytes."""
    array = memory.view(carrier(name)).reshape(shape)
    return tensors.wrap(array, name) if kind == "torch" else array


def _name(array: NDArray[Any], where: Where) -> str:
    name = name_of(array.dtype)
    if name is None:
        hint = ""
        if array.dtype.names:
            hint = ". Send {name: x[name] for name in x.dtype.names}"
        elif array.dtype.hasobject:
            hint = ". Send x.tolist(), or convert it to numbers"
        raise TypeError(
            f"{where}: a numpy array of dtype {array.dtype} does not travel: "
            f"numbers, bools, times and fixed-size strings do{hint}"
        )
    return name
