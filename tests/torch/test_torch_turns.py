"""A collective of several tensors that one rank refuses: all ranks count alike afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

import aiodist
from aiodist_torch.process_group import ProcessGroup

Ranks = Callable[..., list[Any]]

CALLS = ("all_reduce", "all_gather", "reduce_scatter")


def start(group: ProcessGroup, name: str, xs: Any, outs: Any, *opts: Any) -> Any:
    """Call a collective of several tensors: in any form, or in the long one with `opts`."""
    if name == "all_reduce":
        return group.allreduce_coalesced(xs, *opts)
    if name == "all_gather":
        return group.all_gather_single_coalesced(outs, xs, *opts)
    return group.reduce_scatter_single_coalesced(outs, xs, *opts)


def options(name: str, op: Any = dist.ReduceOp.SUM) -> Any:
    if name == "all_gather":
        return c10d.AllgatherOptions()
    reduces = name == "all_reduce"
    made = dist.AllreduceCoalescedOptions() if reduces else dist.ReduceScatterOptions()
    made.reduceOp = op
    return made


def arguments(name: str) -> tuple[list[Any], list[Any]]:
    """Return inputs and outputs for two ranks. SUM has two meanings for them."""
    xs = [torch.ones(4), torch.ones(4, dtype=torch.bool)]
    length = 8 if name == "all_gather" else 2
    return xs, [torch.zeros(length, dtype=x.dtype) for x in xs]


def expect_sums(group: ProcessGroup) -> None:
    """Sums that would be other ones if the ranks counted differently."""
    for i in range(3):
        x = torch.tensor([10.0**i * (group.rank() + 1)])
        group.allreduce([x]).wait()
        assert x.item() == 3 * 10**i


def expect_refused(ranks: Ranks, call: Callable[[ProcessGroup, bool], Any], errors: Any) -> None:
    """``call(group, wrong)``: rank 0 calls it wrongly and gets one of `errors`."""

    def body(group: ProcessGroup) -> None:
        wrong = group.rank() == 0
        with pytest.raises(errors if wrong else aiodist.CollectiveAbortedError):
            call(group, wrong).wait()
        expect_sums(group)

    ranks(2, body)


WRONG: dict[str, Any] = {
    "sparse": torch.ones(4).to_sparse(),
    "meta": torch.ones(4, device="meta"),
    "form": "x",
    "None": None,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("what", WRONG)
def test_one_wrong_tensor(ranks: Ranks, name: str, at: int, what: str) -> None:
    """Refused by aiodist or by torch, for its device, for its type, or in the unchecked form."""

    def call(group: ProcessGroup, wrong: bool) -> Any:
        xs, outs = arguments(name)
        if wrong:
            xs[at] = WRONG[what]
            if what == "meta":
                outs[at] = torch.empty_like(outs[at], device="meta")
        return start(group, name, xs, outs, *([options(name)] if what == "None" else []))

    expect_refused(ranks, call, (TypeError, ValueError, RuntimeError, AttributeError))


def test_a_tensor_that_cannot_take_the_result(ranks: Ranks) -> None:
    def call(group: ProcessGroup, wrong: bool) -> Any:
        xs, _ = arguments("all_reduce")
        if wrong:
            xs[0] = torch.ones(1).expand(4)
        return group.allreduce_coalesced(xs)

    expect_refused(ranks, call, ValueError)


@pytest.mark.parametrize("name", CALLS)
def test_no_lists_at_all(ranks: Ranks, name: str) -> None:
    def call(group: ProcessGroup, wrong: bool) -> Any:
        return start(group, name, *((None, None) if wrong else arguments(name)))

    expect_refused(ranks, call, TypeError)


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
def test_an_operator_without_a_meaning(ranks: Ranks, name: str) -> None:
    def call(group: ProcessGroup, wrong: bool) -> Any:
        op = dist.ReduceOp.BAND if wrong else dist.ReduceOp.SUM
        return start(group, name, *arguments(name), options(name, op))

    expect_refused(ranks, call, TypeError)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("inputs", [1, 3])
def test_more_inputs_than_outputs_or_fewer(ranks: Ranks, name: str, inputs: int) -> None:
    def call(group: ProcessGroup, wrong: bool) -> Any:
        xs, outs = arguments(name)
        return start(group, name, [xs[0]] * inputs if wrong else xs, outs)

    expect_refused(ranks, call, ValueError)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_sizes_that_do_not_fit(ranks: Ranks, name: str) -> None:
    def call(group: ProcessGroup, wrong: bool) -> Any:
        xs, outs = arguments(name)
        if wrong:
            xs[0], outs[1] = xs[0][:3], outs[1][1:]
        return start(group, name, xs, outs)

    expect_refused(ranks, call, ValueError)


def test_an_output_of_another_size(ranks: Ranks) -> None:
    def call(group: ProcessGroup, wrong: bool) -> Any:
        xs, outs = arguments("reduce_scatter")
        return start(group, "reduce_scatter", xs, [outs[0][: 2 - wrong], outs[1]])

    expect_refused(ranks, call, ValueError)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("count", [0, 1])
def test_another_number_of_tensors(ranks: Ranks, name: str, count: int) -> None:
    """No rank can refuse that alone."""

    def body(group: ProcessGroup) -> None:
        xs, outs = arguments(name)
        count_here = count if group.rank() == 0 else 2
        with pytest.raises(aiodist.MismatchError):
            start(group, name, xs[:count_here], outs[:count_here]).wait()
        expect_sums(group)

    ranks(2, body)


@pytest.mark.parametrize("name", CALLS)
def test_no_tensors_on_any_rank(ranks: Ranks, name: str) -> None:
    def body(group: ProcessGroup) -> None:
        start(group, name, [], []).wait()
        expect_sums(group)

    ranks(2, body)


def test_something_else_than_tensors_in_the_long_form(ranks: Ranks) -> None:
    """torch's own code uses this form, and it is not checked."""

    def call(group: ProcessGroup, wrong: bool) -> Any:
        x: Any = None if wrong else torch.ones(1)
        return group.allreduce([x], dist.AllreduceOptions())

    expect_refused(ranks, call, AttributeError)


