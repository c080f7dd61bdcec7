"""How CUDA tensors are reduced, on tensors of the CPU: the same calls, in a stream that is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiodist import ReduceOp
from aiodist.buffers import tensors
from aiodist.buffers.dtypes import TORCH
from aiodist.buffers.kernels import Kernel
from aiodist.devices import cuda

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

OPS = [
    ReduceOp.SUM,
    ReduceOp.PRODUCT,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.AVG,
    ReduceOp.BAND,
    ReduceOp.BOR,
    ReduceOp.BXOR,
    ReduceOp.LAND,
    ReduceOp.LOR,
    ReduceOp.LXOR,
    ReduceOp.premul_sum(3),
]
DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
DTYPES += ["complex64", "complex128"]


def on_cpu() -> cuda.CudaDevice:
    device = cuda.CudaDevice(0)
    device._device = torch.device("cpu")
    return device


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.sample(160)
def test_bit_for_bit_as_on_the_host(op: ReduceOp, name: str, size: int) -> None:
    device = on_cpu()
    try:
        kernel = Kernel.of(op, name)
    except TypeError:
        pytest.skip("it has no meaning")
    if not device.reduces(op, name):
        pytest.skip("such arrays go through the host")
    rng = np.random.default_rng(size)
    given: list[Any] = [(rng.random(97) * 9 - 2).astype(np.int64).astype(name) for _ in range(size)]
    if name.startswith("float"):
        given = [(rng.random(97) * 3 - 1).astype(name) for _ in range(size)]
    if name.startswith("complex"):
        given = [(rng.random((97, 2)) * 3 - 1).view("complex128")[:, 0] for _ in range(size)]
        given[-1][0] = complex(np.inf, 1)
        given = [x.astype(name) for x in given]
    due = np.empty(97, name)
    kernel.reduce(given, due, size)
    for place in range(size):  # in place at each of the ranks
        xs = [torch.from_numpy(x.copy()) for x in given]
        device.reduce(cuda.CudaStream(None), op, xs, xs[place], size)
        np.testing.assert_array_equal(xs[place].numpy(), due)


def test_an_average_is_divided_by_a_number_on_the_device() -> None:
    divisors: list[Any] = []

    class Noted(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "div" in func.__name__:
                divisors.append(args[1])
            return func(*args, **(kwargs or {}))

    xs = [torch.ones(3) for _ in range(3)]
    with Noted():
        on_cpu().reduce(cuda.CudaStream(None), ReduceOp.AVG, xs, xs[0], 3)
    (divisor,) = divisors
    assert (divisor.shape, divisor.dtype, divisor.item()) == ((), torch.float32, 3.0)


def test_bfloat16_is_rounded_once() -> None:
    device = on_cpu()
    xs = [torch.tensor([256.0, 1.0]).to(torch.bfloat16) for _ in range(3)]
    xs[1][0] = xs[2][0] = 1.0  # 256 + 1 is 256 in bfloat16, 256 + 2 is 258
    device.reduce(cuda.CudaStream(None), ReduceOp.SUM, xs, xs[0], 3)
    assert xs[0].tolist() == [258.0, 3.0]


def test_what_the_device_lacks_goes_through_the_host() -> None:
    device = on_cpu()
    assert not device.reduces(ReduceOp.SUM, "uint32")
    assert not device.reduces(ReduceOp.custom(max), "float32")
    assert device.reduces(ReduceOp.LOR, "bool")


@pytest.mark.parametrize("name", sorted(TORCH))
def test_a_strided_copy(name: str) -> None:
    x, into = tensors.new(torch, name, (3, 2)), tensors.new(torch, name, (2, 3)).T
    bits, got = tensors.memory(x)[1], tensors.memory(into)[1]
    bits[:] = np.arange(6).reshape(3, 2) % (2 if name == "bool" else 9)
    on_cpu().copy(cuda.CudaStream(None), into, x)
    np.testing.assert_array_equal(got, bits)


def test_flat_empty_and_describe() -> None:
    device = on_cpu()
    x = torch.arange(6.0).reshape(2, 3)
    flat = device.flat(x)
    assert flat is not None and flat.data_ptr() == x.data_ptr() and flat.shape == (6,)
    assert device.flat(x.T) is None
    assert device.flat(torch.ones(2, dtype=torch.complex64).conj()) is None
    assert device.describe(tensors.new(torch, "bfloat16", (2, 3))) == ("bfloat16", (2, 3))
    assert not device.can_write(torch.ones(1).expand(3))
    assert not device.can_write(torch.ones(5).as_strided((4, 2), (1, 1)))
    assert device.can_write(torch.ones(4, 2).T) and device.can_write(torch.ones(0, 3))
    with pytest.raises(TypeError, match="dense"):
        device.describe(x.to_sparse())
    with pytest.raises(TypeError, match="nested"):
        device.describe(torch.nested.as_nested_tensor([x], layout=torch.jagged))
    with FakeTensorMode(), pytest.raises(TypeError, match="a way of its own"):
        device.describe(torch.empty(3))
