"""Operators and wildcards, as users make them and see them."""

from __future__ import annotations

import http
import pickle
from typing import Any

import numpy as np
import pytest

from aiodist.types import ANY_SOURCE, ANY_TAG, ReduceOp

NAMES = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR")


@pytest.mark.parametrize("name", NAMES)
def test_a_constant(name: str) -> None:
    op = getattr(ReduceOp, name)
    assert op == ReduceOp(name)
    assert (str(op), repr(op)) == (name, f"ReduceOp.{name}")
    assert (op.function, op.factor, op.commutative, op.elementwise) == (None, None, True, True)
    assert pickle.loads(pickle.dumps(op)) == op
    assert ReduceOp.of(op) is op


@pytest.mark.parametrize("factor", [2, 0.5, 0])
def test_premul_sum(factor: float) -> None:
    op = ReduceOp.premul_sum(factor)
    assert (op.name, op.factor) == ("PREMUL_SUM", factor)
    assert (str(op), repr(op)) == (f"PREMUL_SUM({factor!r})", f"ReduceOp.premul_sum({factor!r})")
    assert op != ReduceOp.premul_sum(7)


@pytest.mark.parametrize(("factor", "plain"), [(np.float64(0.5), 0.5), (http.HTTPStatus.OK, 200)])
def test_a_factor_of_a_derived_class_is_told_as_a_plain_number(factor: float, plain: float) -> None:
    assert str(ReduceOp.premul_sum(factor)) == str(ReduceOp.premul_sum(plain))


@pytest.mark.parametrize("factor", [True, "2", None, 1j])
def test_no_other_factor(factor: Any) -> None:
    with pytest.raises(TypeError, match="an int or float factor"):
        ReduceOp.premul_sum(factor)


class Larger:
    def __call__(self, a: Any, b: Any) -> Any:
        return max(a, b)


def keep(a: Any, b: Any) -> Any:
    return a


def test_a_function_keeps_order_and_whole_arrays() -> None:
    op = ReduceOp.custom(keep)
    assert (op.function, op.commutative, op.elementwise) == (keep, False, False)
    assert ReduceOp.of(keep) == op
    assert str(op) == "custom:keep"


def test_a_function_of_which_more_is_said() -> None:
    op = ReduceOp.custom(keep, commutative=True, elementwise=True, name="first")
    assert (op.name, op.commutative, op.elementwise) == ("custom:first", True, True)
    assert str(op) == "commutative elementwise custom:first"
    one = ReduceOp.custom(keep, commutative=True)
    assert (one.commutative, one.elementwise) == (True, False)
    assert str(one) == "commutative custom:keep"
    assert str(one) != str(ReduceOp.custom(keep, name="keep commutative"))


def test_a_callable_without_a_name_is_called_by_its_class() -> None:
    assert ReduceOp.custom(Larger()).name == "custom:Larger"


@pytest.mark.parametrize("make", [ReduceOp.of, ReduceOp.custom])
def test_what_is_no_operator(make: Any) -> None:
    with pytest.raises(TypeError, match="a function of two arguments, not 'sum'"):
        make("sum")


def test_what_is_no_operator_names_those_that_there_are() -> None:
    with pytest.raises(
        TypeError, match=r"ReduceOp\.SUM, .*ReduceOp\.AVG, .*MAXLOC, or .* not 'avg'"
    ):
        ReduceOp.of("avg")  # type: ignore[arg-type]


def test_operators_of_torch_name_those_of_aiodist() -> None:
    theirs = pytest.importorskip("torch.distributed").ReduceOp
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        with pytest.raises(TypeError, match=rf"no operator .* aiodist\.ReduceOp\.{name}$"):
            ReduceOp.of(getattr(theirs, name))
    with pytest.raises(TypeError, match=r"op is ReduceOp\.SUM, .* not <RedOpType.PREMUL_SUM"):
        ReduceOp.of(theirs.PREMUL_SUM)


def test_the_builtin_sum_does_not_combine_two_values() -> None:
    with pytest.raises(TypeError, match=r"sum> is no operator .* use aiodist\.ReduceOp\.SUM$"):
        ReduceOp.of(sum)


def test_wildcards() -> None:
    assert (repr(ANY_SOURCE), repr(ANY_TAG)) == ("ANY_SOURCE", "ANY_TAG")
    assert pickle.loads(pickle.dumps(ANY_TAG)) is ANY_TAG


@pytest.mark.parametrize("name", ["x" * 257, "\udcff"])
def test_a_name_that_cannot_be_told_to_others_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="the name of this operator"):
        ReduceOp.custom(keep, name=name)
    assert ReduceOp.custom(keep, name="x" * 256).name.endswith("x" * 256)
