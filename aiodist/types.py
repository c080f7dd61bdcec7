"""Small public types: reduce operators, members, wildcards."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NewType, TypedDict

if TYPE_CHECKING:
    import ssl as tls

Tag = str | int | None
"""What tells operations apart: a string, an integer, or None. `1` and `"1"` differ."""


class Wildcard(enum.Enum):
    """The values of `ANY_SOURCE` and `ANY_TAG`."""

    SOURCE = "ANY_SOURCE"
    TAG = "ANY_TAG"

    def __repr__(self) -> str:
        return self.value


ANY_SOURCE: Final = Wildcard.SOURCE
"""For `recv` and `probe`: a message of any rank."""

ANY_TAG: Final = Wildcard.TAG
"""For `recv` and `probe`: a message with any tag."""

AnySource = Literal[Wildcard.SOURCE]
AnyTag = Literal[Wildcard.TAG]
Src = int | Sequence[int] | AnySource
"""The sources of a receive: one rank, several ranks, or `ANY_SOURCE`."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a group.

    `id` is unique to this membership of the process. `host` is the host part of the address that
    peers see. `joined_at` is in seconds since the Unix epoch, by the coordinator's clock.
    """

    rank: int
    id: str
    host: str
    pid: int
    name: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    joined_at: float = 0.0


@dataclass(frozen=True, slots=True)
class View:
    """The state of a group in an epoch: see `Group.views`.

    `members` are alive, by rank. `lost` maps ranks to the reason. `left` are the ranks that have
    left in order. `waiting` is how many processes wait to be let in by a rendezvous.
    """

    epoch: int
    members: tuple[Member, ...]
    lost: Mapping[int, str] = field(default_factory=dict)
    left: tuple[int, ...] = ()
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class ReduceOp:
    """A reduce operator. Use the constants, `premul_sum`, or `custom`.

    `MINLOC` and `MAXLOC` take arrays whose first dimension is 2: values, and their locations
    (``np.stack([losses, np.full_like(losses, group.rank)])``). The result has the least or the
    greatest of the values, each with its location. Equal values give the least location. NaN wins
    over all other values. Locations have the dtype of the values: float32 holds whole numbers up to
    2**24, float64 up to 2**53.

    Every operator must be associative. `commutative=False` keeps the order of ranks.
    `elementwise=True` allows the array to be cut into pieces that are reduced apart.

    For example::

        largest = await group.all_reduce(group.rank, aiodist.ReduceOp.MAX)
        await group.all_reduce(np.ones(2), lambda a, b: a + 2 * b)  # a function of yours
    """

    name: str
    function: Callable[[Any, Any], Any] | None = None
    factor: float | int | None = None
    commutative: bool = True
    elementwise: bool = True

    SUM: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    AVG: ClassVar[Average]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    LAND: ClassVar[ReduceOp]
    LOR: ClassVar[ReduceOp]
    LXOR: ClassVar[ReduceOp]
    MINLOC: ClassVar[ReduceOp]
    MAXLOC: ClassVar[ReduceOp]

    @staticmethod
    def premul_sum(factor: float | int) -> ReduceOp:
        """The sum of `factor * x` over ranks. `factor` must be the same on all ranks.

        For example::

            x = np.ones(2)
            await group.all_reduce(x, aiodist.ReduceOp.premul_sum(0.5))
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            raise TypeError(f"premul_sum takes an int or float factor, not {factor!r}")
        # Ranks compare operators as text, and np.float64 is a float that is written in another way.
        plain = float if isinstance(factor, float) else int
        return ReduceOp("PREMUL_SUM", factor=plain(factor))

    @staticmethod
    def custom(
        function: Callable[[Any, Any], Any],
        *,
        commutative: bool = False,
        elementwise: bool = False,
        name: str | None = None,
    ) -> ReduceOp:
        """Make an operator of your own: `function(a, b)`, with `a` from the lower ranks.

        The function gets whole arrays of the caller's kind and shape. It returns the result, or
        writes it into `a` and returns `a`. With `elementwise=True` it may get pieces of the arrays.
        It runs in the context (`contextvars`) of its own call.

        If it raises on a rank, the Work of that rank fails with that exception, and those of the
        others with `CollectiveAbortedError`. No rank gets a result before the function has ended
        well on all ranks.

        Errors name the operator `name`, of at most 256 characters, or else the function.

        For example::

            op = aiodist.ReduceOp.custom(np.hypot, commutative=True, elementwise=True)
            await group.all_reduce(np.ones(2), op)
        """
        if not callable(function):
            raise TypeError(f"custom takes a function of two arguments, not {function!r}")
        label = name or getattr(function, "__name__", None) or type(function).__name__
        check_name(label, "operator")
        return ReduceOp(f"custom:{label}", function, None, commutative, elementwise)

    @staticmethod
    def of(op: ReduceOp | Callable[[Any, Any], Any]) -> ReduceOp:
        """Return `op`, or a custom operator made of a plain callable. Raises TypeError."""
        if isinstance(op, ReduceOp):
            return op
        # These can be called, but do not combine two values: operators of torch, and `sum`.
        is_torch = type(op).__name__ == "RedOpType"
        own = getattr(op, "name", None) if is_torch else "SUM" if op is sum else None
        if own in _MEMBERS:
            raise TypeError(f"op: {op!r} is no operator of aiodist: use aiodist.ReduceOp.{own}")
        if callable(op) and own is None:
            return ReduceOp.custom(op)
        members = ", ".join([f"ReduceOp.{name}" for name in _MEMBERS])
        raise TypeError(f"op is {members}, or a function of two arguments, not {op!r}")

    def __repr__(self) -> str:
        if self.factor is not None:
            return f"ReduceOp.premul_sum({self.factor!r})"
        return f"ReduceOp.{self.name}"

    def __str__(self) -> str:
        """Return what all ranks must agree on."""
        if self.factor is not None:
            return f"PREMUL_SUM({self.factor!r})"
        if self.function is None or self.name in _MEMBERS:
            return self.name
        # Ranks cut arrays, and combine them in an order, by these. They come first, because the
        # name may be any text.
        flags = {"commutative": self.commutative, "elementwise": self.elementwise}
        return " ".join([*(flag for flag, is_set in flags.items() if is_set), self.name])


