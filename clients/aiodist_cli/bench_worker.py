"""One process of a library that benchmarks measure: Gloo, MPI, or a class with the same methods.

For an MPI this file runs as a script, so that MPIs may have environments of their own. So it
imports only the standard library, numpy, and what it measures::

    bench_worker.py CONTROL mpi                             (under mpirun)
    python -m aiodist_cli.bench_worker CONTROL gloo RANK SIZE HOST
    python -m aiodist_cli.bench_worker CONTROL torch RANK SIZE HOST     (with aiodist's backend)
    python -m aiodist_cli.bench_worker CONTROL MODULE:CLASS RANK SIZE HOST

The last one is for any `Library`, made by ``CLASS(rank, size, host, file)``. `host`: the host of
rank 0; `file`: a path by which the ranks find each other.

A worker connects to the Unix socket CONTROL, says hello, and obeys. Each line is a JSON object::

    hello   {"rank": 0, "pid": 4711, "library": "Gloo of torch 2.13.0", "features": []}
    order   {"do": "run", "op": "all_reduce", "nbytes": 8, "iterations": 1000,
             "memory": "plain", "fill": false, "check": false}
    answer  {"ns": [1234, …], "cpu": 0.01}, without "ns" if it is not of rank 0; "cpu": seconds of
            processor time; {"error": "…"} if it failed

If "do" is "MODULE:FUNCTION", that function is called with the library and the rest of the order,
and returns the answer.

The end of the connection, or {"do": "quit"}, ends the worker. Between orders it sleeps in a
blocking read, so that it leaves the cores to others.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

FLOAT = 4
"""Bytes of an element: everything is float32."""

OPS = ("all_reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all", "ping_pong")
"""What can be measured. `ping_pong`: rank 0 sends to rank 1, which sends it back."""


class Layout(NamedTuple):
    """The memory of an operation at one rank, and what it contains at the end.

    Every element of the input is the rank + 1. `out`: elements of the output; 0 if the result is in
    place. `result`: the values of equal parts of the result, in order; empty: not checked.
    """

    elements: int
    out: int
    result: tuple[float, ...]


def layout(op: str, nbytes: int, rank: int, size: int) -> Layout:
    """`nbytes`: of the input of one rank."""
    count = nbytes // FLOAT
    total = size * (size + 1) / 2
    ranks = tuple(float(number + 1) for number in range(size))
    if op == "all_reduce":
        return Layout(count, 0, (total,))
    if op == "broadcast":
        return Layout(count, 0, (1.0,))
    if op == "reduce_scatter":
        return Layout(count, count // size, (total,))
    if op == "all_gather":
        return Layout(count, count * size, ranks)
    if op == "all_to_all":
        return Layout(count, count, ranks)
    if op == "ping_pong":
        return Layout(count, count, (1.0,) if rank < 2 else ())
    raise ValueError(f"there is no operation {op!r}: expected one of {', '.join(OPS)}")


def check(op: str, result: Any, expected: Sequence[float]) -> None:
    """Raise ValueError unless the equal parts of the numpy array `result` have the `expected`
    values."""
    part = len(result) // max(1, len(expected))
    for number, value in enumerate(expected):
        found = result[number * part : (number + 1) * part]
        if not (found == value).all():
            raise ValueError(f"{op} computed {found}, all elements should be {value}")


class Prepared(NamedTuple):
    """An operation on its memory: `call` does it once; `x` and `out` are numpy arrays."""

    call: Callable[[], Any]
    x: Any
    out: Any
    expected: tuple[float, ...]


class Block(NamedTuple):
    """Iterations in a row: nanoseconds of each at one rank, and all processor time in seconds."""

    ns: list[int]
    cpu: float

    def answer(self, rank: int) -> dict[str, Any]:
        return {"ns": self.ns, "cpu": self.cpu} if rank == 0 else {"cpu": self.cpu}


class Library(Protocol):
    """A library to measure, as one rank sees it.

    Its arrays may have any type that `view` can show as numpy arrays of the same memory.
    """

    rank: int
    size: int
    name: str
    computes: bool
    """Whether operations have results that can be checked: else they only move the bytes."""

    def empty(self, elements: int) -> Any:
        """Make an array of float32."""

    def view(self, array: Any) -> Any:
        """The memory of `array` as a numpy array."""

    def operation(self, op: str, x: Any, out: Any) -> Callable[[], Any]:
        """A function that does `op` once. `out` is None if the result is in place."""
        ...

    def barrier(self) -> Any:
        """Wait for all ranks, or return an awaitable that does."""

    def close(self) -> None:
        """Leave."""


class Torch:
    """torch.distributed with one of its backends for processors: "gloo", or "aiodist"."""

    computes = True

    def __init__(self, backend: str, rank: int, size: int, file: str) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=size)
        self.rank, self.size = rank, size
        self.name = f"{backend.capitalize()} of torch {torch.__version__}"
        self._torch: Any = torch
        self._dist: Any = dist

    def empty(self, elements: int) -> Any:
        return self._torch.empty(elements, dtype=self._torch.float32)

    def view(self, array: Any) -> Any:
        return array.numpy()

    def operation(self, op: str, x: Any, out: Any) -> Callable[[], Any]:
        dist = self._dist
        if op == "all_reduce":
            return lambda: dist.all_reduce(x)
        if op == "broadcast":
            return lambda: dist.broadcast(x, 0)
        if op == "reduce_scatter":
            slots = list(x.chunk(self.size))  # faster than with one tensor
            return lambda: dist.reduce_scatter(out, slots)
        if op == "all_gather":
            parts = list(out.chunk(self.size))
            return lambda: dist.all_gather(parts, x)
        if op == "all_to_all":
            return lambda: dist.all_to_all_single(out, x)
        return ping_pong(self.rank, dist.send, dist.recv, x, out)

    def barrier(self) -> None:
        self._dist.barrier()

    def close(self) -> None:
        self._dist.destroy_process_group()


class Mpi:
    """Any MPI, through mpi4py, with the buffer interface."""

    computes = True

    def __init__(self) -> None:
        import numpy

        self._numpy: Any = numpy  # imported here, because other libraries do without it
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._world: Any = self._mpi.COMM_WORLD  # the communicator of all ranks
        # As given by the launcher of that MPI.
        self.rank, self.size = self._world.rank, self._world.size
        text = self._mpi.Get_library_version().replace("\0", "").split("\n")[0]
        self.name = text.split(",")[0].strip()  # the first words of its own name

    def empty(self, elements: int) -> Any:
        return self._numpy.empty(elements, self._numpy.float32)

    def view(self, array: Any) -> Any:
        return array

    def operation(self, op: str, x: Any, out: Any) -> Callable[[], Any]:
        world, in_place = self._world, self._mpi.IN_PLACE
        if op == "all_reduce":
            return lambda: world.Allreduce(in_place, x)
        if op == "broadcast":
            return lambda: world.Bcast(x, 0)
        if op == "reduce_scatter":
            return lambda: world.Reduce_scatter_block(x, out)
        if op == "all_gather":
            return lambda: world.Allgather(x, out)
        if op == "all_to_all":
            return lambda: world.Alltoall(x, out)
        return ping_pong(self.rank, world.Send, world.Recv, x, out)

    def barrier(self) -> None:
        self._world.Barrier()

    def close(self) -> None:
        self._mpi.Finalize()


def ping_pong(
    rank: int, send: Callable[..., Any], receive: Callable[..., Any], x: Any, out: Any
) -> Callable[[], Any]:
    """There and back between ranks 0 and 1; nothing on other ranks."""

    def ping() -> None:
        send(x, 1)
        receive(out, 1)

    def pong() -> None:
        receive(out, 0)
        send(out, 0)

    return (ping, pong)[rank] if rank < 2 else lambda: None


def prepare(library: Library, op: str, nbytes: int) -> Prepared:
    """Get the memory of an operation."""
    elements, out_elements, expected = layout(op, nbytes, library.rank, library.size)
    x = library.empty(elements)
    out = library.empty(out_elements) if out_elements else None
    return Prepared(
        library.operation(op, x, out),
        library.view(x),
        None if out is None else library.view(out),
        expected if library.computes else (),
    )


def fill(prepared: Prepared, rank: int) -> None:
    """Write the input of the next run, and touch all pages of the memory."""
    prepared.x.fill(rank + 1)
    if prepared.out is not None:
        prepared.out.fill(0)


def run(library: Library, prepared: Prepared, iterations: int, refill: bool = False) -> Block:
    """Measure iterations, whose times add up to that of the whole.

    `refill`: write the input again before each iteration, as programs do. Only processor time
    includes that.
    """
    call, clock = prepared.call, time.perf_counter_ns
    fill(prepared, library.rank)
    library.barrier()
    cpu = time.process_time()
    if refill:
        times = []
        for _ in range(iterations):
            prepared.x.fill(library.rank + 1)
            start = clock()
            call()
            times.append(clock() - start)
        return Block(times, time.process_time() - cpu)
    stamps = [clock()]
    for _ in range(iterations):
        call()
        stamps.append(clock())
    return Block(differences(stamps), time.process_time() - cpu)


def differences(stamps: Sequence[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise(stamps)]


def checked(op: str, prepared: Prepared) -> None:
    """Raise ValueError if the first iteration gave a wrong result."""
    check(op, prepared.x if prepared.out is None else prepared.out, prepared.expected)


def hello(rank: int, library: str, features: Sequence[str] = ()) -> dict[str, Any]:
    """The first message of a worker."""
    return {"rank": rank, "pid": os.getpid(), "library": library, "features": list(features)}


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def named(where: str) -> Any:
    """The object that "MODULE:NAME" names."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


