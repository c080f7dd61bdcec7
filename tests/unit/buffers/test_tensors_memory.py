"""The memory of tensors: seen as arrays for as long as an operation takes, and no longer."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from travel import into

from aiodist.buffers import arrays, tensors
from aiodist.buffers.dtypes import TORCH, carrier
from aiodist.buffers.encoding import encode
from aiodist.buffers.reductions import Operand
from aiodist.buffers.values import describe
from aiodist.types import ReduceOp

torch = pytest.importorskip("torch")

USES: dict[str, Callable[[Any], Any]] = {
    "sent": encode,
    "received": lambda x: into(torch.zeros_like(x), x),
    "reduced": lambda x: Operand.of(x, ReduceOp.SUM, in_place=True).finish(),
    "result": lambda x: Operand.of(torch.ones_like(x), ReduceOp.SUM, out=x, in_place=True).finish(),
    "viewed": lambda x: arrays.view(x, "x"),
    "plain": arrays.plain,
    "flat": lambda x: arrays.flat(x, carrier(tensors.dtype_name(x.dtype) or ""), x.numel()),
    "window": lambda x: arrays.window(x, x.nbytes),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.sample(19)
def test_storage_can_be_resized_afterwards(use: str, dtype: Any, strided: bool) -> None:
    if (use == "reduced" or use == "result") and dtype is torch.bool:
        dtype = torch.float64
    x = torch.ones(4, 4, dtype=dtype)
    if strided:
        x = x.t()
    assert use in ("plain", "flat", "window") or USES[use](x) is not None
    storage = x.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    storage.resize_(nbytes)
    x.fill_(1)
    x.resize_(5, 5)


@pytest.mark.parametrize("name", sorted(TORCH))
def test_the_short_way_sees_what_the_long_way_sees(name: str) -> None:
    if not hasattr(torch, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    for shape in ((), (3,), (2, 3), (0, 2)):
        x = tensors.empty(torch, name, shape)
        base = tensors.memory(x)[1]
        found = [arrays.plain(x), arrays.flat(x, base.dtype, base.size)]
        for flat in found:
            assert flat is not None
            assert (flat.dtype, flat.shape) == (base.dtype, (base.size,))
            assert flat.flags.carray
            assert not base.size or flat.ctypes.data == base.ctypes.data == x.data_ptr()
        window = arrays.window(x, x.nbytes)
        assert window is not None
        assert (window.format, window.nbytes, window.readonly) == ("B", x.nbytes, False)


def test_views_see_their_part() -> None:
    whole = torch.arange(24.0)
    part = whole[4:20].reshape(4, 4)
    for x in (part, part.t(), part[1:3, ::2], part[0], part[:1].expand(3, 4), part[2:2]):
        memory = tensors.memory(x)[1]
        assert memory.tolist() == x.tolist()
        assert memory.flags.c_contiguous == x.is_contiguous()
    flat = arrays.plain(part)
    assert flat is not None
    flat[0] = -1
    assert whole[4] == -1


def test_gradients_take_the_short_way() -> None:
    w = torch.ones(3, requires_grad=True)
    arrays.view(w, "w")
    flat = arrays.plain(w)
    assert flat is not None
    assert flat.tolist() == [1, 1, 1]


def test_memory_outlives_its_tensor() -> None:
    """A tensor that is given other memory in the midst of an operation takes none away from it."""
    base = np.arange(3.0)
    alive = weakref.ref(base)
    x = torch.from_numpy(base)
    views: list[Any] = [arrays.plain(x), arrays.window(x, 24), tensors.memory(x)[1]]
    del base
    x.set_(torch.zeros(1, dtype=torch.float64))
    del x
    assert alive() is not None
    assert [list(view)[:3] for view in (views[0], views[2])] == [[0, 1, 2]] * 2
    while views:
        assert alive() is not None
        views.pop()
    assert alive() is None


@pytest.mark.parametrize("held", [0, 20])
@pytest.mark.parametrize("part", [slice(None), slice(4, 8)])
def test_freed_memory_is_not_touched(held: int, part: slice) -> None:
    x = torch.ones(8)[part]
    arrays.view(x, "x")
    x.untyped_storage().resize_(held)
    assert arrays.plain(x) is None
    assert arrays.flat(x, carrier("float32"), len(x)) is None
    assert arrays.window(x, x.nbytes) is None
    with pytest.raises(ValueError, match=rf"value\['w'\]: .* has {held} bytes, fewer than"):
        encode({"w": x})
    assert describe(x) == "Tensor"


LAZY = {
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negated": lambda: torch._neg_view(torch.ones(2)),
    "zeros that are nowhere": lambda: torch._efficientzerotensor(2),
    "strided": lambda: torch.ones(4)[::2],
    "meta": lambda: torch.ones(2, device="meta"),
    "coo": lambda: torch.eye(2).to_sparse(),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "mkldnn": lambda: torch.ones(2).to_mkldnn(),
}


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor", "ignore:The PyTorch API of nested")
def test_what_has_no_plain_memory_takes_the_long_way(kind: str) -> None:
    arrays.view(torch.ones(2), "x")
    arrays.view(torch.ones(2, dtype=torch.complex64), "x")
    x = LAZY[kind]()
    assert arrays.plain(x) is None
    assert tensors.flat(x, carrier("float32"), 2) is None or kind in ("nested", "jagged")
    if kind in ("conjugated", "negated", "strided"):
        assert encode(x).nbytes
    else:
        with pytest.raises(TypeError, match=r"value: .* (does not travel|cannot be read)"):
            encode(x)


def test_a_class_that_computes_in_a_way_of_its_own_does_not_travel() -> None:
    class Scaled(torch.Tensor):
        """Its memory is there, and is not what it means."""

        @classmethod
        def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return f(*args, **(kwargs or {}))

    with pytest.raises(TypeError, match="memory of this Scaled cannot be read: its class computes"):
        encode(torch.ones(2).as_subclass(Scaled))
    assert encode(torch.nn.Parameter(torch.ones(2))).nbytes == 8


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_large_tensors_can_be_resized(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors.sys, "platform", platform)
    tensors._advise.cache_clear()
    try:
        x = tensors.empty(torch, "bfloat16", (tensors.HUGE,))
    finally:
        tensors._advise.cache_clear()
    x.fill_(1)
    x.untyped_storage().resize_(0)
    x.resize_(3)


def test_huge_pages_are_asked_for_within_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(tensors, "_advise", lambda: lambda *args: asked.append(args) or 0)
    tensors.empty(torch, "float32", (tensors.HUGE // 4 - 1,))
    assert not asked
    x = tensors.empty(torch, "float32", (tensors.HUGE // 4,))
    ((start, nbytes, advice),) = asked
    assert x.data_ptr() <= start < x.data_ptr() + 4096
    assert start % 4096 == 0
    assert start + nbytes == x.data_ptr() + x.nbytes
    assert advice == 14


def test_a_dtype_is_known_from_its_first_tensor_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_names", {})
    monkeypatch.setattr(tensors, "_carriers", {})
    for _ in range(2):
        found = tensors.plain(torch.arange(3, dtype=torch.int16))
        assert found is not None and found.tolist() == [0, 1, 2]
    assert tensors.plain(SimpleNamespace(dtype="torch.none")) is None


def test_there_are_no_plain_tensors_before_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_plain_types", [])
    monkeypatch.delitem(sys.modules, "torch")
    assert tensors.plain_type() is None
    monkeypatch.undo()
    assert tensors.plain_type() is torch.Tensor