def _minloc(a: Any, b: Any) -> Any:
    """Take the lesser of each pair, with its location."""
    return _located(a, b, operator.lt)


def _maxloc(a: Any, b: Any) -> Any:
    """Take the greater of each pair, with its location."""
    return _located(a, b, operator.gt)


def _located(a: Any, b: Any, is_better: Callable[[Any, Any], Any]) -> Any:
    """Return `a`, with the pairs of `b` whose values are better.

    Both are numpy arrays or both are tensors, because only what is spelled alike for the two is
    used.
    """
    shape = tuple(getattr(a, "shape", ()))  # a number has none
    if shape[:1] != (2,):
        raise ValueError(
            f"MINLOC and MAXLOC take an array of shape (2, …), values and their locations, not of "
            f"shape {shape}"
        )
    # NaN is not equal to anything, not even to itself.
    no_number = (b[0] != b[0]) & (a[0] == a[0])
    earlier = (b[0] == a[0]) & (b[1] < a[1])
    taken = (is_better(b[0], a[0]) | no_number | earlier).reshape(-1)
    pairs, others = a.reshape(2, -1), b.reshape(2, -1)
    pairs[:, taken] = others[:, taken]
    return pairs.reshape(a.shape)


_MEMBERS = (
    *("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR"),
    *("MINLOC", "MAXLOC"),
)

for _name in _MEMBERS[:-2]:
    setattr(ReduceOp, _name, ReduceOp(_name))

# Whole arrays, because a piece of one may have values without their locations.
ReduceOp.MINLOC = ReduceOp("MINLOC", _minloc, elementwise=False)
ReduceOp.MAXLOC = ReduceOp("MAXLOC", _maxloc, elementwise=False)

