"""Every operation of a process group, with results as torch defines them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from aiodist_torch.process_group import ProcessGroup
from aiodist_torch.rendezvous import own_host

Ranks = Callable[..., list[Any]]
Body = Callable[[ProcessGroup], Any]

SIZES = (1, 2, 3)


def options(kind: Any, **fields: Any) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def full(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, value, dtype=dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("blocking", [True, False])
def test_all_reduce(ranks: Ranks, size: int, blocking: bool) -> None:
    expected = {
        dist.ReduceOp.SUM: sum(range(1, size + 1)),
        dist.ReduceOp.PRODUCT: torch.tensor(range(1, size + 1)).prod().item(),
        dist.ReduceOp.MIN: 1,
        dist.ReduceOp.MAX: size,
        dist.ReduceOp.AVG: (size + 1) / 2,
        c10d._make_nccl_premul_sum(0.5): sum(range(1, size + 1)) / 2,
    }

    def body(group: ProcessGroup) -> None:
        for op, result in expected.items():
            x = full(group.rank() + 1, 2, 3)
            opts = options(dist.AllreduceOptions, reduceOp=op, asyncOp=not blocking)
            assert group.allreduce([x], opts).wait()
            assert torch.equal(x, full(result, 2, 3))

    ranks(size, body)


def test_bitwise_operators(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> list[int]:
        found = []
        for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
            x = torch.tensor([0b0110 if group.rank() else 0b0011])
            group.allreduce([x], options(dist.AllreduceOptions, reduceOp=op)).wait()
            found.append(int(x))
        return found

    assert ranks(2, body) == [[0b0010, 0b0111, 0b0101]] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_dtypes_and_strides(ranks: Ranks, dtype: torch.dtype) -> None:
    def body(group: ProcessGroup) -> Tensor:
        x = torch.arange(6).reshape(2, 3).to(dtype).t()
        group.allreduce([x]).wait()
        return x

    for x in ranks(3, body):
        assert torch.equal(x, 3 * torch.arange(6).reshape(2, 3).to(dtype).t())


def test_large_tensors_are_reduced_while_others_go_on(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> bool:
        large = [full(group.rank(), 1 << 20) for _ in range(3)]
        works = [group.allreduce([x]) for x in large]
        small = full(1, 1)
        group.allreduce([small], options(dist.AllreduceOptions, asyncOp=False)).wait()
        assert all(work.wait() for work in works)
        return bool(small == 2) and all(bool((x == 1).all()) for x in large)

    assert ranks(2, body) == [True, True]


def test_sparse_all_reduce(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> Tensor:
        rank = group.rank()
        x = torch.sparse_coo_tensor(
            torch.arange(rank + 1).reshape(1, -1),
            torch.ones(rank + 1, 2),
            (3, 2),
            check_invariants=True,
        )
        group.allreduce([x]).wait()
        return x.to_dense()

    for x in ranks(3, body):
        assert x.tolist() == [[3, 3], [2, 2], [1, 1]]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_can_only_be_summed(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> None:
        x = torch.eye(2).to_sparse()
        opts = options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MAX)
        with pytest.raises(ValueError, match="can be summed, nothing else; got MAX"):
            group.allreduce([x], opts).wait()
        with pytest.raises(TypeError, match=r"got torch.sparse_csr: convert it"):
            group.allreduce([x.to_sparse_csr()]).wait()

    ranks(2, body)


def test_coalesced_reductions(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> None:
        xs = [full(group.rank(), 2), full(1, 3, dtype=torch.int64)]
        group.allreduce_coalesced(xs).wait()
        assert [x.tolist() for x in xs] == [[1, 1], [2, 2, 2]]
        outs = [torch.empty(1), torch.empty(2)]
        group.reduce_scatter_single_coalesced(outs, [torch.arange(2.0), torch.arange(4.0)]).wait()
        own = group.rank()
        assert [out.tolist() for out in outs] == [[2 * own], [4 * own, 4 * own + 2]]
        outs = [torch.empty(2), torch.empty(4)]
        group.all_gather_single_coalesced(outs, [full(own, 1), full(own, 2)]).wait()
        assert [out.tolist() for out in outs] == [[0, 1], [0, 0, 1, 1]]

    ranks(2, body)


@pytest.mark.parametrize("size", SIZES)
def test_reduce_alters_the_root_alone(ranks: Ranks, size: int) -> None:
    def body(group: ProcessGroup) -> float:
        x = full(group.rank() + 1, 1)
        group.reduce([x], options(dist.ReduceOptions, rootRank=size - 1)).wait()
        return float(x)

    assert ranks(size, body) == [*range(1, size), sum(range(1, size + 1))]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [3, 100_000])
def test_broadcast(ranks: Ranks, size: int, length: int) -> None:
    def body(group: ProcessGroup) -> float:
        x = full(group.rank(), length)
        group.broadcast([x], options(dist.BroadcastOptions, rootRank=size - 1)).wait()
        return float(x.sum())

    assert ranks(size, body) == [(size - 1) * length] * size


@pytest.mark.parametrize("size", SIZES)
def test_gathering(ranks: Ranks, size: int) -> None:
    def body(group: ProcessGroup) -> None:
        rank = group.rank()
        wanted = [[float(r)] * 2 for r in range(size)]
        outs = [torch.empty(2) for _ in range(size)]
        group.allgather([outs], [full(rank, 2)]).wait()
        assert [out.tolist() for out in outs] == wanted
        one = torch.empty(2 * size)
        group.all_gather_single(one, full(rank, 2)).wait()
        assert one.view(size, 2).tolist() == wanted
        table = torch.empty(size, 2)
        group._allgather_base(table, full(rank, 2)).wait()
        assert table.tolist() == wanted
        outs = [torch.empty(2) for _ in range(size)]
        opts = options(dist.GatherOptions, rootRank=0)
        group.gather([outs] if rank == 0 else [], [full(rank, 2)], opts).wait()
        assert rank or [out.tolist() for out in outs] == wanted
        lists = [[torch.empty(1), torch.empty(2)] for _ in range(size)]
        group.allgather_coalesced(lists, [full(rank, 1), full(rank, 2)]).wait()
        assert [[out.tolist() for out in row] for row in lists] == [[w[:1], w] for w in wanted]

    ranks(size, body)


def test_gathered_shapes_may_differ(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> None:
        outs = [torch.empty(r + 1) for r in range(3)]
        group.allgather([outs], [full(group.rank(), group.rank() + 1)]).wait()
        assert [out.tolist() for out in outs] == [[0], [1, 1], [2, 2, 2]]

    ranks(3, body)


@pytest.mark.parametrize("size", SIZES)
def test_scattering(ranks: Ranks, size: int) -> None:
    def body(group: ProcessGroup) -> None:
        rank = group.rank()
        out = torch.empty(2)
        xs = [[full(r, 2) for r in range(size)]] if rank == size - 1 else []
        group.scatter([out], xs, options(dist.ScatterOptions, rootRank=size - 1)).wait()
        assert out.tolist() == [rank, rank]
        group.reduce_scatter([out], [[full(r + 1, 2) for r in range(size)]]).wait()
        assert out.tolist() == [size * (rank + 1)] * 2
        group.reduce_scatter_single(out, torch.arange(2.0 * size)).wait()
        assert out.tolist() == [size * 2 * rank, size * (2 * rank + 1)]

    ranks(size, body)


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all(ranks: Ranks, size: int) -> None:
    def body(group: ProcessGroup) -> None:
        rank = group.rank()
        outs = [torch.empty(rank + 1) for _ in range(size)]
        group.alltoall(outs, [full(10 * rank + r, r + 1) for r in range(size)]).wait()
        assert [out.tolist() for out in outs] == [[10 * r + rank] * (rank + 1) for r in range(size)]
        out = torch.empty(size, 2)
        x = torch.tensor([[rank, r] for r in range(size)], dtype=torch.float32)
        group.all_to_all_single(out, x, [], []).wait()
        assert out.tolist() == [[r, rank] for r in range(size)]
        splits = [r + 1 for r in range(size)]
        out = torch.empty(size * (rank + 1))
        group.alltoall_base(out, full(rank, sum(splits)), [rank + 1] * size, splits).wait()
        assert out.tolist() == [float(r) for r in range(size) for _ in range(rank + 1)]

    ranks(size, body)


@pytest.mark.parametrize("strided", [False, True])
def test_shapes_may_differ_if_numbers_of_elements_agree(ranks: Ranks, strided: bool) -> None:
    def body(group: ProcessGroup) -> None:
        own = group.rank()

        def x() -> Tensor:
            made = torch.arange(6.0) + 10 * own
            if own:
                return made
            made = made.view(2, 3)
            return torch.cat([made, made], 1)[:, :3] if strided else made

        def expect(x: Tensor, values: Tensor) -> None:
            assert torch.equal(x, values if own else values.view(2, 3))

        total, avg = 2 * torch.arange(6.0) + 10, dist.ReduceOp.AVG
        y = x()
        group.allreduce([y]).wait()
        expect(y, total)
        y = x()
        group.allreduce([y], options(dist.AllreduceOptions, reduceOp=avg)).wait()
        expect(y, total / 2)
        y = x()
        group.reduce([y], options(dist.ReduceOptions, reduceOp=avg)).wait()
        expect(y, total / 2 if own == 0 else x())
        y = x()
        group.broadcast([y], options(dist.BroadcastOptions, rootRank=1)).wait()
        expect(y, torch.arange(6.0) + 10)
        rows = torch.arange(8.0).view(4, 2) + 10 * own  # one for rank 0, and three for rank 1
        part = torch.arange(2.0, 8.0) if own else torch.arange(2.0)
        y = torch.zeros(len(part), 4)[:, :2] if strided else torch.zeros(len(part), 2)
        group.all_to_all_single(y, rows, [len(part) // 2] * 2, [1, 3]).wait()
        assert torch.equal(y.reshape(-1), torch.cat([part, part + 10]))
        y = torch.zeros(2, 2, 2)
        group.all_to_all_single(y, rows, [], []).wait()
        half = torch.arange(4.0) + 4 * own
        assert torch.equal(y.flatten(), torch.cat([half, half + 10]))

    ranks(2, body)


@pytest.mark.parametrize("shared", ["expanded", "sliding"])
def test_results_do_not_go_where_elements_share_memory(ranks: Ranks, shared: str) -> None:
    """All ranks hear of it, and the next collectives match."""

    def body(group: ProcessGroup) -> None:
        x = torch.zeros(4, 4)
        if group.rank():
            wide = torch.zeros(4, 1).expand(4, 4)
            x = wide if shared == "expanded" else torch.arange(10.0).as_strided((4, 4), (2, 1))
        calls: list[Callable[[], Any]] = [
            lambda: group.allreduce([x]),
            lambda: group.reduce([x], options(dist.ReduceOptions, rootRank=1)),
            lambda: group.broadcast([x], options(dist.BroadcastOptions, rootRank=0)),
            lambda: group.all_to_all_single(x, torch.ones(4, 4), [], []),
        ]
        for call in calls:
            with pytest.raises((ValueError, RuntimeError), match="share one place in memory"):
                call().wait()
        assert group.allreduce([y := torch.ones(1)]).wait() and y.item() == 2

    ranks(2, body)


def test_point_to_point(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> list[int] | None:
        if group.rank():
            for tag in (7, 5):
                group.send([full(10 * group.rank() + tag, 2, 2)], 0, tag).wait()
            return None
        x = torch.empty(4)
        for src in (1, 2):
            for tag in (5, 7):
                assert group.recv([x], src, tag).wait()
                assert x.tolist() == [10 * src + tag] * 4
        return None

    ranks(3, body)


def test_receive_from_any_source(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> list[tuple[int, float]]:
        if group.rank():
            group.send([full(group.rank(), 1)], 0).wait()
            return []
        found = []
        for _ in range(2):
            x = torch.empty(1)
            work = group.recv_anysource([x])
            work.wait()
            found.append((work._source_rank(), float(x)))
        return sorted(found)

    assert ranks(3, body)[0] == [(1, 1.0), (2, 2.0)]


def test_a_batch_is_one_work(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> None:
        cpu = torch.device("cpu")
        x, y = full(group.rank(), 1), full(1, 1)
        group._start_coalescing(cpu)
        group.allreduce([x])
        group.allreduce([y])
        work = group._end_coalescing(cpu)
        assert work.wait()
        assert (float(x), float(y)) == (1, 2)
        assert work.result() == [x, y]

    ranks(2, body)


def test_results_of_functional_collectives_can_be_passed_on(ranks: Ranks) -> None:
    """Those are tensors that wait for their values when they are used."""

    def body(group: ProcessGroup) -> None:
        own = group.rank()

        def summed() -> Tensor:
            x = full(own + 1, 2)
            c10d._register_work(x, group.allreduce([x]))
            return AsyncCollectiveTensor(x)

        x = summed()
        group.allreduce(x).wait()
        assert x.tolist() == [6, 6]
        outs = [torch.empty(2), torch.empty(2)]
        group.allgather([outs], [summed()]).wait()
        assert [out.tolist() for out in outs] == [[3, 3]] * 2
        x = torch.empty(2)
        works = [group.send([summed()], 1 - own), group.recv([x], 1 - own)]
        assert all(work.wait() for work in works)
        assert x.tolist() == [3, 3]
        parameter = torch.nn.Parameter(full(own, 2))
        group.broadcast([parameter]).wait()
        assert parameter.tolist() == [0, 0]

    ranks(2, body)


def test_fake_tensors_are_not_sent(ranks: Ranks) -> None:
    """A rank may trace code that the other ranks do not run."""

    def body(group: ProcessGroup) -> float:
        if group.rank() == 0:
            with FakeTensorMode():
                x, out = torch.ones(2), torch.ones(4)
            for work in (group.allreduce([x]), group.all_gather_single(out, x), group.send([x], 1)):
                assert work.wait()
        x = full(1, 1)
        group.allreduce([x]).wait()
        return float(x)

    assert ranks(2, body) == [2, 2]


def test_parts_of_groups(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> None:
        part = group.split_group([2, 0], group_name="part")
        x = full(group.rank(), 1)
        if part is None:
            assert group.rank() == 1
        else:
            assert part.group_name == part.getGroupName() == "part"
            assert (part.rank(), part.size()) == ([0, 2].index(group.rank()), 2)
            part.allreduce([x]).wait()
            part.shutdown()
        group.barrier().wait()
        assert float(x) == [2, 1, 2][group.rank()]

    ranks(3, body)


def test_ranks_meet_at_a_name_that_leads_to_loopback_on_its_own_host(ranks: Ranks) -> None:
    """As the host's own name does on Debian. On other hosts it leads to an address of that host."""
    name = "0x7f.1"  # 127.0.0.1, but not literally
    server = dist.TCPStore(name, 0, is_master=True, wait_for_workers=False)

    def body(group: ProcessGroup) -> float:
        x = full(1, 1)
        group.allreduce([x]).wait()
        return float(x)

    assert own_host(dist.PrefixStore("any", server)) == ("0.0.0.0", name)
    assert own_host(dist.TCPStore("localhost", server.port)) == ("127.0.0.1", "127.0.0.1")
    assert ranks(2, body, store=lambda: dist.TCPStore(name, server.port)) == [2, 2]


