"""torch's reduce operators in terms of aiodist's, which are stricter: their meaning for a dtype."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from aiodist import ReduceOp

_Kind: Any = dist.ReduceOp.RedOpType
_OPERATORS: dict[int, ReduceOp] = {
    _Kind.SUM.value: ReduceOp.SUM,
    _Kind.PRODUCT.value: ReduceOp.PRODUCT,
    _Kind.MIN.value: ReduceOp.MIN,
    _Kind.MAX.value: ReduceOp.MAX,
    _Kind.AVG.value: ReduceOp.AVG,
    _Kind.BAND.value: ReduceOp.BAND,
    _Kind.BOR.value: ReduceOp.BOR,
    _Kind.BXOR.value: ReduceOp.BXOR,
}
"""By number, because hashing torch's enumeration takes a microsecond."""
_PREMUL_SUM = _Kind.PREMUL_SUM.value
_OF_BOOLEANS = {ReduceOp.SUM: ReduceOp.LOR, ReduceOp.PRODUCT: ReduceOp.LAND}


class Meaning(NamedTuple):
    """How an operator works on tensors of one dtype.

    Reduce them with `op`. If `divides`, then divide the result by the number of ranks.
    """

    op: ReduceOp
    divides: bool = False


def meaning(op: Any, dtype: torch.dtype) -> Meaning:
    """Return the meaning of an operator of torch, as NCCL has it.

    The sum of booleans is whether any is true, and their product whether all are. An average of
    integers is a sum, which wraps as sums do, divided and rounded toward zero.

    Raises ValueError for an unknown operator, and TypeError for an average of booleans.
    """
    kind = getattr(op, "op", op)  # with a factor it is an object, else maybe a bare enum
    number = getattr(kind, "value", kind)
    if number == _PREMUL_SUM:
        factor = op.factor
        return Meaning(ReduceOp.premul_sum(factor.item() if isinstance(factor, Tensor) else factor))
    return _meaning(number, dtype)


@lru_cache
def _meaning(number: Any, dtype: torch.dtype) -> Meaning:
    found = _OPERATORS.get(number)
    if found is None:
        raise ValueError(f"{number} is no reduce operator that the aiodist backend knows")
    if dtype is torch.bool:
        if found is ReduceOp.AVG:
            raise TypeError(
                "AVG has no meaning for bool: use SUM (or) or PRODUCT (and), or convert to a float "
                "dtype"
            )
        return Meaning(_OF_BOOLEANS.get(found, found))
    if found is ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
        return Meaning(ReduceOp.SUM, divides=True)
    return Meaning(found)


def divide(x: Tensor, size: int) -> None:
    """Divide in place. Integers are rounded toward zero."""
    if x.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch cannot divide these
        x.copy_(torch.from_numpy(x.clone().numpy() // size))
    else:
        whole = not (x.is_floating_point() or x.is_complex())
        x.div_(size, rounding_mode="trunc" if whole else None)
