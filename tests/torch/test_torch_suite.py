"""A part of torch's own tests of backends; all that Gloo passes is `make torch-suite`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("suite")

# Not `barrier_timeout_global`, because its ranks must join within one second.
CHOSEN = (
    "all_reduce_sum",
    "sparse_all_reduce_sum",
    "all_gather_coalesced_simple",
    "all_to_all_single_unequal_split",
    "reduce_min",
    "send_recv_any_source",
    "monitored_barrier_gloo_rank_0_timeout",
    "destroy_group",
    "gather_object",
    "DistributedDataParallelCPU",
)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_chosen_tests_of_torch(installed: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    command = [sys.executable, str(SUITE / "torch_suite.py"), "--backend", "aiodist"]
    command += ["--world", "4", "--start", "fork", "--logdir", str(tmp_path / "logs")]
    command += ["--only", f"^test_({'|'.join(CHOSEN)})$"]
    done = subprocess.run(
        command, check=False, env=installed, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CHOSEN)} passed, 0 failed, 0 skipped" in done.stdout


def test_the_list_of_exceptions_is_short() -> None:
    """What Gloo passes and `make torch-suite` leaves out: torch lets Gloo's class alone do it."""
    names = (SUITE / "gloo_passes.txt").read_text().split()
    assert len(names) == len(set(names)) == 123
    (left_out,) = re.findall(r"--skip '(.*)\$\$'", (SUITE.parents[2] / "Makefile").read_text())
    assert sum(re.fullmatch(left_out, name) is not None for name in names) == 4
