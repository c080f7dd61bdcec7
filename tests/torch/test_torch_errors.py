"""What goes wrong is an error on all ranks, of types that programs for torch catch, too."""

from __future__ import annotations

import gc
import logging
import pickle
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import aiodist
from aiodist.threads.engine import engine
from aiodist_torch.errors import StoreTimeoutError, as_torch, last_error
from aiodist_torch.membership import Membership
from aiodist_torch.operators import meaning
from aiodist_torch.process_group import ProcessGroup

Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize("sparse", [0, 1, 2])
def test_a_wrong_shape_on_one_rank_is_an_error_on_all(ranks: Ranks, sparse: int) -> None:
    """Or, with two dims of a sparse tensor, another number of dims that are sparse."""

    def body(group: ProcessGroup) -> None:
        x = torch.ones(3 if group.rank() else 2)
        if sparse == 2:
            x = torch.eye(2).to_sparse(2 if group.rank() else 1)
        work = group.allreduce([x.to_sparse() if sparse == 1 else x])
        with pytest.raises(aiodist.MismatchError, match="float32") as caught:
            work.wait()
        assert isinstance(caught.value, dist.DistBackendError)
        assert isinstance(caught.value, RuntimeError)
        assert set(caught.value.calls) >= {group.rank()}
        assert len({*caught.value.calls.values()}) == 2
        found = last_error(group)
        assert (str(found), found and found.op) == (str(caught.value), "all_reduce")
        assert not work.is_success()
        x = torch.ones(1)
        group.allreduce([x]).wait()
        assert float(x) == 3

    ranks(3, body)


