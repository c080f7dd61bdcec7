"""Slurm, with two hosts: the page's programs, and steps of all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import average
from slurm import Cluster

from aiodist.hostlist import hosts

pytestmark = pytest.mark.launchers

PAGE = "slurm.md"


def test_the_job_of_the_page(cluster: Cluster, folder: Path) -> None:
    assert cluster.batch(folder / "job.sh") == average()


def test_survivors_go_on(cluster: Cluster, folder: Path) -> None:
    lines = cluster.batch(folder / "survivors.sh")
    gone_on = [line for line in lines if "goes on" in line]
    assert gone_on == [f"rank {rank} of 3 goes on" for rank in range(3)], lines


STEPS = [
    "--nodes=2 --ntasks=4",
    "--nodes=2 --ntasks=4",
    "--nodes=2 --ntasks=4 --distribution=cyclic",
    "--nodes=1 --ntasks=2 --nodelist=node2",
    "--nodes=1 --ntasks=2 --relative=1",
    "--nodes=2 --ntasks=4 --mpi=pmi2",
]


def test_steps_of_one_job_at_a_time(cluster: Cluster, folder: Path) -> None:
    """Their ports and runs differ. Those on one host are not on the job's first."""
    script = folder / "steps.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=4\nexport AIODIST_TOKEN=secret\n"
        + "".join(
            f"srun --overlap {options} --output={number}.out python average.py &\n"
            for number, options in enumerate(STEPS)
        )
        + "wait\n"
    )
    assert cluster.batch(script) == []
    for number, options in enumerate(STEPS):
        printed = sorted((folder / f"{number}.out").read_text().splitlines())
        assert printed == average(2 if "--nodes=1" in options else 4), options


def test_a_batch_script_is_no_rank(cluster: Cluster, folder: Path) -> None:
    script = folder / "alone.sh"
    script.write_text("#!/bin/bash\n#SBATCH --ntasks=2\npython average.py 2>&1 | tail -n 1\n")
    (line,) = cluster.batch(script)
    assert "start the program by a launcher, as with `srun python PROGRAM.py`" in line


def test_an_arbitrary_distribution_is_told_what_to_do(cluster: Cluster, folder: Path) -> None:
    (folder / "hosts").write_text("node2\nnode1\n")
    command = ("srun", "--distribution=arbitrary", "--ntasks=2", "python", "average.py")
    done = cluster.on(0, *command, cwd=folder, SLURM_HOSTFILE=str(folder / "hosts"))
    assert done.returncode != 0
    assert "rank 0 may be on any host of SLURM_STEP_NODELIST=node[1-2]" in done.stderr
    variables = {"MASTER_ADDR": "node2", "MASTER_PORT": "29500", "AIODIST_TOKEN": "secret"}
    done = cluster.on(0, *command, cwd=folder, SLURM_HOSTFILE=str(folder / "hosts"), **variables)
    assert sorted(done.stdout.splitlines()) == average(2), done.stderr


@pytest.mark.parametrize(
    "expression",
    ["node7", "gpu[001-003,7],login", "a[9-11]", "r[1-2]n[08-09],x[5]", "a[09-11],b[1,1]"],
)
def test_lists_of_hosts_as_slurm_reads_them(
    cluster: Cluster, tmp_path: Path, expression: str
) -> None:
    shown = cluster.on(0, "scontrol", "show", "hostnames", expression, cwd=tmp_path)
    assert list(hosts(expression)) == shown.stdout.splitlines()
