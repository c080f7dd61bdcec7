"""Checks of the fields of messages.

A check returns the value as the message holds it, or raises ValueError that says what was expected.
Each field of a `Struct` is annotated with its check::

    Epoch = Annotated[int, integer(1, 2**62)]

    class MemberLost(Message, code=17):  # a Message is a Struct
        epoch: Epoch
        …

So the check stands beside the field, runs in one place (`build`), and can be listed. Checks compare
types exactly (`type(value) is int`), because `isinstance` takes True for an int.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, dataclass_transform, get_type_hints

import msgpack

from aiodist.errors import in_words
from aiodist.wire.limits import MAX_SECONDS

Check = Callable[[Any], Any]


def expect(what: str, holds: Callable[[Any], bool]) -> Check:
    """Make a check that takes a value as it is, if `holds` is true for it."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(what)
        return value

    return check


def integer(low: int, high: int) -> Check:
    return expect(f"an integer from {low} to {high}", lambda v: type(v) is int and low <= v <= high)


def seconds(low: float, high: float = MAX_SECONDS) -> Check:
    check = expect(
        f"seconds from {low:g} to {high:g}", lambda v: type(v) in (int, float) and low <= v <= high
    )
    return lambda value: float(check(value))


def text(longest: int, shortest: int = 0) -> Check:
    what = f"a text of {shortest} to {longest} characters"
    return expect(what, lambda v: type(v) is str and shortest <= len(v) <= longest)


def blob(longest: int) -> Check:
    return expect(f"at most {longest} bytes", lambda v: type(v) is bytes and len(v) <= longest)


flag = expect("a boolean", lambda v: type(v) is bool)


def optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def either(*checks: Check) -> Check:
    def check(value: Any) -> Any:
        expected = []
        for one in checks:
            try:
                return one(value)
            except ValueError as error:
                expected.append(str(error))
        raise ValueError(" or ".join(expected))

    return check


def sequence(item: Check, longest: int) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not list or len(value) > longest:
            raise ValueError(f"an array of at most {longest}")
        return tuple(item(one) for one in value)

    return check


def tree(longest: int | None) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not dict or not all(type(key) is str for key in value):
            raise ValueError("a map with text keys")
        if longest is not None and len(pack(value)) > longest:
            raise ValueError(f"a map of at most {longest} bytes as msgpack")
        return value

    return check


def one_of(kind: type[enum.StrEnum]) -> Check:
    def check(value: Any) -> Any:
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"one of {', '.join(kind)}") from None

    return check


def struct(kind: type[Any]) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not list:
            raise ValueError(f"the fields of {kind.__name__}")
        return build(kind, value)

    return check


_CHECKS: dict[type[Any], tuple[tuple[str, Check], ...]] = {}


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Struct:
    """An object that travels as an array of its fields, in order.

    Each subclass becomes a frozen dataclass, and the checks of its fields are noted.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # for `dataclasses.replace`

    def __init_subclass__(cls, *, kw_only: bool = False) -> None:
        # The checks are looked up once, here, because a view of thousands of members has tens of
        # thousands of fields. They come from the annotations, so that a field without a check fails
        # on import, and not when the first stranger sends it.
        dataclass(frozen=True, kw_only=kw_only)(cls)
        hints = get_type_hints(cls, include_extras=True)
        _CHECKS[cls] = tuple([(one.name, hints[one.name].__metadata__[0]) for one in fields(cls)])


def field_names(cls: type[Any]) -> tuple[str, ...]:
    """Return the fields of a struct, in the order in which they are sent."""
    return tuple([name for name, _ in _CHECKS[cls]])


def check_field(cls: type[Any], name: str, value: Any) -> None:
    """Raise ValueError or TypeError unless `value`, as it travels, fits the field `name`."""
    try:
        dict(_CHECKS[cls])[name](unpack(pack(value)))
    except ValueError as error:
        raise ValueError(f"{name}={value!r:.200}: expected {error}") from None
    except TypeError as error:
        raise TypeError(f"{name}={value!r:.200}: {error}") from None


def build(cls: type[Any], values: list[Any]) -> Any:
    checks = _CHECKS[cls]
    if len(values) != len(checks):
        raise ValueError(f"{len(checks)} fields of {cls.__name__}, not {len(values)}")
    named = {}
    for (name, check), value in zip(checks, values, strict=True):
        try:
            named[name] = check(value)
        except ValueError as error:
            raise ValueError(f"{error} in {name}") from None
    return cls(**named)


def pack(value: Any) -> bytes:
    """Return `value` as msgpack. It may be a struct or hold some."""
    return msgpack.packb(value, default=plain)


def unpack(data: bytes) -> Any:
    """Return the value that `pack` packed. Raises ValueError for other bytes."""
    # By itself, msgpack takes no length of more items than there are bytes.
    try:
        return msgpack.unpackb(data, max_ext_len=0)
    except Exception as error:  # msgpack raises half a dozen unrelated types
        raise ValueError(f"msgpack with text keys ({in_words(error)})") from None


def plain(value: Any) -> Any:
    """Return the fields of a struct, for msgpack."""
    checks = _CHECKS.get(type(value))
    if checks is None:
        raise TypeError(f"{type(value).__name__} {value!r} cannot be sent in a control message")
    return [getattr(value, name) for name, _ in checks]
