"""deploy/: what Kubernetes and systemd say of it, and its programs, in processes for pods.

Each process has the environment, the command and the names of hosts that its pod would have. All of
them are in one network namespace, where these names are 127.0.0.1.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import ROOT, average, clean_environment, inside, namespace

yaml = pytest.importorskip("yaml")

pytestmark = pytest.mark.launchers

PAGE = "kubernetes.md"
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
VALIDATE = ROOT / ".venv" / "peers" / "kubernetes" / "bin" / "kubernetes-validate"
UNIT = DEPLOY / "systemd" / "aiodist-coordinator.service"

Document = dict[str, Any]

READ = {
    "JobSet": "from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import "
    "JobsetV1alpha2JobSet as JobSet; print(json.dumps(JobSet.from_dict(given).to_dict()))",
    "PodMonitor": "from cloudcoil.models.prometheus_operator.v1 import PodMonitor; "
    "print(PodMonitor.model_validate(given).model_dump_json(by_alias=True, exclude_unset=True))",
}
"""Of the kinds that Kubernetes does not have itself: programs that read a document as one of these,
and print what they have read. They raise for a value that does not fit, and pass over a name that
the kind does not have."""


def documents(path: Path) -> list[Document]:
    return list(yaml.safe_load_all(path.read_text()))


def document(kind: str, name: str) -> Document:
    (found,) = (
        one
        for path in MANIFESTS
        for one in documents(path)
        if (one["kind"], one["metadata"]["name"]) == (kind, name)
    )
    return found


def core(one: Document) -> list[Document]:
    """What of a document is of a kind that Kubernetes has itself."""
    if one["kind"] not in READ:
        return [one]
    jobs = one["spec"].get("replicatedJobs", [])
    about = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}}
    return [about | job["template"] for job in jobs]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, check=False, text=True, timeout=50
    )


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_fit_their_schemas(path: Path, tmp_path: Path) -> None:
    if not VALIDATE.exists():
        pytest.skip("kubernetes-validate is not installed: make launchers")
    found = documents(path)
    file = tmp_path / "core.yaml"
    file.write_text(yaml.safe_dump_all(part for one in found for part in core(one)))
    done = run(VALIDATE, "--strict", "--quiet", file)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    for one in found:
        if one["kind"] in READ:
            program = f"import json, sys; given = json.loads(sys.argv[1]); {READ[one['kind']]}"
            done = run(VALIDATE.with_name("python"), "-c", program, json.dumps(one))
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout) == one


class Pods:
    """Starts processes for pods, in a network namespace of their own."""

    def __init__(self, folder: Path, space: str) -> None:
        self.folder = folder
        self._space = space
        self._started: list[subprocess.Popen[str]] = []
        (folder / "hosts").write_text("127.0.0.1 localhost aiodist-coordinator\n")
        (folder / "aiodist-token").mkdir()
        (folder / "aiodist-token" / "token").write_text("secret\n")
        (folder / "state").mkdir()

    def command(self, *command: str) -> list[str]:
        return inside(self._space, self.folder / "hosts", *command)

    def start(self, pod: Document, **variables: str) -> subprocess.Popen[str]:
        """A process for the only container of a pod."""
        (container,) = pod["spec"]["containers"]
        secrets = {
            one["name"]: one["secret"]["secretName"]
            for one in pod["spec"].get("volumes", [])
            if "secret" in one
        }
        mounted = {
            one["mountPath"]: f"/{secrets[one['name']]}"
            for one in container.get("volumeMounts", [])
            if one["name"] in secrets
        }
        words = container.get("command", ["aiodist"]) + container.get("args", [])
        env = {one["name"]: self._value(one, mounted) for one in container.get("env", [])}
        process = subprocess.Popen(
            self.command(*[self._here(word, mounted) for word in words]),
            env=clean_environment() | env | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def _value(self, variable: Document, mounted: dict[str, str]) -> str:
        if "value" in variable:
            return self._here(variable["value"], mounted)
        source = variable["valueFrom"]
        if "secretKeyRef" in source:
            assert source["secretKeyRef"] in [
                {"name": name, "key": "token"} for name in ("aiodist-token", "average-token")
            ]
            return "secret"
        label = "metadata.labels['batch.kubernetes.io/controller-uid']"
        assert source == {"fieldRef": {"fieldPath": label}}
        return "uid-of-the-job"

    def _here(self, text: str, mounted: dict[str, str]) -> str:
        for path, here in {**mounted, "/program": "", "/state": "/state"}.items():
            text = text.replace(f"{path}/", f"{self.folder}{here}/")
        return text

    def get(self, path: str) -> str:
        url = f"http://127.0.0.1:8080{path}"
        program = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())"
        return run(*self.command(sys.executable, "-c", program, url)).stdout.rstrip()

    def stop(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def pods(folder: Path) -> Iterator[Pods]:
    """Skips where network namespaces cannot be made."""
    with namespace("pods") as space:
        pods = Pods(folder, space)
        try:
            yield pods
        finally:
            pods.stop()


@pytest.mark.parametrize(("kind", "names"), [("Job", "average"), ("JobSet", "average-ranks-0")])
def test_ranks_meet_at_the_pod_of_index_0(pods: Pods, kind: str, names: str) -> None:
    (job,) = core(document(kind, "average"))
    service = document("Service", "average")["metadata"]["name"]
    hosts = pods.folder / "hosts"
    hosts.write_text(f"{hosts.read_text()}127.0.0.1 {names}-0.{service}\n")
    indices = range(job["spec"]["completions"])
    started = [
        pods.start(
            job["spec"]["template"], JOB_COMPLETION_INDEX=str(index), HOSTNAME=f"{names}-{index}"
        )
        for index in reversed(indices)
    ]
    printed = []
    for process in started:
        out, err = process.communicate(timeout=50)
        assert process.returncode == 0, err
        printed += out.splitlines()
    assert sorted(printed) == average()


def make_certificates(folder: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl command to make certificates with")
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    commands = [f"req -x509 {key} -days 2 -subj /CN=ca -keyout ca.key -out aiodist-rank-tls/ca.crt"]
    for part, name in (("coordinator", "aiodist-coordinator"), ("rank", "rank")):
        at = f"aiodist-{part}-tls"
        (folder / at).mkdir()
        (folder / at / "names").write_text(f"subjectAltName=DNS:{name}")
        commands += [
            f"req -new {key} -subj /CN={name} -keyout {at}/tls.key -out {at}/tls.csr",
            f"x509 -req -in {at}/tls.csr -CA aiodist-rank-tls/ca.crt -CAkey ca.key -days 2 "
            f"-extfile {at}/names -out {at}/tls.crt",
        ]
    for command in commands:
        words = [openssl, *command.split()]
        subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=30)


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    assert process.stderr is not None
    raise AssertionError(f"it ended without {text!r}: {process.stderr.read()}")


def test_a_pod_dies_and_is_made_again(pods: Pods) -> None:
    make_certificates(pods.folder)
    coordinator = pods.start(document("StatefulSet", "aiodist-coordinator")["spec"]["template"])
    read_until(coordinator, "http on")
    assert (pods.get("/livez"), pods.get("/readyz")) == ("ok", "ok")
    template = document("Job", "elastic")["spec"]["template"]

    def start(index: int) -> subprocess.Popen[str]:
        return pods.start(template, JOB_COMPLETION_INDEX=str(index), STEPS="300")

    ranks = [start(index) for index in range(4)]
    read_until(ranks[2], "step 5: 4 ranks")
    ranks[2].kill()
    ranks[2].communicate()
    ranks[2] = start(2)
    first = read_until(ranks[2], ": 4 ranks")
    assert first != "step 1: 4 ranks\n"  # it goes on where the others were
    assert "aiodist_group_epoch" in pods.get("/metrics")
    for process in ranks:
        out, err = process.communicate(timeout=50)
        assert process.returncode == 0, err
        assert out.splitlines()[-1] == "step 300: 4 ranks"
    coordinator.send_signal(signal.SIGTERM)
    _, log = coordinator.communicate(timeout=30)
    assert (coordinator.returncode, "Traceback" in log) == (0, False)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_containers_have_a_version_a_limit_and_keys_of_their_own(path: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for one in documents(path):
        for part in core(one) if one["kind"] in ("Job", "JobSet", "StatefulSet") else []:
            pod = part["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            assert container["image"] == f"aiodist:{version}"
            assert container["resources"]["limits"]["memory"]
            secrets = [
                volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume
            ]
            of_ranks = "coordinator" not in path.stem
            assert all("coordinator" not in name for name in secrets) or not of_ranks
            assert all("rank" not in name for name in secrets) or of_ranks
    assert f"podman build -t aiodist:{version} " in (DEPLOY / "Containerfile").read_text()


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    # It looks for the command.
    aiodist = str(Path(sys.executable).with_name("aiodist"))
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/aiodist/bin/aiodist", aiodist))
    done = run("systemd-analyze", "verify", "--man=no", unit)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_command_of_the_unit_runs(pods: Pods) -> None:
    (found,) = re.findall(r"^ExecStart=/opt/aiodist/bin/(.*)$", UNIT.read_text(), re.MULTILINE)
    (pods.folder / "aiodist").mkdir()
    words = (
        found.replace("%d", f"{pods.folder}/aiodist-token").replace("%S", str(pods.folder)).split()
    )
    daemon = pods.start({"spec": {"containers": [{"command": words}]}})
    read_until(daemon, "http on")
    assert pods.get("/readyz") == "ok"
    daemon.send_signal(signal.SIGTERM)
    _, log = daemon.communicate(timeout=30)
    assert (daemon.returncode, "Traceback" in log) == (0, False)


def test_the_image_has_what_is_installed_in_it(tmp_path: Path) -> None:
    """Nothing builds the image here: what it copies is enough to build the package."""
    text = (DEPLOY / "Containerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(.*) (\S+)$", text, re.MULTILINE)
    assert copied
    for sources, target in copied:
        for source in sources.split():
            if (ROOT / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, tmp_path / target, ignore=ignored)
            else:
                shutil.copy(ROOT / source, tmp_path / target)
    build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist")]
    done = run(sys.executable, *build, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    built = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {"aiodist", "aiodist_server", "aiodist_cli"} <= built