SUM: Final = ReduceOp.SUM

MAX_NAME: Final = 256
"""The most characters of the name of an operator or a codec."""


def check_name(name: str, of: str) -> None:
    """Check that calls can tell other ranks the `name` of an operator or a codec. Raises
    ValueError."""
    if len(name) > MAX_NAME:
        raise ValueError(
            f"the name of this {of} has {len(name)} characters: give it a name of at most "
            f"{MAX_NAME} characters"
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the name of this {of} is not valid Unicode: {name!r}") from None


Average = NewType("Average", ReduceOp)
"""The type of `ReduceOp.AVG`, for type checkers, because the average of ints is a float."""

Op = ReduceOp | Callable[[Any, Any], Any]
"""What operations take as operator. A plain function counts as a custom operator."""


_SPELLINGS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(["tensor", "buf", "obj"], ("x", "out", "xs")),
    **dict.fromkeys(["input", "input_tensor", "sendbuf", "sendobj"], ("x", "xs")),
    **dict.fromkeys(["input_list", "input_tensor_list", "scatter_list"], ("xs",)),
    **dict.fromkeys(["output", "output_tensor", "recvbuf", "recvobj"], ("out",)),
    **dict.fromkeys(["tensor_list", "output_tensor_list", "gather_list"], ("out",)),
    **dict.fromkeys(["root", "group_src", "group_dst"], ("src", "dst")),
    "src": ("dst",),
    "dst": ("src",),
    "source": ("src",),
    "dest": ("dst",),
    "sendtag": ("tag",),
    "recvtag": ("recv_tag",),
}
"""Names of arguments in torch and mpi4py, and here. The first one counts that a call has."""

_ELSEWHERE: Final[dict[str, str]] = {
    "async_op": "leave it out, because every call returns a Work",
    "group": "call this method of that group",
    "status": "leave it out, because the Work has source, tag and nbytes",
}
"""Arguments of torch and mpi4py that have no place here, and what to do."""


def hints(parameters: Iterable[str]) -> dict[str, str]:
    """Return what to do instead of each argument of torch and mpi4py, for `unexpected`."""
    known = {*parameters}
    uses = {
        spelling: f"use {name}="
        for spelling, names in _SPELLINGS.items()
        if (name := next((name for name in names if name in known), None)) is not None
    }
    return uses | _ELSEWHERE


def unexpected(call: str, unknown: Mapping[str, Any], hints: Mapping[str, str]) -> TypeError:
    """Make the error of a `call` with arguments that it does not have, worded as Python does.

    `hints` says what to do instead of names that users of other libraries expect.
    """
    name = next(iter(unknown))
    hint = f": {hints[name]}" if name in hints else ""
    return TypeError(f"{call}() got an unexpected keyword argument {name!r}{hint}")


class ReachOptions(TypedDict, total=False):
    """Options for how a process is reached: see `aiodist.connect`."""

    lease: float
    ssl: tls.SSLContext | tuple[tls.SSLContext, tls.SSLContext | None] | None
    transports: str | Iterable[str] | None
    bind: str | None
    advertise: str | None
    metadata: Mapping[str, Any] | None


class ChannelOptions(ReachOptions, total=False):
    """Options of `aiodist.publisher` and `aiodist.subscriber`."""

    name: str | None
    token: str | bytes | None
    timeout: float | None


class MemberOptions(ReachOptions, total=False):
    """`ReachOptions` and the options of a group. For clusters, which have its name and token."""

    join_window: float
    op_timeout: float
    max_message_bytes: int
    allow_pickle: bool
    costs: str | PathLike[str] | None


class GroupOptions(MemberOptions, total=False):
    """Options of every function that makes groups."""

    group: str | None
    name: str | None
    token: str | bytes | None


class JoinOptions(GroupOptions, total=False):
    """`GroupOptions`, and how long to wait for the others."""

    timeout: float | None


class RankOptions(JoinOptions, total=False):
    """`JoinOptions`, and the rank and size."""

    rank: int | None
    size: int | None
