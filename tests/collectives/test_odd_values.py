"""Values that do not travel, or look as if they did not, given to every operation."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = [
    pytest.mark.strength(2),
    pytest.mark.filterwarnings(
        "ignore:Sparse CSR tensor",
        "ignore:The PyTorch API of nested",
        "ignore:the matrix subclass:PendingDeprecationWarning",
    ),
]

torch = pytest.importorskip("torch")


def nested(depth):
    value = np.zeros(2)
    for _ in range(depth):
        value = [value]
    return value


def cyclic_list():
    value = []
    value.append(value)
    return value


def cyclic_dict():
    value = {}
    value["key"] = (value,)
    return value


DEEP = {
    "list in itself": cyclic_list,
    "dict in itself": cyclic_dict,
    "101 levels": lambda: nested(101),
    "5000 levels": lambda: nested(5000),
}
TENSORS = {
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "coo": lambda: torch.eye(2).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "meta": lambda: torch.ones(2, device="meta"),
    "masked": lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
}
GIVING = {
    "send": lambda g, x: g.send(x, 1),
    "sendrecv": lambda g, x: g.sendrecv(x, 1, src=1),
    "broadcast": lambda g, x: g.broadcast(x, 0),
    "all_gather": lambda g, x: g.all_gather(x),
    "gather": lambda g, x: g.gather(x, 1),
    "scatter": lambda g, x: g.scatter([x, x], 0),
    "all_to_all": lambda g, x: g.all_to_all([x, x]),
    "share": lambda g, x: g.share(x),
}
REDUCING = {
    "all_reduce": lambda g, x: g.all_reduce(x),
    "reduce": lambda g, x: g.reduce(x, 0),
    "reduce_scatter": lambda g, x: g.reduce_scatter([x, x]),
    "scan": lambda g, x: g.scan(x),
    "exscan": lambda g, x: g.exscan(x),
    "out": lambda g, x: g.all_reduce(np.zeros(2), out=x),
}


@pytest.mark.parametrize("value", DEEP)
@pytest.mark.parametrize("call", [*GIVING, *REDUCING])
def test_values_too_deep(run, groups, call, value):
    """Neither a RecursionError nor silence: an error of the call that says what is wrong."""

    async def main():
        async with groups(2) as ranks:
            # What a list of arrays has in place of an array is named, if nothing comes before.
            kinds = ValueError if call in GIVING else (ValueError, TypeError)
            start = (GIVING | REDUCING)[call]
            with pytest.raises(kinds, match=r"contain itself|expected an? (numpy )?(array|list)"):
                await start(ranks[0], DEEP[value]())

    run(main())


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("call", [*GIVING, *REDUCING])
def test_tensors_without_plain_memory(run, groups, everyone, call, kind):
    """Also where an operation of the same kind went well before."""

    async def main():
        async with groups(2) as ranks:
            for _ in range(3):
                await everyone(ranks, lambda g: g.all_reduce(torch.ones(2, 2)))
            start = (GIVING | REDUCING)[call]
            with pytest.raises(TypeError, match=r"does not travel|cannot be read"):
                await start(ranks[0], TENSORS[kind]())

    run(main())


@pytest.mark.parametrize("kind", ["nested", "jagged"])
def test_a_nested_tensor_is_no_array_of_slots(run, groups, kind):
    async def main():
        async with groups(2) as ranks:
            with pytest.raises(ValueError, match=r"out is \w+: a list of 2"):
                await ranks[0].all_gather(np.zeros(2), out=TENSORS[kind]())

    run(main())


def test_matrices(run, groups, everyone):
    """Matrices, which scipy's `todense` gives, arrive as arrays, and all ranks live on."""

    async def main():
        async with groups(2) as ranks:
            for rows in (1, 2, 40_000):
                expected = np.arange(2.0 * rows).reshape(rows, 2)
                for found in await everyone(
                    ranks, lambda g, x=expected: g.all_gather([np.matrix(x), g.rank])
                ):
                    for rank, (x, r) in enumerate(found):
                        assert r == rank
                        assert type(x) is np.ndarray
                        np.testing.assert_array_equal(x, expected)
                outs = [np.asmatrix(np.zeros((2, 2 * rows))) for _ in ranks]
                await everyone(
                    ranks, lambda g, o=outs, x=expected: g.all_gather(x.reshape(-1), out=o[g.rank])
                )
                for out in outs:
                    np.testing.assert_array_equal(out, np.stack([expected.reshape(-1)] * 2))
                for _ in range(2):
                    given = [np.matrix(expected) for _ in ranks]
                    results = await everyone(ranks, lambda g, x=given: g.all_reduce(x[g.rank]))
                    for x, result in zip(given, results, strict=True):
                        assert result is x
                        np.testing.assert_array_equal(np.asarray(x), 2 * expected)
                    sent = ranks[0].send(np.matrix(expected), 1)
                    out = np.asmatrix(np.zeros((rows, 2)))
                    assert await ranks[1].recv(out=out) is out
                    np.testing.assert_array_equal(np.asarray(out), expected)
                    await sent

    run(main())
