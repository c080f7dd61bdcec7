"""Tensors: values, reductions and operators of users, on torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from travel import into

from aiodist.buffers import arrays, tensors, tokens
from aiodist.buffers.custom import CustomKernel
from aiodist.buffers.dtypes import CARRIERS, TORCH, carrier
from aiodist.buffers.encoding import encode
from aiodist.buffers.kernels import Kernel
from aiodist.buffers.reductions import Operand, split_slots
from aiodist.buffers.values import describe, parse
from aiodist.types import ReduceOp

torch = pytest.importorskip("torch")
SUM = ReduceOp.SUM


def filled(name: str, shape: tuple[int, ...]) -> Any:
    """A tensor of this dtype whose bytes are 0, 1, 2, …, or 0 and 1 for bool."""
    tensor = tensors.empty(torch, name, shape)
    memory = tensors.memory(tensor)[1]
    data = np.arange(memory.nbytes, dtype="u1")
    memory.reshape(-1).view("u1")[:] = data % 2 if name == "bool" else data
    return tensor


def same(a: Any, b: Any) -> bool:
    a, b = a.detach(), b.detach()
    return bool(
        a.dtype == b.dtype
        and a.shape == b.shape
        and tensors.memory(a.contiguous())[1].tobytes()
        == tensors.memory(b.contiguous())[1].tobytes()
    )


@pytest.mark.parametrize("name", sorted(TORCH))
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)])
def test_every_dtype_travels(name: str, shape: tuple[int, ...]) -> None:
    if not hasattr(torch, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    x = filled(name, shape)
    (got,) = into([x], None)
    assert same(got, x)
    assert got.data_ptr() != x.data_ptr() or not x.numel()
    assert describe(x) == f"{name}[{','.join(map(str, shape))}]"
    out = (
        filled(name, shape)
        if name == "bool"
        else torch.zeros_like(x.view(torch.uint8)).view(x.dtype)
        if x.ndim
        else filled(name, shape)
    )
    assert into(x, out) is out
    assert same(out, x)


def test_carriers_have_the_size_of_the_dtype() -> None:
    for name in CARRIERS:
        if hasattr(torch, name):
            assert np.dtype(CARRIERS[name]).itemsize == getattr(torch, name).itemsize


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(6.0)[::2],
        torch.arange(3.0).expand(2, 3),
        torch.arange(24).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([1 + 2j, 3j]).conj().imag,
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.arange(4.0).bfloat16().reshape(2, 2).t(),
    ],
)
def test_every_layout_travels(x: Any) -> None:
    got = into(x, None)
    assert type(got) is torch.Tensor
    assert torch.equal(got, x.detach())
    assert got.is_contiguous()
    assert not got.requires_grad


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (lambda: torch.ones(2, device="meta"), "a tensor on meta does not travel: pass x.cpu()"),
        (lambda: torch.ones(2).to_sparse(), "layout torch.sparse_coo does not travel"),
    ],
)
def test_tensors_that_do_not_travel(x: Any, words: str) -> None:
    with pytest.raises(TypeError, match=r"value\['k'\]: .*" + words):
        encode({"k": x()})


def test_tensors_of_unknown_dtypes_do_not_travel() -> None:
    class Odd:
        is_cpu, is_nested = True, False
        dtype = "torch.qint8"
        layout = torch.strided

    with pytest.raises(TypeError, match=r"dtype torch.qint8 and layout torch.strided does not"):
        tensors.memory(Odd())


def test_tensors_without_memory_do_not_travel() -> None:
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, (2,))

        @classmethod
        def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise RuntimeError("nothing here")

    with pytest.raises(TypeError, match="the memory of this Wrapper cannot be read"):
        encode(Wrapper())


def test_received_tensors_and_arrays_keep_their_kind() -> None:
    got = into({"t": torch.ones(2), "n": np.ones(2), "s": torch.Size([2])}, None)
    assert [type(v) for v in got.values()] == [torch.Tensor, np.ndarray, tuple]


def test_out_of_the_other_kind() -> None:
    array = np.zeros(3, "f4")
    assert into(torch.arange(3.0), array) is array
    assert array.tolist() == [0, 1, 2]
    tensor = torch.zeros(3, dtype=torch.float64)
    assert into(np.arange(3.0), tensor) is tensor
    with pytest.raises(
        TypeError, match=r"out: is uint16\[2\], the incoming array is bfloat16\[2\]"
    ):
        into(torch.ones(2).bfloat16(), np.zeros(2, "u2"))


def test_version_counters_tell_of_writes() -> None:
    for out in (torch.zeros(3), torch.zeros(6)[::2]):
        before = out._version
        into(torch.ones(3), out)
        assert out._version > before
    w = torch.ones(3, requires_grad=True)
    x = torch.ones(3)
    y = (w * x).sum()
    into(torch.zeros(3), x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        untracked = torch.zeros(3)
    assert into(torch.ones(3), untracked).tolist() == [1, 1, 1]


def test_leaves_that_require_grad_are_written() -> None:
    w = torch.zeros(3, requires_grad=True)
    assert into(torch.ones(3), w) is w
    assert w.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (torch.ones(2, dtype=torch.complex64).conj(), "lazily conjugated"),
        (torch.ones(1, dtype=torch.complex64).expand(2), "share one place"),
    ],
)
def test_tensors_that_cannot_be_written(out: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        into(torch.ones(2, dtype=torch.complex64), out)
    with pytest.raises(ValueError, match=words):
        Operand.of(out, SUM, in_place=True)


def test_a_dtype_that_this_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = tokens.pack([tokens.array("torch", "float8_e5m2", (2,))])
    monkeypatch.delattr(torch, "float8_e5m2")
    with pytest.raises(TypeError, match=r"value: torch .* has no dtype 'float8_e5m2'"):
        parse(meta).allocate()


def test_torch_is_imported_only_when_needed() -> None:
    program = f"""
