"""``AIODIST_TORCH_REPLACES``: a program that asks torch for Gloo gets aiodist, and is told so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiodist_torch.replacing import replaced

pytestmark = pytest.mark.timeout(300)

Start = Callable[..., Any]

SAYS = 'aiodist: AIODIST_TORCH_REPLACES=gloo: the torch backend "gloo" of this process is aiodist\n'

REPLACING: dict[str, Any] = {"AIODIST_TORCH_REPLACES": "gloo", "anew": True}
"""How ranks are started: torch hears of it when it is imported."""


def words(running: Any) -> list[str]:
    """What each rank has said on stderr that is aiodist's; all must have ended well."""
    ends = [
        (*process.communicate(timeout=280), process.returncode) for process in running.processes
    ]
    assert [code for *_, code in ends] == [0] * len(ends), ends
    return [
        "".join(line for line in err.splitlines(True) if "aiodist" in line) for _, err, _ in ends
    ]


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ({"cpu": "gloo"}, {"cpu": "aiodist"}),
        ({"cpu": "gloo", "cuda": "gloo"}, {"cpu": "aiodist", "cuda": "gloo"}),
        ({"cuda": "nccl", "cpu": "gloo"}, {"cpu": "aiodist", "cuda": "nccl"}),
        ({"cuda": "gloo"}, {"cuda": "gloo"}),
        ({"cpu": "mpi"}, {"cpu": "mpi"}),
    ],
)
def test_what_is_replaced(asked: dict[str, str], made: dict[str, str]) -> None:
    assert list(replaced(asked).items()) == list(made.items())


@pytest.mark.long
def test_who_asks_for_gloo_gets_aiodist_and_is_told_so(job: Start) -> None:
    assert words(job("replaced.py", 2, **REPLACING)) == [SAYS, SAYS]


@pytest.mark.long
def test_calls_stay_in_step_after_one_that_is_refused_on_a_single_rank(job: Start) -> None:
    assert words(job("refused.py", 2, **REPLACING)) == [SAYS, SAYS]


@pytest.mark.long
@pytest.mark.parametrize("script", ["test_ops.py", "test_script.py"])
def test_scripts_of_accelerate(job: Start, script: str) -> None:
    """Its own tests, as they are: they ask for Gloo where there is no accelerator."""
    scripts = pytest.importorskip("accelerate.test_utils.scripts")
    path = Path(scripts.__file__).with_name(script)
    env = {"ACCELERATE_USE_CPU": "true", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    running = job(path, 2, **REPLACING, **env, LOCAL_RANK="0")
    assert words(running) == [SAYS, SAYS]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        pytest.param("", "", marks=pytest.mark.long),
        (
            "nccl",
            "aiodist: AIODIST_TORCH_REPLACES=nccl: "
            'only "gloo" and "tcp" can be replaced; nothing is\n',
        ),
        pytest.param("tcp", "", marks=pytest.mark.long),
    ],
)
def test_torch_can_be_imported_whatever_is_asked(
    installed: dict[str, str], value: str, said: str
) -> None:
    program = (
        "import torch.distributed as d\n"
        "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)\n"
        "print(type(d.group.WORLD._get_backend(d.torch.device('cpu'))).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        env=installed | {"AIODIST_TORCH_REPLACES": value},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ProcessGroupGloo\n", said)


def test_a_torch_that_is_built_otherwise_is_left_as_it_is(installed: dict[str, str]) -> None:
    program = (
        "import torch.distributed.distributed_c10d as c10d\n"
        "del c10d.BackendConfig\n"
        "import aiodist_torch\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        env=installed | {"AIODIST_TORCH_REPLACES": "gloo", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "this torch does not offer what is needed" in done.stderr


@pytest.mark.long
def test_aiodist_run_asks_for_it(installed: dict[str, str]) -> None:
    program = Path(__file__).with_name("programs") / "replaced.py"
    command = [sys.executable, "-m", "aiodist_cli", "run", "-n", "2"]
    command += ["--torch-backend-for", "gloo", str(program)]
    done = subprocess.run(
        command, check=False, env=installed, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(SAYS) == 2


@pytest.mark.parametrize(
    ("backend", "autoload", "why"),
    [("nccl", "1", "answer for gloo or tcp"), ("gloo", "0", "does not learn of aiodist")],
)
def test_aiodist_run_refuses_what_would_do_nothing(
    installed: dict[str, str], backend: str, autoload: str, why: str
) -> None:
    command = [sys.executable, "-m", "aiodist_cli", "run", "-n", "1"]
    done = subprocess.run(
        [*command, "--torch-backend-for", backend, __file__],
        check=False,
        env=installed
        | {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload, "TERM": "dumb", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert why in done.stderr