def test_different_operations_are_an_error_on_all(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> None:
        work = group.barrier() if group.rank() else group.allreduce([torch.ones(1)])
        with pytest.raises(aiodist.MismatchError, match="barrier"):
            work.wait()

    ranks(2, body)


def test_arguments_that_make_no_sense_on_one_rank_stop_all(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> None:
        out = torch.empty(3)
        work = group.all_to_all_single(
            out, torch.ones(3), [1, 1, 1], [1, 1, 1] if group.rank() else [1, 1]
        )
        if group.rank():
            with pytest.raises((aiodist.CollectiveAbortedError, aiodist.MismatchError)):
                work.wait()
        else:
            with pytest.raises(ValueError, match="input_split_sizes"):
                work.wait()
        group.barrier().wait()

    ranks(3, body)


@pytest.mark.parametrize("wrong", ["meta", "sparse"])
def test_one_of_several_that_makes_no_sense_stops_all(ranks: Ranks, wrong: str) -> None:
    """Refused by torch, or by aiodist: each of the several uses up its turn once."""

    def body(group: ProcessGroup) -> None:
        xs = [torch.ones(2), torch.ones(2), torch.ones(2)]
        if group.rank() == 0:
            xs[1] = xs[1].to_sparse() if wrong == "sparse" else torch.empty(2, device="meta")
        outs = [torch.empty(4) for _ in xs]
        error = (TypeError, RuntimeError, NotImplementedError)
        with pytest.raises(aiodist.CollectiveAbortedError if group.rank() else error):
            group.all_gather_single_coalesced(outs, xs).wait()
        x = torch.ones(1)
        group.allreduce([x]).wait()
        assert x.item() == 2

    ranks(2, body)


@pytest.mark.parametrize("wrong", ["form", "keyword", "device"])
def test_a_call_that_fits_nothing_on_one_rank_stops_all(ranks: Ranks, wrong: str) -> None:
    def body(group: ProcessGroup) -> None:
        x = torch.ones(1)
        if group.rank():
            with pytest.raises(aiodist.CollectiveAbortedError) as caught:
                group.allreduce([x]).wait()
            assert caught.value.rank == 0
        elif wrong == "device":
            with pytest.raises(RuntimeError, match="no backend for tensors of meta"):
                group.allreduce([torch.empty(1, device="meta")])
        else:
            args, kwargs = ([["x"]], {}) if wrong == "form" else ([x], {"y": 1})
            with pytest.raises(TypeError, match=r"allreduce\(\) of a process group takes"):
                group.allreduce(*args, **kwargs)
        with pytest.raises(TypeError, match=r"send\(\) of a process group takes"):
            group.send([x], "1")  # a message has no turn
        assert group._get_sequence_number_for_group() == 1
        x = torch.ones(1)
        group.allreduce([x]).wait()
        assert x.item() == 2

    ranks(2, body)


@pytest.mark.parametrize("what", ["one tensor", "cannot share", "no dimension to split"])
def test_arguments_that_make_no_sense(ranks: Ranks, what: str) -> None:
    def body(group: ProcessGroup) -> None:
        x = torch.ones(3)
        with pytest.raises(ValueError, match=what):
            if what == "one tensor":
                group.allreduce([x, x])
            else:
                x = x if what == "cannot share" else torch.tensor(1.0)
                group.all_to_all_single(torch.empty(3), x, [], []).wait()

    ranks(2, body)


def test_ranks_that_abort_are_no_alarm(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    """The coordinator in rank 0's process tells them from ranks that crashed."""
    caplog.set_level(logging.INFO, "aiodist.coordinator")

    def body(group: ProcessGroup) -> None:
        group.barrier().wait()
        group.abort()

    ranks(3, body)
    said = [one for one in caplog.records if one.__dict__.get("event") in ("lost", "aborted")]
    assert [one.levelname for one in said] == ["INFO"] * 3
    assert {one.__dict__["reason"] for one in said} == {"it aborted: the process group was aborted"}


def test_unknown_operators() -> None:
    with pytest.raises(ValueError, match="no reduce operator"):
        meaning("MEDIAN", torch.float32)


def test_an_average_of_booleans_is_refused_in_words_of_torch() -> None:
    with pytest.raises(TypeError, match=r"AVG has no meaning for bool: use SUM \(or\)"):
        meaning(dist.ReduceOp.AVG, torch.bool)


@pytest.mark.usefixtures("no_leaks")
def test_a_rank_that_cannot_use_the_store_leaves_no_coordinator() -> None:
    class Gone:
        def add(self, key: str, value: int) -> int:
            return value

        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("the server is gone")

    with pytest.raises(dist.DistNetworkError):
        Membership.join(engine(), Gone(), rank=0, size=2, name="", seconds=60.0)


def test_a_deadline_names_who_is_missing(ranks: Ranks) -> None:
    over = threading.Event()

    def body(group: ProcessGroup) -> None:
        if group.rank() == 0:
            opts = dist.BarrierOptions()
            opts.timeout = timedelta(milliseconds=100)
            with pytest.raises(aiodist.CollectiveTimeoutError, match=" timeout ") as caught:
                group.barrier(opts).wait()
            assert caught.value.missing == (1,)
            assert isinstance(caught.value, TimeoutError)
            assert isinstance(caught.value, dist.DistBackendError)
            over.set()
        else:
            assert over.wait(60)
            with pytest.raises(aiodist.CollectiveTimeoutError):
                group.barrier().wait()

    ranks(2, body)


def test_waiting_no_longer_than_that_ends_no_operation(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> float:
        x = torch.ones(1)
        if group.rank() == 0:
            work = group.recv([x], 1, 1)
            with pytest.raises(aiodist.CollectiveTimeoutError, match="it goes on"):
                work.wait(timedelta(milliseconds=10))
            group.send([x], 1).wait()
            assert work.wait(timedelta(seconds=60))
        else:
            group.recv([x], 0).wait()
            group.send([x + 1], 0, 1).wait()
        return float(x)

    assert ranks(2, body) == [2, 1]


def test_monitored_barrier(ranks: Ranks) -> None:
    over, entered = threading.Barrier(3), threading.Event()

    def body(group: ProcessGroup) -> None:
        group.monitored_barrier()
        barrier = group.barrier

        def entering(opts: dist.BarrierOptions) -> Any:
            work = barrier(opts)
            entered.set()
            return work

        if group.rank() != 2:
            timeout = None
            if group.rank() == 0:
                assert entered.wait(60)
                timeout = timedelta(milliseconds=100)
            else:
                group.barrier = entering  # type: ignore[method-assign]
            with pytest.raises(aiodist.CollectiveTimeoutError) as caught:
                group.monitored_barrier(timeout, wait_all_ranks=True)
            assert caught.value.missing == (2,)
            over.wait(60)
        else:
            over.wait(60)
            with pytest.raises(aiodist.CollectiveTimeoutError):
                group.monitored_barrier()

    ranks(3, body)


def test_an_aborted_group_fails_everywhere(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> None:
        group.barrier().wait()
        if group.rank():
            with pytest.raises((aiodist.PeerLostError, aiodist.CollectiveAbortedError)):
                group.barrier().wait()
        else:
            group.abort()
            with pytest.raises(aiodist.GroupClosedError):
                group.barrier().wait()

    ranks(2, body)


def test_a_group_that_was_left_says_so(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> None:
        group.shutdown()
        group.shutdown()
        with pytest.raises(aiodist.GroupClosedError):
            group.allreduce([torch.ones(1)]).wait()
        with pytest.raises(aiodist.GroupClosedError) as caught:
            group.split_group([0, 1])
        assert isinstance(caught.value, dist.DistBackendError)

    ranks(2, body)


def test_errors_keep_type_text_and_fields() -> None:
    error = aiodist.PeerLostError("gone", ranks=[2, 1], group="g", epoch=3)
    error.__cause__ = OSError("why")
    twin = as_torch(error)
    assert isinstance(twin, aiodist.PeerLostError)
    assert isinstance(twin, dist.DistBackendError)
    assert (type(twin).__name__, str(twin), twin.ranks) == ("PeerLostError", str(error), (1, 2))
    assert twin.__cause__ is error.__cause__
    assert as_torch(twin) is twin
    again = pickle.loads(pickle.dumps(twin))
    assert type(again) is type(twin)
    assert (str(again), again.ranks) == (str(twin), (1, 2))
    late = as_torch(aiodist.CollectiveTimeoutError("late", missing=[1]))
    assert str(pickle.loads(pickle.dumps(late))) == str(late) == "the timeout is over: late"
    of_store = as_torch(aiodist.CollectiveTimeoutError("late"), StoreTimeoutError)
    assert isinstance(of_store, dist.DistStoreError)
    assert type(pickle.loads(pickle.dumps(of_store))) is type(of_store)
    assert not isinstance(late, dist.DistStoreError)
    other = ValueError("x")
    assert as_torch(other) is other


def test_the_last_error_of_a_group(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> None:
        assert last_error(group) is None
        work = group.allreduce([torch.ones(3 if group.rank() else 2)])
        chained = work.get_future().then(lambda future: future.value())
        with pytest.raises(RuntimeError):
            chained.wait()
        for _ in range(2):
            found = last_error(group)
            assert isinstance(found, aiodist.MismatchError)
            assert isinstance(found, dist.DistBackendError)
            assert str(found) == str(work.exception())
            assert found.__traceback__ is None  # whose frames would keep all that they know
            group.barrier().wait()

    ranks(2, body)


@pytest.mark.parametrize("group", [None, "gloo"])
def test_the_last_error_of_what_is_no_group_of_aiodist(group: str | None) -> None:
    with pytest.raises(ValueError, match="process groups of aiodist"):
        last_error(group)


def test_ranks_that_all_reject_their_arguments_leave_nothing_behind(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    """Each gives its turn up; who does so second finds it given up, which is no news to anyone."""

    def body(group: ProcessGroup) -> None:
        for _ in range(20):
            with pytest.raises(ValueError, match="cannot share"):
                group.all_to_all_single(torch.empty(3), torch.ones(3), [], []).wait()
        group.barrier().wait()

    ranks(2, body)
    gc.collect()
    assert not caplog.records


def test_a_batch_with_a_refused_operation_ends_with_the_others(ranks: Ranks) -> None:
    refused = threading.Event()

    def body(group: ProcessGroup) -> None:
        cpu, x = torch.device("cpu"), torch.ones(1)
        if group.rank():
            assert refused.wait(60)
            group.send([x], 0).wait()
            return
        y = torch.zeros(1)
        group._start_coalescing(cpu)
        group.send([torch.eye(2).to_sparse()], 1)
        group.recv([y], 1)
        work = group._end_coalescing(cpu)
        is_over = work.is_completed()
        refused.set()
        with pytest.raises(RuntimeError, match="sparse tensors"):
            work.wait()
        assert (is_over, float(y)) == (False, 1)

    ranks(2, body)


def test_a_wrong_number_of_tensors_on_one_rank_stops_all(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> None:
        x = torch.ones(1)
        if group.rank():
            with pytest.raises((aiodist.CollectiveAbortedError, aiodist.MismatchError)):
                group.allreduce([x]).wait()
        else:
            with pytest.raises(ValueError, match="one tensor"):
                group.allreduce([x, x])
        x = torch.ones(1)
        group.allreduce([x]).wait()
        assert float(x) == 2

    ranks(2, body)