import sys, numpy as np
from aiodist.buffers import encoding, reductions, values, scalars
from aiodist.types import ReduceOp
made = values.parse(encoding.encode([np.ones(3), 1, "x"]).meta)
made.allocate()
made.finish()
reductions.Operand.of(np.ones(3), ReduceOp.SUM, in_place=True).finish()
assert "torch" not in sys.modules
incoming = values.parse({encode(torch.arange(3).bfloat16()).meta!r})
assert "torch" not in sys.modules
incoming.allocate()
print(incoming.finish().dtype)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=50
    )
    assert (done.stdout.strip(), done.returncode) == ("torch.bfloat16", 0), done.stderr


# --- reductions -----------------------------------------------------------------------------------


def reduce_with(x: Any, others: list[Any], op: ReduceOp, **options: Any) -> Any:
    operand = Operand.of(x, op, **options)
    (group,) = operand.groups
    rows = [Operand.of(other, op, in_place=False).groups[0] for other in others]
    xs = [g.x.pieces(0, g.x.length)[0] for g in (group, *rows)]
    group.kernel.reduce(xs, group.out.pieces(0, group.out.length)[0], len(xs))
    return operand.finish()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("transposed", [False, True])
def test_tensors_are_reduced_in_place(dtype: Any, transposed: bool) -> None:
    x = torch.arange(6).reshape(2, 3).to(dtype)
    x = x.t() if transposed else x
    other = torch.ones_like(x)
    expected = x + other
    before = x._version
    assert reduce_with(x, [other], SUM, in_place=True) is x
    assert torch.equal(x, expected)
    assert x._version > before


def test_new_tensors_and_out() -> None:
    x = torch.arange(3.0).bfloat16()
    got = reduce_with(x, [x], SUM, in_place=False)
    assert got.dtype == torch.bfloat16
    assert got.tolist() == [0, 2, 4]
    assert x.tolist() == [0, 1, 2]
    out = torch.zeros(3).bfloat16()
    assert reduce_with(x, [x], SUM, in_place=True, out=out) is out
    assert out.tolist() == [0, 2, 4]


