"""What tokens per second of two backends, measured in turns, come to."""

from __future__ import annotations

from benchmarks.tensor_parallel import compared


def test_blocks_are_compared_with_their_neighbours() -> None:
    """So the machine may be slower for a while: in the second block here, ten times as slow."""
    own = [{"rate": rate, "call": 2e-4} for rate in (90.0, 9.0, 90.0)]
    gloo = [{"rate": rate, "call": 1e-4} for rate in (100.0, 10.0, 100.0)]
    fact = compared(4, own, gloo)
    assert fact.name == "tensor parallelism, n=2, 4 busy programs a core"
    assert fact.found.startswith("0.90 × Gloo: 90.0 tokens/s, 200 µs of processor time a call")
    assert fact.met is False
    assert compared(0, gloo, gloo).met is True
