"""A Slurm of two hosts, in network namespaces that the test makes."""

from __future__ import annotations

import os
import secrets
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from launched import clean_environment, inside, ip

NODES = ("node1", "node2")
SLURM = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "munged")

SLURM_CONF = """\
ClusterName=tests
SlurmctldHost=node1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmctldPort=6817
SlurmdPort=6818
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
MailProg=/bin/true
InactiveLimit=0
KillWait=2
SlurmdParameters=config_overrides
NodeName=node[1-2] CPUs=8 State=UNKNOWN
PartitionName=all Nodes=node[1-2] Default=YES MaxTime=5 State=UP OverSubscribe=FORCE:4
"""


@dataclass
class Cluster:
    """A slurmctld and two slurmd, each of which has a host to itself: a network namespace with a
    name of its own. Which of them a command runs on, `on` says."""

    folder: Path
    namespaces: list[str]
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, node: int, *command: str) -> list[str]:
        hosts = self.folder / f"hosts-{NODES[node]}"
        name = ["unshare", "--uts", "sh", "-c", f'hostname {NODES[node]} && exec "$@"', "sh"]
        return inside(self.namespaces[node], hosts, *name, *command)

    @property
    def env(self) -> dict[str, str]:
        return clean_environment() | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self, node: int, *command: str) -> None:
        with open(self.folder / f"{command[0]}-{node}.out", "wb") as out:
            process = subprocess.Popen(
                self.command(node, *command), env=self.env, stdout=out, stderr=out
            )
        self.daemons.append(process)

    def on(
        self, node: int, *command: str, cwd: Path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(node, *command),
            cwd=cwd,
            env=self.env | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            timeout=50,
        )

    def batch(self, script: Path, **variables: str) -> list[str]:
        """Run a batch script to its end: the sorted lines that the job printed."""
        output = script.with_suffix(".out")
        told = self.on(0, "sbatch", "--parsable", f"--output={output}", script.name,
                       cwd=script.parent, **variables)  # fmt: skip
        assert told.returncode == 0, told.stderr
        job = told.stdout.strip()
        # A job that depends on it begins when it has ended; `sbatch --wait` looks each ten seconds.
        after = self.on(0, "srun", f"--dependency=afterany:{job}", "true", cwd=script.parent)
        shown = self.on(0, "scontrol", "--oneliner", "show", "job", job, cwd=script.parent).stdout
        said = output.read_text() if output.exists() else ""
        assert "JobState=COMPLETED" in shown, f"{shown}\n{said}\n{after.stderr}\n{self.logs()}"
        return sorted(said.splitlines())

    def logs(self) -> str:
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"{file.name}:\n{file.read_text()[-2000:]}" for file in files)

    def await_nodes(self) -> None:
        """Returns when both slurmd have reported to slurmctld: a job of both waits for that."""
        done = self.on(0, "srun", "--nodes=2", "true", cwd=self.folder)
        assert done.returncode == 0, f"{done.stderr}\n{self.logs()}"

    def stop(self) -> None:
        for process in self.daemons:
            process.terminate()
        for process in self.daemons:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def connect_hosts(names: list[str]) -> None:
    """A wire between two namespaces."""
    ends = [f"sl{os.getpid() % 100000}{side}" for side in "ab"]
    ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", ends[1],
       "netns", names[1])  # fmt: skip
    for number, (name, end) in enumerate(zip(names, ends, strict=True)):
        ip("-n", name, "addr", "add", f"10.231.8.{number + 1}/24", "dev", end)
        ip("-n", name, "link", "set", end, "up")


def start_daemons(cluster: Cluster) -> None:
    folder = cluster.folder
    folder.chmod(0o711)  # munged wants that others can reach its socket
    for number, name in enumerate(NODES):
        (folder / f"spool-{name}").mkdir()
        other = 1 - number
        # Each host takes its own name for 127.0.1.1, as on Debian.
        (folder / f"hosts-{name}").write_text(
            f"127.0.0.1 localhost\n127.0.1.1 {name}\n10.231.8.{other + 1} {NODES[other]}\n"
        )
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(SLURM_CONF.format(folder=folder))
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    cluster.start(
        0,
        "munged",
        "--foreground",
        "--force",
        f"--key-file={key}",
        f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log",
        f"--seed-file={folder}/munged.seed",
    )
    cluster.start(0, "slurmctld", "-D")
    for node, name in enumerate(NODES):
        cluster.start(node, "slurmd", "-D", "-N", name)