def test_gradients_are_reduced() -> None:
    w = torch.ones(3, requires_grad=True)
    (w * torch.arange(3.0)).sum().backward()
    assert reduce_with(w.grad, [torch.ones(3)], ReduceOp.AVG, in_place=True) is w.grad
    assert w.grad.tolist() == [0.5, 1, 1.5]


def test_lists_mix_kinds() -> None:
    xs = [torch.ones(2), np.ones(2, "f4"), torch.ones(2).half()]
    operand = Operand.of(xs, SUM, in_place=True)
    assert operand.signature == "[float32[2], float32[2], float16[2]]"
    assert [(g.name, g.x.length) for g in operand.groups] == [("float32", 4), ("float16", 2)]
    assert operand.finish() is xs


def test_tensors_are_split_as_numpy_does() -> None:
    x = torch.arange(10.0).reshape(5, 2)
    slots = split_slots(x, 3)
    assert all(isinstance(slot, torch.Tensor) for slot in slots)
    assert [slot.tolist() for slot in slots] == [s.tolist() for s in torch.tensor_split(x, 3)]
    operand = Operand.of_slots(x, SUM, rank=2, size=3)
    assert operand.groups[0].bounds == [0, 4, 8, 10]
    assert type(operand.finish()) is torch.Tensor


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_bfloat16_rounds_as_torch_does(patterns: list[int]) -> None:
    acc = np.array(patterns, "<u4").view("<f4")
    out = np.empty(len(acc), "<u2")
    Kernel.of(SUM, "bfloat16").store(acc, out, 1)
    ours = torch.from_numpy(out).view(torch.bfloat16)
    theirs = torch.from_numpy(acc).bfloat16()
    assert torch.equal(ours.isnan(), theirs.isnan())
    plain = ~theirs.isnan()
    assert torch.equal(ours[plain].view(torch.uint16), theirs[plain].view(torch.uint16))


def test_every_bfloat16_loads_as_torch_does() -> None:
    patterns = np.arange(2**16, dtype="<u2")
    ours = Kernel.of(SUM, "bfloat16").load(patterns)
    theirs = torch.from_numpy(patterns).view(torch.bfloat16).float().numpy()
    assert np.array_equal(ours.view("u4"), theirs.view("u4"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("op", "f"),
    [
        (ReduceOp.SUM, lambda xs: xs.sum(0)),
        (ReduceOp.AVG, lambda xs: xs.sum(0) / 3),
        (ReduceOp.PRODUCT, lambda xs: xs.prod(0)),
        (ReduceOp.MAX, lambda xs: xs.amax(0)),
    ],
    ids=["sum", "avg", "product", "max"],
)
def test_half_precision_is_float32_rounded_once(dtype: Any, op: ReduceOp, f: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    xs = torch.randn(3, 1000, generator=generator).to(dtype)
    got = reduce_with(xs[0].clone(), [xs[1], xs[2]], op, in_place=True)
    assert torch.equal(got, f(xs.float()).to(dtype))


# --- operators of users ---------------------------------------------------------------------------


def test_custom_operators_get_tensors() -> None:
    seen = []

    def f(a: Any, b: Any) -> Any:
        seen.append((type(a), a.dtype, tuple(a.shape)))
        return a.sub_(b)

    x, y = torch.full((2, 2), 5.0).bfloat16(), torch.ones(2, 2).bfloat16()
    assert reduce_with(x, [y, y], ReduceOp.of(f), in_place=True) is x
    assert x.tolist() == [[3, 3], [3, 3]]
    assert y.tolist() == [[1, 1], [1, 1]]
    assert seen == [(torch.Tensor, torch.bfloat16, (2, 2))] * 2


def test_elementwise_operators_get_flat_tensors() -> None:
    op = ReduceOp.custom(torch.maximum, elementwise=True)
    got = reduce_with(torch.tensor([[1, 5]]), [torch.tensor([[3, 4]])], op, in_place=False)
    assert got.tolist() == [[3, 5]]


@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (lambda a, b: a.double(), TypeError, r"is float64\[2\], each argument is float32\[2\]"),
        (lambda a, b: a.to("meta"), TypeError, "a tensor on meta"),
        (lambda a, b: (a + b).sum(), ValueError, r"is float32\[\]"),
    ],
)
def test_results_of_tensor_operators_are_checked(f: Any, error: Any, words: str) -> None:
    k = CustomKernel(ReduceOp.of(f), "float32", [("torch", (2,))])
    with pytest.raises(error, match=words):
        k.reduce([np.ones(2, "f4")] * 2, np.empty(2, "f4"), 2)


