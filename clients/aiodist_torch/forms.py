"""The forms in which torch lets programs call a process group.

torch's own code uses the long forms, with lists around tensors and an object of options behind
them. Programs that call the methods themselves prefer the short forms. Names and order of
parameters are those of torch's class.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from inspect import Signature, signature
from operator import index
from typing import Any, SupportsIndex, get_args, get_origin

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

Operator = dist.ReduceOp | dist.ReduceOp.RedOpType
Long = tuple[Any, ...]
"""The arguments of a call in its long form."""


def options(
    kind: type[Any],
    *,
    op: Operator | None = None,
    root: SupportsIndex | None = None,
    timeout: timedelta | None = None,
) -> Any:
    """Return torch's options of a call. Arguments that are None keep their defaults."""
    made = kind()
    if op is not None:
        made.reduceOp = op
    if root is not None:
        made.rootRank = index(root)
    if timeout is not None:
        made.timeout = timeout
    return made


def allreduce_one(
    tensor: Tensor, op: Operator = dist.ReduceOp.SUM, timeout: timedelta | None = None
) -> Long:
    return [tensor], options(dist.AllreduceOptions, op=op, timeout=timeout)


def allreduce_listed(
    tensors: list[Tensor], op: Operator = dist.ReduceOp.SUM, timeout: timedelta | None = None
) -> Long:
    return tensors, options(dist.AllreduceOptions, op=op, timeout=timeout)


def reduce(
    tensor: Tensor,
    root: SupportsIndex,
    op: Operator = dist.ReduceOp.SUM,
    timeout: timedelta | None = None,
) -> Long:
    return [tensor], options(dist.ReduceOptions, op=op, root=root, timeout=timeout)


def broadcast(tensor: Tensor, root: SupportsIndex, timeout: timedelta | None = None) -> Long:
    return [tensor], options(dist.BroadcastOptions, root=root, timeout=timeout)


def allgather(
    output_tensors: list[Tensor], input_tensor: Tensor, timeout: timedelta | None = None
) -> Long:
    return [output_tensors], [input_tensor], options(c10d.AllgatherOptions, timeout=timeout)


def gather(
    output_tensors: list[Tensor],
    input_tensor: Tensor,
    root: SupportsIndex,
    timeout: timedelta | None = None,
) -> Long:
    made = options(dist.GatherOptions, root=root, timeout=timeout)
    return [output_tensors], [input_tensor], made


def scatter(
    output_tensor: Tensor,
    input_tensors: list[Tensor],
    root: SupportsIndex,
    timeout: timedelta | None = None,
) -> Long:
    made = options(dist.ScatterOptions, root=root, timeout=timeout)
    return [output_tensor], [input_tensors], made


def reduce_scatter(
    output: Tensor,
    input: list[Tensor],
    op: Operator = dist.ReduceOp.SUM,
    timeout: timedelta | None = None,
) -> Long:
    return [output], [input], options(dist.ReduceScatterOptions, op=op, timeout=timeout)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[SupportsIndex],
    input_split_sizes: list[SupportsIndex],
    timeout: timedelta | None = None,
) -> Long:
    made = options(dist.AllToAllOptions, timeout=timeout)
    return output, input, output_split_sizes, input_split_sizes, made


def barrier(timeout: timedelta | None = None) -> Long:
    return (options(dist.BarrierOptions, timeout=timeout),)


class Forms:
    """All forms of one method: its own, which is the long one, and shorter ones.

    `last` is the type of the last argument in the long form.
    """

    def __init__(
        self, method: Callable[..., object], shorter: tuple[Callable[..., Long], ...]
    ) -> None:
        self._name = method.__name__
        own = signature(method, eval_str=True)
        _, *parameters = own.parameters.values()  # without self
        self._long = own.replace(parameters=parameters, return_annotation=Signature.empty)
        self._shorter = [(form, signature(form, eval_str=True)) for form in shorter]
        last = parameters[-1].annotation
        self.last: type[Any] = int if last is SupportsIndex else last

    def long(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Long:
        """Return the arguments of a call in the long form. Raises TypeError if they fit no form."""
        # By types, as pybind does it for torch's own class: the first form that fits every
        # argument. The long form comes first, because torch's own code uses it.
        if (given := _bound(self._long, args, kwargs)) is not None:
            return given
        for form, parameters in self._shorter:
            if (given := _bound(parameters, args, kwargs)) is not None:
                return form(*given)
        got = [type(value).__name__ for value in args]
        got += [f"{name}={type(value).__name__}" for name, value in kwargs.items()]
        raise TypeError(f"{self._name}() of a process group takes {self}; got ({', '.join(got)})")

    def __str__(self) -> str:
        forms = [self._long, *(parameters for _, parameters in self._shorter)]
        return " or ".join(f"({', '.join(form.parameters)})" for form in forms)


def _bound(parameters: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Long | None:
    """Return all arguments in the order of `parameters`; None if the call does not fit these."""
    try:
        bound = parameters.bind(*args, **kwargs)
    except TypeError:
        return None
    for name, value in bound.arguments.items():
        if not _fits(value, parameters.parameters[name].annotation):
            return None
    bound.apply_defaults()
    return bound.args


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is list:
        (item,) = get_args(hint)
        return isinstance(value, (list, tuple)) and all(_fits(each, item) for each in value)
    return isinstance(value, hint)
