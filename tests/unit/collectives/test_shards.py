"""Parts of arrays, and how users say which part they have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from aiodist import Shard
from aiodist.collectives.shards import parts_of

X = np.arange(48).reshape(8, 6)


def test_a_part_is_where_its_index_says():
    part = Shard(X[2:4], (slice(2, 4),), X.shape)
    assert part.box == ((2, 4), (0, 6))
    assert Shard(X[:, 3:], (slice(None), slice(3, None)), (8, 6)).box == ((0, 8), (3, 6))
    for shape in (6, np.int64(6), [np.int64(6)]):
        part = Shard(X[0, 2:4], slice(np.int64(2), 4), shape)
        assert (part.box, part.shape) == (((2, 4),), (6,))
    assert Shard(X[:0], (slice(3, 3),), X.shape).box == ((3, 3), (0, 6))


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        ((2,), TypeError, "a tuple of slices"),
        ((slice(0, 8, 2),), ValueError, r"index\[0\] is slice\(0, 8, 2\): a slice without a step"),
        ((slice(-2, None),), ValueError, "from 0 or later to 8 at most"),
        ((slice(0, 9),), ValueError, "to 8 at most"),
        ((slice(None),) * 3, ValueError, r"index has 3 slices; the shape \(8, 6\) has 2"),
        ((slice(0, 7 / 2),), TypeError, r"index\[0\] has an int as start and stop, not 3\.5"),
        ((slice("0", 8),), TypeError, "an int as start and stop, not '0'"),
        ((slice(0, 4),), ValueError, r"\[0:4, 0:6\] has the shape \(4, 6\); .* has \(8, 6\)"),
    ],
)
def test_what_is_no_part_is_refused(index, error, words):
    with pytest.raises(error, match=words):
        Shard(X, index, X.shape)


def test_a_shape_is_made_of_ints():
    for shape in ((8.5, 6), ("8", 6), 8.5):
        with pytest.raises(TypeError, match=r"shape is an int.*, not (8\.5|'8')"):
            Shard(X, (), shape)
    for shape in (-1, (8, -6)):
        with pytest.raises(ValueError, match="shape has no negative sizes, unlike"):
            Shard(X, (), shape)


def test_a_part_needs_an_array():
    with pytest.raises(TypeError, match="an array is needed, not list"):
        Shard([1, 2], (slice(0, 2),), (2,))


def test_parts_are_found_by_their_places():
    rows = Shard(X[2:4], (slice(2, 4),), X.shape)
    tree = {"layers": [{"w": rows}, (X, None)], "b": torch.zeros(3)}
    parts = parts_of(tree, "x")
    assert list(parts) == ["['layers'][0]['w']", "['layers'][1][0]", "['b']"]
    assert parts["['layers'][0]['w']"] is rows
    assert parts["['layers'][1][0]"].box == ((0, 8), (0, 6))
    assert parts["['b']"].shape == (3,)
    assert parts_of(None, "x") == {}
    assert list(parts_of(X, "x")) == [""]


def test_another_leaf_is_named():
    with pytest.raises(TypeError, match=r"x\['a'\]\[1\]: an array, an aiodist.Shard or a DTensor"):
        parts_of({"a": [X, "text"]}, "x")


@pytest.fixture
def mesh():
    """That of rank 1 of 4, two by two; nothing is ever sent."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (2, 2))
    dist.destroy_process_group()


def test_a_dtensor_is_the_part_that_its_placements_give(mesh):
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import placement_types as placed

    local = torch.ones(4, 3)
    x = DTensor.from_local(local, mesh, [placed.Shard(0), placed.Shard(1)], run_check=False)
    (part,) = parts_of([x], "x").values()
    assert part.box == ((0, 4), (3, 6))
    assert part.shape == (8, 6)
    assert part.array.data_ptr() == local.data_ptr()
    whole = DTensor.from_local(local, mesh, [placed.Replicate()] * 2, run_check=False)
    assert parts_of(whole, "x")[""].box == ((0, 4), (0, 3))


def test_sums_that_nobody_has_yet_are_refused(mesh):
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import placement_types as placed

    x = DTensor.from_local(torch.ones(4), mesh, [placed.Partial(), placed.Replicate()])
    with pytest.raises(TypeError, match=r"x\['w'\]: the values of a DTensor with a Partial"):
        parts_of({"w": x}, "x")


def test_rows_that_two_ways_of_sharding_have_cut(mesh):
    """As with fully sharded data parallelism on top of tensor parallelism."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import placement_types as placed

    strided = [placed._StridedShard(0, split_factor=2), placed.Shard(0)]
    x = DTensor.from_local(torch.ones(2), mesh, strided, run_check=False)
    assert parts_of(x, "x")[""].box == ((4, 6),)