def test_results_may_carry_gradients() -> None:
    w = torch.ones(2, requires_grad=True)
    k = CustomKernel(ReduceOp.of(lambda a, b: w * a + b), "float32", [("torch", (2,))])
    out = np.empty(2, "f4")
    k.reduce([np.ones(2, "f4")] * 2, out, 2)
    assert out.tolist() == [2, 2]


def test_empty_makes_tensors_without_warning() -> None:
    array = arrays.empty("torch", "complex32", (2, 0), "x")
    assert array.value.dtype == torch.complex32


@pytest.mark.parametrize("name", sorted(TORCH))
def test_large_tensors_are_like_small_ones(name: str) -> None:
    length = tensors.HUGE // carrier(name).itemsize
    for shape in ((length,), (2, length // 2), (length - 1,)):
        tensor = tensors.empty(torch, name, shape)
        assert tensor.dtype == getattr(torch, name)
        assert tuple(tensor.shape) == shape
        assert tensor.is_contiguous()
        tensor.view(torch.uint8)[...] = 0


@pytest.mark.parametrize(
    ("dtype", "like", "expected"),
    [
        (np.int32, None, ("numpy", "int32")),
        ("f8", None, ("numpy", "float64")),
        (torch.bfloat16, None, ("torch", "bfloat16")),
        (None, np.zeros(2, "f4"), ("numpy", "float32")),
        (None, torch.zeros(2, dtype=torch.int64), ("torch", "int64")),
    ],
)
def test_what_a_new_array_is_to_be(dtype: Any, like: Any, expected: tuple[str, str]) -> None:
    kind, name = arrays.kind_and_name(dtype, like)
    assert (kind, name) == expected
    made = arrays.over(np.zeros(2 * arrays.carrier(name).itemsize, np.uint8), kind, name, (2, 1))
    assert isinstance(made, torch.Tensor if kind == "torch" else np.ndarray)
    assert tuple(made.shape) == (2, 1)
    assert arrays.kind_and_name(None, made) == expected


@pytest.mark.parametrize(
    ("dtype", "like", "text"),
    [
        (None, None, "give a dtype, or like="),
        (np.int32, np.zeros(2), "give a dtype, or like="),
        (None, [1, 2], "like: expected an array, got list"),
        (torch.quint8, None, "dtype: torch.quint8 does not travel"),
        (object, None, "dtype"),
    ],
)
def test_what_no_new_array_can_be(dtype: Any, like: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        arrays.kind_and_name(dtype, like)


def test_a_tensor_for_which_there_is_no_memory() -> None:
    with pytest.raises(MemoryError, match="allocate memory"):
        tensors.empty(torch, "float32", (1 << 46,))  # more than there are addresses
    with pytest.raises(RuntimeError, match="negative"):
        tensors.empty(torch, "float32", (-1,))


def test_another_thread_may_ask_while_a_dtype_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3)
    found: list[Any] = []

    class Asked(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            found.append(tensors.plain(x))  # as another thread does at this moment

    monkeypatch.setattr(tensors, "_names", Asked())
    monkeypatch.setattr(tensors, "_carriers", {})
    assert tensors.dtype_name(x.dtype) == "float32"
    assert [memory.tolist() for memory in found] == [[1, 1, 1]]