def test_what_torch_asks(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> None:
        assert group.getBackendName() == group._get_backend_name() == "aiodist"
        assert group._device_types == [torch.device("cpu")]
        assert group._get_backend(torch.device("cpu")) is group
        assert not group.supports_coalescing
        assert not group.supports_tensor_alloc(torch.device("cpu"))
        with pytest.raises(RuntimeError, match="no backend for tensors of cuda"):
            group._get_backend(torch.device("cuda"))
        assert group.group.size == group.size() == 2
        work = group.barrier()
        work.synchronize()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        with pytest.raises(RuntimeError, match="for receives"):
            work.source_rank()

    ranks(2, body)


INTEGERS = (torch.uint8, torch.int8, torch.int64, torch.uint16, torch.uint64)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_average_of_integers_is_rounded_toward_zero(ranks: Ranks, dtype: torch.dtype) -> None:
    """NCCL rounds so, and programs (metrics, counters) ask for such averages."""
    values = [-7, 4, 30] if dtype.is_signed else [7, 4, 30]
    wanted = [int((value + 2 * value) / 2) for value in values]

    def body(group: ProcessGroup) -> None:
        own = group.rank()
        avg = dist.ReduceOp.AVG

        def x() -> Tensor:
            return (torch.tensor(values) * (own + 1)).to(dtype)

        y = x()
        group.allreduce([y], options(dist.AllreduceOptions, reduceOp=avg)).wait()
        assert y.tolist() == wanted
        with torch.inference_mode():
            y = x()
            group.allreduce([y], options(dist.AllreduceOptions, reduceOp=avg)).wait()
            assert y.tolist() == wanted
        y = x()
        group.reduce([y], options(dist.ReduceOptions, reduceOp=avg, rootRank=1)).wait()
        assert y.tolist() == (wanted if own else x().tolist())
        opts = options(dist.ReduceScatterOptions, reduceOp=avg)
        y = torch.zeros(3, dtype=dtype)
        group.reduce_scatter([y], [[x(), x()]], opts).wait()
        assert y.tolist() == wanted
        y = torch.zeros(3, 2, dtype=dtype)[:, 0]  # not contiguous, either
        group.reduce_scatter_single(y, torch.cat([x(), x()]), opts).wait()
        assert y.tolist() == wanted
        y = torch.zeros(3, dtype=dtype)
        group.reduce_scatter_single_coalesced([y], [torch.cat([x(), x()])], opts).wait()
        assert y.tolist() == wanted
        mixed = [x(), x().float(), x()[:1].clone()]
        group.allreduce_coalesced(
            mixed, options(dist.AllreduceCoalescedOptions, reduceOp=avg)
        ).wait()
        assert [y.tolist() for y in mixed] == [wanted, [1.5 * v for v in values], wanted[:1]]

    ranks(2, body)


def test_sums_and_products_of_booleans(ranks: Ranks) -> None:
    """Whether any is true, and whether all are."""

    def body(group: ProcessGroup) -> None:
        def x() -> Tensor:
            return torch.tensor([True, False, group.rank() == 1])

        for op, wanted in (
            (dist.ReduceOp.SUM, [True, False, True]),
            (dist.ReduceOp.PRODUCT, [True, False, False]),
        ):
            y, z = x(), torch.zeros(3, dtype=torch.bool)
            group.allreduce([y], options(dist.AllreduceOptions, reduceOp=op)).wait()
            opts = options(dist.ReduceScatterOptions, reduceOp=op)
            group.reduce_scatter([z], [[x(), x()]], opts).wait()
            assert y.tolist() == z.tolist() == wanted
            y, zs = x(), [x(), x()[:1].clone()]
            group.reduce([y], options(dist.ReduceOptions, reduceOp=op)).wait()
            group.allreduce_coalesced(
                zs, options(dist.AllreduceCoalescedOptions, reduceOp=op)
            ).wait()
            assert y.tolist() == (x() if group.rank() else torch.tensor(wanted)).tolist()
            assert [z.tolist() for z in zs] == [wanted, [True]]

    ranks(2, body)


def test_sums_of_sparse_tensors_keep_their_turn(ranks: Ranks) -> None:
    """They start when they are called, not when the loop comes to it."""

    def body(group: ProcessGroup) -> None:
        x, y = torch.eye(2).to_sparse(), full(1, 1)
        works = [group.allreduce([x])]
        if group.rank():
            group.recv([torch.empty(1)], 0).wait()  # the loop turns meanwhile
        works.append(group.allreduce([y]))
        if group.rank() == 0:
            works.append(group.send([full(1, 1)], 1))
        assert all(work.wait() for work in works)
        assert (x.to_dense().tolist(), float(y)) == ([[2, 0], [0, 2]], 2)

    ranks(2, body)


def test_results_go_into_tensors_of_any_strides(ranks: Ranks) -> None:
    def body(group: ProcessGroup) -> None:
        own = group.rank()
        x = torch.arange(6.0).reshape(2, 3) + 10 * own
        whole = torch.cat([x - 10 * own, x - 10 * own + 10])

        def strided(*shape: int) -> Tensor:
            return torch.zeros(*reversed(shape), dtype=x.dtype).t()

        for fill, wanted in (
            (lambda out: group.all_gather_single(out, x), whole),
            (lambda out: group.all_gather_single_coalesced([out], [x]), whole),
        ):
            out = strided(4, 3)
            assert not out.is_contiguous()
            fill(out).wait()
            assert torch.equal(out, wanted)
        out = strided(2, 3)
        group.reduce_scatter_single(out, whole).wait()
        assert torch.equal(out, 2 * whole[2 * own : 2 * own + 2])
        out = strided(2, 3)
        if own:
            group.send([x.t()], 0).wait()
        else:
            work = group.recv([out], 1)
            work.wait()
            assert work.source_rank() == 1
            assert torch.equal(out.flatten(), (x + 10).t().flatten())
        out = strided(2, 3)
        group.all_to_all_single(out, whole[:2], [], []).wait()
        assert torch.equal(out, torch.stack([whole[own], whole[own]]))
        outs = [strided(2, 3), strided(2, 3)]
        group.allgather([outs], [x]).wait()
        assert torch.equal(torch.cat(outs), whole)

    ranks(2, body)
