"""What is a timeout, and what is none."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Coroutine
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist import timeouts


@pytest.mark.parametrize("seconds", [1, 0.5, 5e-324, sys.float_info.max, 10**308, math.inf])
def test_numbers_of_seconds(seconds: float) -> None:
    assert timeouts.is_timeout(seconds)
    timeouts.check_timeout(seconds)


@pytest.mark.parametrize("wrong", [0, -1, -math.inf, math.nan, 10**400, -(10**400), True, "1", 1j])
def test_what_is_none(wrong: Any) -> None:
    assert not timeouts.is_timeout(wrong)
    with pytest.raises((TypeError, ValueError), match="timeout is"):
        timeouts.check_timeout(wrong)


def _connect(**options: Any) -> object:
    return aiodist.connect("inproc://nowhere", rank=0, size=1, **options)


def _publisher(**options: Any) -> object:
    return aiodist.publisher("policy", address="inproc://nowhere", **options)


def _averager(**options: Any) -> object:
    return aiodist.averager("outer", address="inproc://nowhere", **options)


def _epochs(**options: Any) -> object:
    return aiodist.epochs("inproc://nowhere", size=1, **options)


async def _main(group: aiodist.Group) -> None: ...


def _run(**options: Any) -> object:
    return aiodist.run(_main, 1, **options)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (_connect, "timeout"),
        (_connect, "op_timeout"),
        (_connect, "lease"),
        (_publisher, "timeout"),
        (_publisher, "patience"),
        (_averager, "timeout"),
        (_averager, "op_timeout"),
        (_epochs, "patience"),
        (_run, "timeout"),
        (aiodist.Coordinator, "recovery"),
    ],
)
def test_options_that_no_timer_can_wait_for(call: Callable[..., object], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is at most 1.79769e.308 seconds, or math.inf"):
        call(**{name: 10**400})
    with pytest.raises(ValueError, match=f"{name} is more than 0 seconds, not nan"):
        call(**{name: math.nan})
    for wrong in ("1", True, Decimal(1), Fraction(1), np.float32(1)):
        with pytest.raises(TypeError, match=f"{name} is a number of seconds.*, not "):
            call(**{name: wrong})


@pytest.mark.parametrize("call", [_publisher, _averager])
def test_a_timeout_of_0_is_none_to_join(call: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="timeout is more than 0 seconds, not 0"):
        call(timeout=0)


async def test_seconds_of_calls() -> None:
    async with aiodist.local(1) as [group]:
        address = str(group._actor.address)
        async with (
            aiodist.publisher("policy", address=address) as out,
            aiodist.subscriber("policy", address=address) as weights,
        ):
            calls: list[Callable[..., Coroutine[Any, Any, object]]] = [
                partial(out.publish, [1], version=1), weights.wait, weights.latest,
            ]  # fmt: skip
            for wrong in ("1", True, Decimal(1), Fraction(1), 10**400, math.nan):
                for call in calls:
                    with pytest.raises((TypeError, ValueError), match="timeout is"):
                        await call(timeout=wrong)
        store: list[Callable[..., Any]] = [
            partial(group.store.set, "k", b""),
            partial(group.store.add, "k"),
            partial(group.store.compare_set, "k", None, b""),
        ]
        for set_key in store:
            with pytest.raises(TypeError, match="ttl is a number of seconds or None, not"):
                await set_key(ttl=Fraction(1))
