"""Which type each operation gives, for type checkers: what is given decides it.

The overloads stand here side by side, and `Operations` has what the operations do, with their
docstrings: ``@typed(Signatures.all_reduce)`` puts the two together. `BlockingGroup` makes its
methods of those of `Operations`, and has their types from here, too. At run time nothing here does
anything.

Two cases are told apart by a type that says more than a class: `Average`, and None for what is left
out. Buffers have overloads of their own, since they arrive as numpy arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import (
    Any,
    Literal,
    Protocol,
    SupportsIndex,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aiodist.codecs.base import Codec
from aiodist.types import SUM, AnyTag, Average, Op, Src, Tag
from aiodist.work import Work


class Array(Protocol):
    """A numpy array, a torch tensor, or an array of another library that has `__dlpack__`."""

    def __dlpack__(self, *args: Any, **options: Any) -> Any: ...


Buffer: TypeAlias = "bytearray | memoryview | array[Any]"
"""What is taken for an array, and arrives as one of numpy."""

Number: TypeAlias = int | float | complex | np.generic

Arrays: TypeAlias = "Array | Buffer | Sequence[Array | np.generic]"
"""What a reduction is done in: an array, or a flat list of arrays."""

Tree: TypeAlias = "Array | Buffer | Sequence[Any] | Mapping[Any, Any]"
"""What a value is received in: an array, or a tree of arrays."""

Given: TypeAlias = "Array | Buffer | ArrayLike"
"""What is written to a part of an array."""

Index: TypeAlias = (
    "SupportsIndex | slice | EllipsisType | tuple[SupportsIndex | slice | EllipsisType, ...]"
)
"""Which part of an array is meant: see `Window.get`."""

# The names are read by users: mypy says "Value of type variable Reducible cannot be str".
T = TypeVar("T")
Reducible = TypeVar("Reducible", bound="Arrays | Number")
Out = TypeVar("Out", bound=Arrays)
Into = TypeVar("Into", bound=Tree)
Place = TypeVar("Place", bound="Array | Buffer")
ArrayT = TypeVar("ArrayT", bound=Array)
BufferT = TypeVar("BufferT", bound=Buffer)
Dtype = TypeVar("Dtype", bound=np.generic)
Method = TypeVar("Method", bound=Callable[..., Any])

Slots: TypeAlias = list[T] | tuple[T, ...]
"""One a rank."""


class Options(TypedDict, total=False):
    """What every collective takes: see `Group`."""

    tag: Tag
    timeout: float | None


class Receiving(TypedDict, total=False):
    """What every receive takes: see `Operations.recv`."""

    src: Src
    tag: str | int | AnyTag
    timeout: float | None


class SendingReceiving(TypedDict, total=False):
    """What every sendrecv takes: see `Operations.sendrecv`."""

    src: Src
    tag: str | int
    recv_tag: str | int | AnyTag | None
    timeout: float | None


class Signatures(Protocol):
    """The operations whose results are of the type of something that they are given."""

    @overload
    def all_reduce(self: Any, x: int, op: Average, **options: Unpack[Options]) -> Work[float]: ...
    @overload
    def all_reduce(
        self: Any,
        x: Reducible,
        op: Op = SUM,
        *,
        out: None = None,
        codec: Codec | None = None,
        **options: Unpack[Options],
    ) -> Work[Reducible]: ...
    @overload
    def all_reduce(
        self: Any,
        x: Arrays,
        op: Op = SUM,
        *,
        out: Out,
        codec: Codec | None = None,
        **options: Unpack[Options],
    ) -> Work[Out]: ...

    @overload
    def reduce(
        self: Any, x: int, dst: int, op: Average, **options: Unpack[Options]
    ) -> Work[float | None]: ...
    @overload
    def reduce(
        self: Any, x: int, dst: int = 0, *, op: Average, **options: Unpack[Options]
    ) -> Work[float | None]: ...
    @overload
    def reduce(
        self: Any,
        x: Reducible,
        dst: int = 0,
        op: Op = SUM,
        *,
        out: None = None,
        **options: Unpack[Options],
    ) -> Work[Reducible | None]: ...
    @overload
    def reduce(
        self: Any, x: Arrays, dst: int = 0, op: Op = SUM, *, out: Out, **options: Unpack[Options]
    ) -> Work[Out]: ...

    @overload
    def scan(
        self: Any, x: Reducible, op: Op = SUM, *, out: None = None, **options: Unpack[Options]
    ) -> Work[Reducible]: ...
    @overload
    def scan(
        self: Any, x: Arrays, op: Op = SUM, *, out: Out, **options: Unpack[Options]
    ) -> Work[Out]: ...

    @overload
    def reduce_scatter(
        self: Any, xs: Slots[int], op: Average, **options: Unpack[Options]
    ) -> Work[float]: ...
    @overload
    def reduce_scatter(
        self: Any,
        xs: BufferT | Slots[BufferT],
        op: Op = SUM,
        *,
        out: None = None,
        **options: Unpack[Options],
    ) -> Work[NDArray[Any]]: ...
    @overload
    def reduce_scatter(
        self: Any,
        xs: Slots[tuple[ArrayT, ...]],
        op: Op = SUM,
        *,
        out: None = None,
        **options: Unpack[Options],
    ) -> Work[list[ArrayT]]: ...
    @overload
    def reduce_scatter(
        self: Any,
        xs: Slots[Reducible],
        op: Op = SUM,
        *,
        out: None = None,
        **options: Unpack[Options],
    ) -> Work[Reducible]: ...
    @overload
    def reduce_scatter(
        self: Any, xs: ArrayT, op: Op = SUM, *, out: None = None, **options: Unpack[Options]
    ) -> Work[ArrayT]: ...
    @overload
    def reduce_scatter(
        self: Any,
        xs: Array | Buffer | Slots[Any],
        op: Op = SUM,
        *,
        out: Out,
        **options: Unpack[Options],
    ) -> Work[Out]: ...

    @overload
    def broadcast(
        self: Any, x: None = None, src: int = 0, **options: Unpack[Options]
    ) -> Work[Any]: ...
    @overload
    def broadcast(self: Any, x: T | None, src: int = 0, **options: Unpack[Options]) -> Work[T]: ...

    @overload
    def all_gather(
        self: Any, x: Buffer, *, out: None = None, **options: Unpack[Options]
    ) -> Work[list[NDArray[Any]]]: ...
    @overload
    def all_gather(
        self: Any, x: T, *, out: None = None, **options: Unpack[Options]
    ) -> Work[list[T]]: ...
    @overload
    def all_gather(self: Any, x: Any, *, out: Into, **options: Unpack[Options]) -> Work[Into]: ...

    @overload
    def gather(
        self: Any, x: Buffer, dst: int = 0, *, out: None = None, **options: Unpack[Options]
    ) -> Work[list[NDArray[Any]] | None]: ...
    @overload
    def gather(
        self: Any, x: T, dst: int = 0, *, out: None = None, **options: Unpack[Options]
    ) -> Work[list[T] | None]: ...
    @overload
    def gather(
        self: Any, x: Any, dst: int = 0, *, out: Into, **options: Unpack[Options]
    ) -> Work[Into]: ...

    @overload
    def scatter(
        self: Any, xs: None = None, src: int = 0, *, out: None = None, **options: Unpack[Options]
    ) -> Work[Any]: ...
    @overload
    def scatter(
        self: Any,
        xs: Slots[BufferT] | None,
        src: int = 0,
        *,
        out: None = None,
        **options: Unpack[Options],
    ) -> Work[NDArray[Any]]: ...
    @overload
    def scatter(
        self: Any,
        xs: Slots[T] | None,
        src: int = 0,
        *,
        out: None = None,
        **options: Unpack[Options],
    ) -> Work[T]: ...
    @overload
    def scatter(
        self: Any,
        xs: Slots[Any] | None = None,
        src: int = 0,
        *,
        out: Into,
        **options: Unpack[Options],
    ) -> Work[Into]: ...

    @overload
    def all_to_all(
        self: Any, xs: Slots[BufferT], *, out: None = None, **options: Unpack[Options]
    ) -> Work[list[NDArray[Any]]]: ...
    @overload
    def all_to_all(
        self: Any, xs: Slots[T], *, out: None = None, **options: Unpack[Options]
    ) -> Work[list[T]]: ...
    @overload
    def all_to_all(
        self: Any, xs: Slots[Any], *, out: Into, **options: Unpack[Options]
    ) -> Work[Into]: ...

    @overload
    def share(self: Any, x: None = None, src: int = 0, **options: Unpack[Options]) -> Work[Any]: ...
    @overload
    def share(self: Any, x: T | None, src: int = 0, **options: Unpack[Options]) -> Work[T]: ...

    @overload
    def recv(
        self: Any,
        *,
        out: None = None,
        partial: Literal[False] = False,
        **options: Unpack[Receiving],
    ) -> Work[Any]: ...
    @overload
    def recv(
        self: Any, *, out: Into, partial: bool = False, **options: Unpack[Receiving]
    ) -> Work[Into]: ...

    @overload
    def sendrecv(
        self: Any, x: Any, dst: int, *, out: None = None, **options: Unpack[SendingReceiving]
    ) -> Work[Any]: ...
    @overload
    def sendrecv(
        self: Any, x: Any, dst: int, *, out: Into, **options: Unpack[SendingReceiving]
    ) -> Work[Into]: ...

    @overload
    def empty(
        self: Any, shape: int | Sequence[int], dtype: None = None, *, like: ArrayT
    ) -> ArrayT: ...
    @overload
    def empty(
        self: Any, shape: int | Sequence[int], dtype: type[Dtype] | np.dtype[Dtype]
    ) -> NDArray[Dtype]: ...
    @overload
    def empty(self: Any, shape: int | Sequence[int], dtype: Any) -> Any: ...


class WindowSignatures(Protocol):
    """Which type each operation of a window gives."""

    @overload
    def get(
        self: Any, rank: int, where: Index = ..., *, out: None = None, timeout: float | None = None
    ) -> Work[NDArray[Any]]: ...
    @overload
    def get(
        self: Any, rank: int, where: Index = ..., *, out: Place, timeout: float | None = None
    ) -> Work[Place]: ...


def typed(signature: Method) -> Callable[[Callable[..., Any]], Method]:
    """The method that stands below, for type checkers with this signature."""
    return lambda method: cast("Any", method)
