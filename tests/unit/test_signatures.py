"""What type checkers are told of the operations is what they take, and what they give."""

from __future__ import annotations

import ast
import asyncio
import inspect
import types
import typing
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import numpy as np
import pytest
import typed_samples

import aiodist
from aiodist import Group, signatures
from aiodist import types as small_types

pytestmark = pytest.mark.one_loop


def fits(value: Any, kind: Any) -> bool:
    """Whether `value` is of the type `kind`, as far as values tell at run time."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in args)
    if kind is Any:
        return True
    if origin is np.ndarray:
        scalar = get_args(args[1])[0]
        return isinstance(value, np.ndarray) and (scalar is Any or value.dtype == scalar)
    if origin is tuple:
        return type(value) is tuple and len(value) == len(args) and all(map(fits, value, args))
    if origin is list:
        return type(value) is list and all(fits(item, args[0]) for item in value)
    if origin is dict:
        return type(value) is dict and all(fits(item, args[1]) for item in value.values())
    if origin is not None:  # a Work: its result is looked at where it is awaited
        return isinstance(value, origin)
    return value is None if kind in (None, type(None)) else type(value) is kind


def test_fits() -> None:
    assert fits([1], list[int] | None)
    assert not fits([1.0], list[int] | None)
    assert not fits(1, float)
    assert not fits(np.ones(1, np.float32), typed_samples.Floats)
    assert not fits((1,), tuple[str])


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The types that `typed_samples` has named so far, each of which was that of the value."""
    seen: list[Any] = []

    def assert_type(value: Any, kind: Any) -> Any:
        assert fits(value, kind), f"{value!r} is no {kind}"
        seen.append(kind)
        return value

    monkeypatch.setattr(typed_samples, "assert_type", assert_type)
    return seen


def samples_in(program: Callable[..., Any]) -> int:
    """How many types it names."""
    return inspect.getsource(program).count("assert_type(")


@pytest.mark.parametrize(
    "program",
    [
        typed_samples.reductions,
        typed_samples.movements,
        typed_samples.messages,
        typed_samples.memory,
        typed_samples.groups,
        typed_samples.windows,
        typed_samples.channels,
        typed_samples.tensors,
    ],
)
def test_what_comes_is_of_that_type(
    run: Any, checked: list[Any], program: Callable[[Group], Coroutine[Any, Any, None]]
) -> None:
    async def ranks() -> None:
        async with aiodist.local(2) as groups:
            await asyncio.gather(*map(program, groups))

    run(ranks())
    assert len(checked) == 2 * samples_in(program)


def test_what_comes_is_of_that_type_in_threads(run: Any, checked: list[Any]) -> None:
    async def ranks() -> None:
        async with aiodist.local(2) as groups:
            both = [group.blocking() for group in groups]
            await asyncio.gather(*(asyncio.to_thread(typed_samples.blocking, one) for one in both))

    run(ranks())
    assert len(checked) == 2 * samples_in(typed_samples.blocking)


OVERLOADS = [
    node
    for statement in ast.parse(Path(signatures.__file__).read_text()).body
    if isinstance(statement, ast.ClassDef) and statement.name == "Signatures"
    for node in statement.body
    if isinstance(node, ast.FunctionDef)
]


@pytest.mark.parametrize("overload", OVERLOADS, ids=lambda node: f"{node.name}-{node.lineno}")
def test_signatures_name_the_parameters_of_their_operations(overload: ast.FunctionDef) -> None:
    takes = inspect.signature(getattr(Group, overload.name)).parameters
    arguments = overload.args
    assert arguments.kwarg is None or isinstance(arguments.kwarg.annotation, ast.Subscript)
    options: list[str] = []
    if arguments.kwarg is not None:
        options = list(getattr(signatures, arguments.kwarg.annotation.slice.id).__annotations__)
    assert {*options} <= {name for name, one in takes.items() if one.kind is one.KEYWORD_ONLY}
    named = [argument.arg for argument in arguments.args]
    assert named == list(takes)[: len(named)]
    assert {argument.arg for argument in arguments.kwonlyargs} <= {*takes} - {*options}


def test_every_parameter_is_in_a_signature() -> None:
    for name in {overload.name for overload in OVERLOADS}:
        known = {"self"}
        takes = inspect.signature(getattr(Group, name)).parameters.values()
        for overload in OVERLOADS:
            if overload.name == name:
                arguments = overload.args
                known |= {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)}
                if arguments.kwarg is not None:
                    options = arguments.kwarg.annotation.slice.id
                    known |= {*getattr(signatures, options).__annotations__}
        assert known == {one.name for one in takes if one.kind is not one.VAR_KEYWORD}, name


def test_options_are_those_of_connect() -> None:
    takes = inspect.signature(aiodist.connect).parameters
    named = small_types.RankOptions.__annotations__
    assert {*named, "address", "min_size", "max_size", "unknown"} == {*takes}
    hints = {name: typing.cast("Any", kind).__forward_arg__ for name, kind in named.items()}
    assert hints == {name: takes[name].annotation for name in named}
