"""mpirun of the MPIs that `make launchers` installs: on one host, and in a job of Slurm on two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launched import ROOT, average, clean_environment
from slurm import Cluster

pytestmark = pytest.mark.launchers

PAGE = "mpirun.md"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MORE_THAN_CORES = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


@pytest.fixture(params=["openmpi", "intelmpi", "mpich"])
def mpi(request: pytest.FixtureRequest) -> dict[str, str]:
    """The variables under which `mpirun` is that of an MPI."""
    bin = ROOT / ".venv" / "peers" / request.param / "bin"
    if not (bin / "mpirun").exists():
        pytest.skip(f"{request.param} is not installed: make launchers")
    variables = clean_environment() | AS_ROOT | MORE_THAN_CORES
    python, _, rest = variables["PATH"].partition(":")
    return variables | {"PATH": f"{python}:{bin}:{rest}", "MPI": request.param}


def test_the_program_of_the_page(mpi: dict[str, str], folder: Path) -> None:
    done = subprocess.run(
        ["mpirun", "-n", "4", "python", "average.py"],
        cwd=folder,
        env=mpi,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
        timeout=50,
    )
    assert sorted(done.stdout.splitlines()) == average(), done.stderr


def test_two_runs_on_one_host_at_a_time(mpi: dict[str, str], folder: Path) -> None:
    command = ["mpirun", "-n", "2", "python", "average.py"]
    runs = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=mpi | ({"AIODIST_RUN_ID": f"run {number}"} if mpi["MPI"] == "mpich" else {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        for run in runs:
            out, err = run.communicate(timeout=50)
            assert sorted(out.splitlines()) == average(2), err
    finally:
        for run in runs:
            run.kill()
            run.communicate()


def test_in_a_job_of_slurm_over_two_hosts(
    mpi: dict[str, str], cluster: Cluster, folder: Path
) -> None:
    script = folder / "job.sh"
    text = script.read_text()
    if mpi["MPI"] != "openmpi":
        script.write_text(text.replace("mpirun -x AIODIST_TOKEN", "mpirun -ppn 2"))
    else:
        # On the other host its daemon puts its own folder first in the PATH, which has a python.
        text = text.replace("python", sys.executable)
        script.write_text(text.replace("mpirun", "mpirun --bind-to none"))
    variables = {name: mpi[name] for name in ("PATH", *AS_ROOT)}
    assert cluster.batch(script, **variables) == average()
