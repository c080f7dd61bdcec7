"""What launchers say through environment variables."""

from __future__ import annotations

import inspect
import math
import re

import pytest

from aiodist import environment
from aiodist.environment import Settings, settings_from, timeout_in, token_in, transports_in

ADDRESS = {"AIODIST_ADDRESS": "tcp://10.0.0.1:1"}
MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NNODES": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
NODES = {**SLURM, "SLURM_NNODES": "2", "SLURM_STEP_NODELIST": "gpu[07,9],login"}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node-42@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}


def test_all_names_are_listed() -> None:
    """For `aiodist doctor`, which shows those that are set."""
    read = {*re.findall(r'"([A-Z][A-Z_]*_[A-Z_]+|RANK)"', inspect.getsource(environment))}
    assert read - {"HOSTNAME"} == {*environment.NAMES, *environment.ALWAYS}


def test_our_own_variables_give_everything() -> None:
    settings = settings_from(
        {
            "AIODIST_ADDRESS": "unix:///run/a.sock",
            "AIODIST_RANK": "2",
            "AIODIST_SIZE": "4",
            "AIODIST_GROUP": "train",
            "AIODIST_RUN_ID": "run",
        }
    )
    assert settings == Settings(
        address="unix:///run/a.sock",
        rank=2,
        size=4,
        group="train",
        run_id="run",
        listen="unix:///run/a.sock",
        listen_guarded="unix:///run/a.sock",
    )


