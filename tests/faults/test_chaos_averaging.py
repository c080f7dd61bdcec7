"""A short run of `make chaos-averaging`, and that its checker sees what is wrong."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chaos_averaging import Fleet
from chaos_weights import World
from fault_programs import ran


@pytest.mark.long
@pytest.mark.timeout(420)
def test_rounds_go_on_after_every_fault() -> None:
    said = ran("chaos_averaging.py", "-n", 12, "--seed", 4, "--channels", 1)
    assert '"versions"' in said


def result(**fields: Any) -> dict[str, Any]:
    usual = {"member": 1, "call": 1, "round": 1, "contributes": True, "bits": "b"}
    return {**usual, "counted": [[1, 1], [2, 1]], "contributors": 2, **fields}


@pytest.mark.parametrize(
    ("kind", "second"),
    [
        (None, {"member": 2}),
        (None, {"call": 2, "contributes": False}),
        ("mixed", {"member": 2, "bits": "c"}),
        ("wrong", {"round": 2, "call": 2, "counted": [[1, 2]], "contributors": 1}),
        ("wrong", {"round": 2, "call": 2, "counted": [[1, 2], [2, 2]], "contributors": 3}),
        ("counted", {"round": 2, "call": 2, "counted": [[1, 2], [2, 1]]}),  # twice
        ("counted", {"call": 2}),  # lost
        ("counted", {"member": 2, "contributes": False}),  # late, and in its round
    ],
)
def test_the_checker(
    kind: str | None, second: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path, 0, 1, Fleet)
    [fleet] = world.channels
    member: Any = SimpleNamespace(
        problems=[], process=SimpleNamespace(pid=0), differences={}, most_mapped=0
    )
    member.results = [result(), result(**second)]
    fleet._hear(member)
    assert dict(world.problems) == ({} if kind is None else {kind: 1}), capsys.readouterr().out
