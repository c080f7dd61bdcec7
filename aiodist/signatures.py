"""The types of operations, for type checkers: the arguments decide the type of a result.

The overloads are here, and `Operations` has the code with docstrings:
``@typed(Signatures.all_reduce)`` joins the two. `BlockingGroup` takes its methods and their types
from `Operations`. At run time nothing here does anything.

Two cases need a narrower type than a class: `Average`, and None for arguments that are left out.
Buffers have overloads of their own, because they arrive as numpy arrays.
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
"""Objects that are sent like arrays, and arrive as numpy arrays."""

Number: TypeAlias = int | float | complex | np.generic

Arrays: TypeAlias = "Array | Buffer | Sequence[Array | np.generic]"
"""The data of a reduction: an array, or a flat list of arrays."""

Tree: TypeAlias = "Array | Buffer | Sequence[Any] | Mapping[Any, Any]"
"""A place to receive a value: an array, or a tree of arrays."""

Given: TypeAlias = "Array | Buffer | ArrayLike"
"""A value to write to a part of an array."""

Index: TypeAlias = (
    "SupportsIndex | slice | EllipsisType | tuple[SupportsIndex | slice | EllipsisType, ...]"
)
"""A part of an array: see `Window.get`."""

# Users read these names: mypy says "Value of type variable Reducible cannot be str".
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
"""One for each rank."""


class Options(TypedDict, total=False):
    """Options of every collective: see `Group`."""

    tag: Tag
    timeout: float | None


class Receiving(TypedDict, total=False):
    """Options of every receive: see `Operations.recv`."""

    src: Src
    tag: str | int | AnyTag
    timeout: float | None


class SendingReceiving(TypedDict, total=False):
    """Options of every sendrecv: see `Operations.sendrecv`."""

    src: Src
    tag: str | int
    recv_tag: str | int | AnyTag | None
    timeout: float | None


class Signatures(Protocol):
    """Operations whose results have the type of an argument."""

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
        self: Any, x: Buffer, *, out: Slots[None] | None = None, **options: Unpack[Options]
    ) -> Work[list[NDArray[Any]]]: ...
    @overload
    def all_gather(
        self: Any, x: T, *, out: Slots[None] | None = None, **options: Unpack[Options]
    ) -> Work[list[T]]: ...
    @overload
    def all_gather(self: Any, x: Any, *, out: Into, **options: Unpack[Options]) -> Work[Into]: ...

    @overload
    def gather(
        self: Any,
        x: Buffer,
        dst: int = 0,
        *,
        out: Slots[None] | None = None,
        **options: Unpack[Options],
    ) -> Work[list[NDArray[Any]] | None]: ...
    @overload
    def gather(
        self: Any, x: T, dst: int = 0, *, out: Slots[None] | None = None, **options: Unpack[Options]
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
        self: Any, xs: Slots[BufferT], *, out: Slots[None] | None = None, **options: Unpack[Options]
    ) -> Work[list[NDArray[Any]]]: ...
    @overload
    def all_to_all(
        self: Any, xs: Slots[T], *, out: Slots[None] | None = None, **options: Unpack[Options]
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
    """The types of the operations of a window."""

    @overload
    def get(
        self: Any, rank: int, where: Index = ..., *, out: None = None, timeout: float | None = None
    ) -> Work[NDArray[Any]]: ...
    @overload
    def get(
        self: Any, rank: int, where: Index = ..., *, out: Place, timeout: float | None = None
    ) -> Work[Place]: ...


def typed(signature: Method) -> Callable[[Callable[..., Any]], Method]:
    """Give the method below this signature, for type checkers."""
    return lambda method: cast("Any", method)
