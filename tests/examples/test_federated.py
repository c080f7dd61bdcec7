"""Clients that come for a round and go, behind TLS and a token."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiodist

PROGRAM = Path(__file__).parents[2] / "examples" / "federated" / "digits.py"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings that name certificates."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    made: dict[str, str] = load().certificates(tmp_path_factory.mktemp("ca"))
    return made


def load() -> Any:
    spec = importlib.util.spec_from_file_location("federated_digits", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def program(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {**files, "AIODIST_TOKEN": "secret"}.items():
        monkeypatch.setenv(name, value)
    return load()


def test_clients_share_no_image(program: Any) -> None:
    rows, _ = program.images()
    own = [program.own(number) for number in range(program.CLIENTS)]
    seen = {row.tobytes() for one, _ in own for row in one}
    assert sum(len(one) for one, _ in own) == len(rows) - program.TESTED
    assert not seen & {row.tobytes() for row in rows[: program.TESTED]}
    assert all((kinds.sum(axis=0) > 0).sum() == 5 for _, kinds in own)


async def test_rounds_of_other_clients_each(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Each round waits for all that are here, so that it has the clients that are meant for it.
    monkeypatch.setattr(program, "RULES", {"quorum": 3, "grace": 60.0, "transports": ("tcp",)})
    async with program.coordinator() as server:
        organiser = asyncio.create_task(program.organise(server.address, 2))
        first = await asyncio.gather(*[program.take_part(server.address, n) for n in (0, 3, 6)])
        assert len({one.value.tobytes() for one in first}) == 1
        assert len({one.round for one in first}) == 1
        second = await asyncio.gather(*[program.take_part(server.address, n) for n in (1, 4, 8)])
        weights = await organiser
    assert np.array_equal(weights, first[0].value + second[0].value)
    one, two = capsys.readouterr().out.splitlines()
    assert one.startswith("round 1: client 0, client 3, client 6: ")
    assert two.startswith("round 2: client 1, client 4, client 8: ")
    assert program.accuracy(weights) > 0.3


@pytest.mark.parametrize("lacking", ["AIODIST_TOKEN", "AIODIST_TLS_CERT"])
async def test_strangers_stay_outside(
    program: Any, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    monkeypatch.setattr(program, "RULES", {"timeout": 0.5})
    async with program.coordinator() as server:
        monkeypatch.delenv(lacking)
        if lacking == "AIODIST_TLS_CERT":
            monkeypatch.delenv("AIODIST_TLS_KEY")
        with pytest.raises(aiodist.AiodistError):
            await program.take_part(server.address, 0)


async def test_the_demonstration(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    program.ROUNDS = 2
    await program.demonstrate()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["round 1", "round 2"]


async def test_a_client_that_fails_ends_the_demonstration(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(number: int) -> None:
        raise OSError("the images are gone")

    monkeypatch.setattr(program, "own", own)
    with pytest.raises(ExceptionGroup) as caught:
        await program.demonstrate()
    assert str(caught.value.exceptions[0]) == "the images are gone"