class Worker:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._case: tuple[str, int] | None = None
        self._prepared: Prepared | None = None

    def obey(self, do: str, **details: Any) -> dict[str, Any]:
        """Carry out an order, and return the answer."""
        try:
            if do == "run":
                return self._run(**details)
            answer: dict[str, Any] = named(do)(self._library, **details)
            return answer
        except Exception as error:  # the driver is told, and goes on with the others
            return {"error": f"{type(error).__name__}: {error}"}

    def _run(
        self, op: str, nbytes: int, iterations: int, memory: str, fill: bool, check: bool
    ) -> dict[str, Any]:
        if self._prepared is None or self._case != (op, nbytes):
            self._prepared = None  # free its memory before the next is allocated
            self._prepared = prepare(self._library, op, nbytes)
            self._case = (op, nbytes)
        block = run(self._library, self._prepared, iterations, fill)
        if check:
            checked(op, self._prepared)
        return block.answer(self._library.rank)


def obey(library: Library, orders: Iterator[bytes], answer: Callable[[bytes], Any]) -> None:
    """Serve until told to quit."""
    answer(encode(hello(library.rank, library.name)))
    worker = Worker(library)
    for line in orders:
        order = json.loads(line)
        if order["do"] == "quit":
            library.close()
            return
        answer(encode(worker.obey(**order)))


def main(control: str, kind: str, *arguments: str) -> None:
    """Run a worker; see the top of this file."""
    library: Library
    if kind == "mpi":
        library = Mpi()
    else:
        rank, size, host = int(arguments[0]), int(arguments[1]), arguments[2]
        file = f"{control}.meeting"
        if ":" in kind:
            library = named(kind)(rank, size, host, file)
        else:
            library = Torch("aiodist" if kind == "torch" else kind, rank, size, file)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(control)
        obey(library, iter(connection.makefile("rb")), connection.sendall)


if __name__ == "__main__":
    main(*sys.argv[1:])