def test_the_variables_of_torchrun() -> None:
    torchrun = {
        **MASTER,
        "RANK": "0",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    assert settings_from(torchrun) == Settings(
        address="tcp://node0:29500",
        rank=0,
        size=2,
        run_id="job#3",
        listen="tcp://node0:29500",
        listen_guarded="tcp://0.0.0.0:29500",
        rank_by="RANK",
        size_by="WORLD_SIZE",
        agent_store=True,
    )
    torchrun["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    assert settings_from(torchrun) == Settings(
        address="tcp://node0:29500",
        rank=0,
        size=2,
        run_id="job#3",
        listen="tcp://node0:29500",
        listen_guarded="tcp://0.0.0.0:29500",
        rank_by="RANK",
        size_by="WORLD_SIZE",
    )
    # Each of several agents counts its own restarts, so ranks would differ.
    assert settings_from({**torchrun, "GROUP_WORLD_SIZE": "1"}).run_id == "job#3"
    assert settings_from({**torchrun, "GROUP_WORLD_SIZE": "2"}).run_id == "job"


def test_each_setting_is_taken_from_the_first_that_has_it() -> None:
    settings = settings_from(
        {**SLURM, **MASTER, **ADDRESS, "AIODIST_RUN_ID": "mine", "TORCHELASTIC_RUN_ID": "torch"}
    )
    at = "tcp://10.0.0.1:1"
    assert (settings.address, settings.rank, settings.size) == (at, 1, 2)
    assert (settings.run_id, settings.listen, settings.listen_guarded) == ("mine", at, at)
    settings = settings_from({**SLURM, **MASTER, "RANK": "0", "WORLD_SIZE": "9"})
    assert (settings.rank, settings.size, settings.address) == (0, 9, "tcp://node0:29500")


def test_rank_and_size_come_from_one_source() -> None:
    settings = settings_from({**ADDRESS, **SLURM, "AIODIST_SIZE": "8"})
    assert (settings.rank, settings.size) == (None, 8)
    settings = settings_from({**ADDRESS, **SLURM, "RANK": "5"})
    assert (settings.rank, settings.size) == (5, None)


def test_an_address_alone_will_do() -> None:
    at = "tcp://10.0.0.1:1"
    assert settings_from(ADDRESS) == Settings(at, listen=at, listen_guarded=at)
    assert settings_from({"AIODIST_ADDRESS": "tls://h:1"}) == Settings("tls://h:1", listen="")


def test_empty_variables_count_as_not_set() -> None:
    settings = settings_from({**ADDRESS, "AIODIST_GROUP": "", "RANK": " ", "MASTER_ADDR": ""})
    assert settings == settings_from(ADDRESS)


@pytest.mark.parametrize("empty", ["", " ", "\n"])
def test_an_empty_token_is_refused(empty: str) -> None:
    with pytest.raises(ValueError, match="AIODIST_TOKEN is set, but empty"):
        token_in({"AIODIST_TOKEN": empty})


def test_the_token_is_what_stands_in_its_file() -> None:
    assert token_in({"AIODIST_TOKEN": "secret\n"}) == "secret"
    assert token_in({}) is None


def test_an_ipv6_master() -> None:
    assert settings_from({**MASTER, "MASTER_ADDR": "::1"}).address == "tcp://[::1]:29500"
    assert settings_from({**MASTER, "MASTER_ADDR": "::1"}).listen == "tcp://[::1]:29500"
    assert settings_from({**MASTER, "MASTER_ADDR": "fd00::1"}).listen == "tcp://[fd00::1]:29500"
    assert settings_from({**MASTER, "MASTER_ADDR": "fd00::1"}).listen_guarded == "tcp://[::]:29500"
    assert settings_from({**MASTER, "MASTER_ADDR": "[::1]"}).address == "tcp://[::1]:29500"


@pytest.mark.parametrize("job", [SLURM, OMPI, MPICH], ids=["slurm", "openmpi", "mpich"])
def test_a_job_on_one_host_needs_no_address(job: dict[str, str]) -> None:
    settings = settings_from(job)
    assert (settings.rank, settings.size) == (1, 2)
    assert settings.listen == settings.listen_guarded == settings.address
    assert settings.address.startswith("tcp://127.0.0.1:2")
    assert settings == settings_from(dict(job))


def test_jobs_on_one_host_are_apart() -> None:
    one, other = settings_from(SLURM), settings_from({**SLURM, "SLURM_STEP_ID": "1"})
    assert (one.run_id, other.run_id) == ("77.0", "77.1")
    assert one.address != other.address
    assert settings_from(OMPI).run_id == "prterun-node-42@1"
    at = "tcp://127.0.0.1:29500"
    found = settings_from(MPICH)
    assert (found.address, found.run_id, found.listen, found.listen_guarded) == (at, "", at, at)
    assert settings_from({**SLURM, "AIODIST_RUN_ID": "mine"}).run_id == "mine"
    own = settings_from({**MPICH, "AIODIST_RUN_ID": "mine"})
    assert (own.run_id, own.address == at) == ("mine", False)


def test_a_job_of_slurm_meets_on_its_first_host() -> None:
    settings = settings_from(NODES)
    port = settings.address.removeprefix("tcp://gpu07:")
    assert 20000 <= int(port) < 30000
    assert settings.listen == settings.address
    assert settings.listen_guarded == f"tcp://0.0.0.0:{port}"
    assert (settings.rank, settings.size, settings.run_id) == (1, 2, "77.0")
    again = settings_from({**NODES, "SLURM_RESTART_COUNT": "1"})
    assert (again.run_id, again.address == settings.address) == ("77.0.1", False)


def test_mpirun_in_a_job_of_slurm_says_who_is_who() -> None:
    """Its ranks have the variables of the batch script, or of the task that started them."""
    script = {**NODES, "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "node[1-2]"}
    del script["SLURM_STEP_ID"], script["SLURM_STEP_NODELIST"]
    task = {**script, "SLURM_STEP_ID": "4", "SLURM_STEP_NODELIST": "node2"}
    for mpi in (OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, MPICH | {"MPI_LOCALNRANKS": "1"}):
        one, other = settings_from({**script, **mpi}), settings_from({**task, **mpi})
        assert one == other
        assert (one.rank, one.size) == (1, 2)
        assert one.address.startswith("tcp://node1:")
    # srun --mpi=pmi2 is no mpirun.
    assert settings_from({**NODES, "PMI_RANK": "1", "PMI_SIZE": "2"}) == settings_from(NODES)


POD = {"JOB_COMPLETION_INDEX": "3", "AIODIST_SIZE": "4", "HOSTNAME": "train-a-3"}


def test_the_pods_of_an_indexed_job() -> None:
    settings = settings_from({**POD, "AIODIST_SERVICE": "ranks", "AIODIST_RUN_ID": "uid"})
    assert settings == Settings(
        address="tcp://train-a-0.ranks:29500",
        rank=3,
        size=4,
        run_id="uid",
        listen="tcp://train-a-0.ranks:29500",
        listen_guarded="tcp://0.0.0.0:29500",
        rank_by="JOB_COMPLETION_INDEX",
    )
    settings = settings_from({**POD, **ADDRESS})
    assert (settings.address, settings.rank, settings.size) == ("tcp://10.0.0.1:1", 3, 4)


def test_what_a_launcher_in_a_pod_says_counts() -> None:
    inner = settings_from({**POD, **ADDRESS, "AIODIST_RANK": "1"})
    assert (inner.rank, inner.size) == (1, 4)
    pod = {name: value for name, value in POD.items() if name != "AIODIST_SIZE"}
    inner = settings_from({**pod, **ADDRESS, "RANK": "0", "WORLD_SIZE": "2"})
    assert (inner.rank, inner.size) == (0, 2)
    assert settings_from({**pod, **ADDRESS}).rank is None
    # The size of the manifest is that of the pods, also if torchrun or mpirun starts ranks in them.
    inner = settings_from({**POD, **ADDRESS, "RANK": "6", "WORLD_SIZE": "8"})
    assert (inner.rank, inner.size) == (6, 8)
    inner = settings_from({**POD, **ADDRESS, **OMPI})
    assert (inner.rank, inner.size) == (1, 2)


def test_a_size_that_is_left_over_hides_no_launcher() -> None:
    settings = settings_from({**OMPI, "WORLD_SIZE": "9"})
    assert (settings.rank, settings.size) == (1, 2)
    assert settings_from({**ADDRESS, "WORLD_SIZE": "9"}).size == 9


def test_job_ids_matter_only_without_an_address() -> None:
    assert settings_from({**SLURM, **ADDRESS}).run_id == ""


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({}, "names no coordinator: .*`aiodist run -n 4 .*AIODIST_ADDRESS .*, or MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "has RANK=0 and WORLD_SIZE=1, but names no coordinator"),
        ({**SLURM, "SLURM_NNODES": "2"}, "Slurm gives .* on one host .SLURM_NNODES=2.: set"),
        (
            {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            "Open MPI gives .*OMPI_COMM_WORLD_LOCAL_SIZE=1",
        ),
        (
            {**NODES, "SLURM_DISTRIBUTION": "arbitrary,Pack"},
            "SLURM_DISTRIBUTION=arbitrary,Pack: rank 0 .*gpu.07,9.,login. Set MASTER_ADDR to",
        ),
        (
            {**NODES, "SLURM_STEP_NODELIST": "gpu[07"},
            "SLURM_STEP_NODELIST: 'gpu.07' is no list of hosts",
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "1"},
            "names no coordinator: .*`srun python PROGRAM.py`",
        ),
        (
            {**POD, "AIODIST_SERVICE": "ranks", "HOSTNAME": "host"},
            "AIODIST_SERVICE=ranks .*HOSTNAME=host with JOB_COMPLETION_INDEX=3",
        ),
        ({"AIODIST_SERVICE": "ranks", "HOSTNAME": "a-"}, "JOB_COMPLETION_INDEX=not set"),
        ({**POD, **ADDRESS, "AIODIST_SIZE": "3"}, "JOB_COMPLETION_INDEX=3 with AIODIST_SIZE=3"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPICH gives .*MPI_LOCALNRANKS=not set"),
        (
            {**POD, "AIODIST_SERVICE": "ranks:29"},
            "AIODIST_SERVICE='ranks:29': expected a service's name alone; its port is always 29500",
        ),
        (
            {**MASTER, "MASTER_ADDR": "node0:29500"},
            "MASTER_ADDR='node0:29500': expected a host alone; the port goes to MASTER_PORT",
        ),
        ({**MASTER, "MASTER_ADDR": "tcp://node0"}, "MASTER_ADDR='tcp://node0': expected a host"),
        ({"AIODIST_ADDRESS": "tcp://h:0"}, "AIODIST_ADDRESS: the address 'tcp://h:0' has port 0"),
        (
            {**ADDRESS, "AIODIST_MIN_SIZE": "3", "AIODIST_MAX_SIZE": "2"},
            "AIODIST_MIN_SIZE=3 with AIODIST_MAX_SIZE=2: expected at most 2",
        ),
        ({**ADDRESS, "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE='9{49}: expected an integer from 1"),
        ({"MASTER_ADDR": "h"}, "MASTER_ADDR='h' is set but MASTER_PORT is not"),
        ({"MASTER_PORT": "1"}, "MASTER_PORT='1' is set but MASTER_ADDR is not"),
        ({**MASTER, "MASTER_PORT": "http"}, "MASTER_PORT='http': expected an integer"),
        ({**MASTER, "MASTER_PORT": "0"}, "MASTER_PORT='0': expected an integer from 1 to"),
        (
            {**MASTER, "MASTER_PORT": "70000"},
            "MASTER_PORT=.70000.: expected an integer from 1 to 65535",
        ),
        ({"AIODIST_ADDRESS": "nonsense"}, "AIODIST_ADDRESS: the address 'nonsense' has no scheme"),
        ({**ADDRESS, "AIODIST_RANK": "-1"}, "AIODIST_RANK='-1': expected an integer from 0 to"),
        ({**ADDRESS, "AIODIST_SIZE": "0"}, "AIODIST_SIZE='0': expected an integer from 1 to"),
        ({**ADDRESS, "RANK": "²"}, "RANK='²': expected an integer"),
        ({**ADDRESS, "RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2: expected a rank"),
    ],
)
def test_what_is_wrong_names_variable_value_and_what_was_expected(
    environ: dict[str, str], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        settings_from(environ)


def test_the_sizes_of_an_elastic_group() -> None:
    found = settings_from({**ADDRESS, "AIODIST_MIN_SIZE": "2", "AIODIST_MAX_SIZE": "8"})
    assert (found.size, found.rank, found.min_size, found.max_size) == (None, None, 2, 8)
    with pytest.raises(ValueError, match="AIODIST_MIN_SIZE='0'"):
        settings_from({**ADDRESS, "AIODIST_MIN_SIZE": "0"})


@pytest.mark.parametrize(
    ("value", "seconds"), [(None, None), (" ", None), ("90", 90.0), ("0.5", 0.5), ("inf", math.inf)]
)
def test_the_deadline_of_joining(value: str | None, seconds: float | None) -> None:
    assert timeout_in({} if value is None else {"AIODIST_TIMEOUT": value}) == seconds


def test_the_names_of_transports() -> None:
    assert transports_in({"AIODIST_TRANSPORTS": "tcp, unix,"}) == ("tcp", "unix")
    assert transports_in({"AIODIST_TRANSPORTS": " "}) is None
    with pytest.raises(ValueError, match=r"AIODIST_TRANSPORTS=',': expected names, as shm,tcp"):
        transports_in({"AIODIST_TRANSPORTS": ","})


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon"])
def test_a_deadline_that_is_none(value: str) -> None:
    with pytest.raises(ValueError, match=f"AIODIST_TIMEOUT='{value}'"):
        timeout_in({"AIODIST_TIMEOUT": value})


@pytest.mark.parametrize(("local", "one_host"), [("4", True), ("2", False), ("", False)])
def test_whether_all_ranks_are_on_one_host(local: str, one_host: bool) -> None:
    environ = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "4"}
    assert settings_from({**environ, "LOCAL_WORLD_SIZE": local}).one_host is one_host