HALF = torch.finfo(torch.float16).max


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        (dist.ReduceOp.SUM, [[True, False], [3, -3], [1.5, 3], [3, 3]]),
        (dist.ReduceOp.PRODUCT, [[False, False], [2, 2], [0.5, 2], [2, 2]]),
        (dist.ReduceOp.AVG, [None, [1, -1], [0.75, 1.5], [HALF, HALF]]),
    ],
)
def test_operators_that_mean_several_things(
    ranks: Ranks, name: str, op: Any, wanted: list[Any]
) -> None:
    def body(group: ProcessGroup) -> None:
        own = group.rank() + 1
        half = HALF if wanted[0] is None else own
        xs = [
            torch.tensor([own == 1, False]),
            torch.tensor([own, -own]),
            torch.tensor([own / 2, own]),
            torch.tensor([half, half], dtype=torch.float16),
        ]
        if wanted[0] is None:  # there is no average of booleans
            xs = xs[1:]
        outs = [torch.empty(1, dtype=x.dtype) for x in xs]
        start(group, name, xs, outs, options(name, op)).wait()
        found = [x.tolist() for x in (xs if name == "all_reduce" else outs)]
        expected = wanted[-len(xs) :]
        if name == "reduce_scatter":
            expected = [values[group.rank() :][:1] for values in expected]
        assert found == expected

    ranks(2, body)


def test_averages_of_booleans_among_integers(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> None:
        xs = [torch.tensor([True]), torch.tensor([1])]
        with pytest.raises(TypeError, match="bool"):
            start(group, "all_reduce", xs, [], options("all_reduce", dist.ReduceOp.AVG)).wait()

    ranks(2, body)


def test_inputs_that_are_parts_of_the_outputs(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> None:
        own = group.rank()
        outs: list[Tensor] = [torch.full((2,), float(own)), torch.full((4,), own)]
        xs = [out.chunk(2)[own] for out in outs]
        start(group, "all_gather", xs, outs).wait()
        assert [out.tolist() for out in outs] == [[0, 1], [0, 0, 1, 1]]

    ranks(2, body)


def test_outputs_of_any_strides(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> None:
        own = group.rank()
        xs = [torch.arange(4.0).view(2, 2) + 10 * own, torch.ones(1)]
        outs = [torch.zeros(2, 4).t(), torch.zeros(2)]
        start(group, "all_gather", xs, outs).wait()
        wanted = [[0, 1], [2, 3], [10, 11], [12, 13]]
        assert [out.tolist() for out in outs] == [wanted, [1, 1]]
        parts = [torch.zeros(2, 2).t()]
        start(group, "reduce_scatter", [outs[0]], parts).wait()
        assert parts[0].tolist() == [[2 * y for y in row] for row in wanted[2 * own :][:2]]

    ranks(2, body)
