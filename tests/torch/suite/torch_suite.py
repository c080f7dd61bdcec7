#!/usr/bin/env python3
"""Run the collective test-suite that ships inside the torch wheel
(torch.testing._internal.distributed.distributed_test) against any c10d
backend, including a third-party one registered from Python.

    python torch_suite.py --backend gloo  --world 3
    python torch_suite.py --backend X --import Y --only 'all_reduce|barrier' -v

How it works
  * one "zygote" process imports torch + the suite + the --import modules once;
    every test then runs in a fork of it (own session, own log file, hard
    timeout, killed as a group), and that fork starts WORLD rank processes:
    --start spawn (default; what pytorch's test_distributed_spawn.py does, each
    rank re-imports everything) or --start fork (about 5x faster; only for
    backends which start no thread at import).
  * the suite decides most skips at import by comparing the module global
    BACKEND with "gloo"/"mpi"/..., so it is imported with BACKEND=<--gate>
    (default gloo) and the real name is put in afterwards.  See install().
Exit status 0 when nothing failed.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

CFG_ENV = "TORCH_SUITE_CFG"
HERE = os.path.dirname(os.path.abspath(__file__))

# skip reasons which --unlock drops (they are about other backends, or about
# pytorch's own CI), keyed by the --unlock word.
UNLOCK = {
    # CPU all_to_all / all_to_all_single tests, gated to MPI only
    "alltoall": r"^Only MPI supports (CPU )?all_to_all",
    # collectives tested with NCCL only; with cpu-as-cuda they run on CPU tensors
    "nccl": r"^(Only N(ccl|CCL) supports|NCCL (Batch )?Send Recv Only"
    r"|Coalescing manager currently tests with NCCL)",
}


# --------------------------------------------------------------------------
# in the zygote, the per-test process, and (spawn) every rank
# --------------------------------------------------------------------------
class AliasBackend(str):
    """The real backend name, which also compares equal to the gate name, so
    that run-time checks such as `BACKEND == "gloo"` in test bodies hold.
    .lower()/.upper() give plain strings of the real name."""

    gate = "gloo"

    def __eq__(self, other):
        return str.__eq__(self, other) or other == self.gate

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


def install(cfg):
    """Import the suite gated as cfg['gate'] and return the TestCase class."""
    real, gate = cfg["backend"], cfg["gate"]
    os.environ["WORLD_SIZE"] = str(cfg["world"])
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(cfg["timeout"])
    if cfg["init"] == "env":
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    # the module reads INIT_METHOD at import; anything that starts with file://
    # enables test_barrier_timeout_global.  The base class's setUp() puts a fresh
    # one in the environment (spawned ranks read it there; see setUp below).
    os.environ.setdefault("INIT_METHOD", "file://" + os.path.join(tempfile.gettempdir(), "unused"))
    os.environ["BACKEND"] = gate

    import unittest

    import torch
    import torch.testing._internal.common_distributed as cd
    import torch.testing._internal.common_utils as cu

    # 1. capability tables (before the suite's class body is evaluated)
    feats, skips = cd.DistTestCases.backend_feature, cd.DistTestCases.skip_collective
    for table in (feats, skips):
        for names in table.values():
            if gate in names:
                names.add(real)
    if real != "gloo":
        feats["plugin"].add(real)

    # 2. reasons to drop
    drop = [re.compile(UNLOCK[u]) for u in cfg["unlock"] if u in UNLOCK]
    if drop:
        orig = cu.skip_but_pass_in_sandcastle_if

        def skip_if(condition, reason):
            if any(r.search(reason) for r in drop):
                condition = False
            return orig(condition, reason)

        cu.skip_but_pass_in_sandcastle_if = skip_if
    # 3. "group" tests want world >= 8 unless BACKEND is mpi; they in fact need 3
    if "small-world" in cfg["unlock"]:

        def small(func):
            return func

        cd.skip_if_small_worldsize = small
    # 4. tests switched off on linux because flaky/slow in pytorch's CI
    if "linux" in cfg["unlock"]:
        cu.IS_LINUX = False

    # 5. tests written for one GPU per rank: run on CPU tensors instead, or (the
    # ranks would start only to exit with a skip status) skip without starting them
    if "cpu-as-cuda" in cfg["unlock"]:
        import cpu_as_cuda

        cpu_as_cuda.early()
    elif not torch.cuda.is_available():
        import functools

        def no_gpu(func, why="CUDA is not available."):
            @functools.wraps(func)  # setUp() looks at __wrapped__
            def wrapper(*a, **k):
                raise unittest.SkipTest(why)

            return unittest.skip(why)(wrapper)

        def no_gpus(x, allow_cpu=False):
            return (
                (lambda f: f)
                if allow_cpu
                else lambda f: no_gpu(f, f"Need at least {x} CUDA devices")
            )

        cd.skip_if_no_gpu, cd.skip_if_lt_x_gpu = no_gpu, no_gpus

    import torch.testing._internal.distributed.distributed_test as dt

    if "cpu-as-cuda" in cfg["unlock"]:
        cpu_as_cuda.late()

    # 6. now the real name
    for mod in cfg["imports"]:
        __import__(mod)
    if real != gate:
        AliasBackend.gate = gate
        dt.BACKEND = AliasBackend(real)
    os.environ["BACKEND"] = real

    if cfg["profiling"]:
        for lst in (dt.PROFILING_SUPPORTED_BACKENDS, dt.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
            if gate in lst and real not in lst:
                lst.append(real)

    class TorchDistSuite(dt.TestDistBackend, dt.DistributedTest._DistTestBase):
        start_method = cfg["start"]

        def setUp(self):
            super().setUp()
            dt.INIT_METHOD = os.environ["INIT_METHOD"]  # for forked ranks
            if self.start_method == "spawn":
                self._spawn_processes()
            else:
                import torch.multiprocessing as mp

                self._start_processes(mp.get_context("fork").Process)

        if cfg["init"] == "env":

            @property
            def init_method(self):
                return "env://"

        def _check_return_codes(self, fn, elapsed_time):
            super()._check_return_codes(fn, elapsed_time)
            # the base class looks at rank 0's exit status only
            if cfg["strict"] and fn not in self.skip_return_code_checks:
                codes = [p.exitcode for p in self.processes]
                if any(c != codes[0] for c in codes):
                    raise AssertionError(f"rank exit codes differ: {codes}")

    TorchDistSuite.__module__ = "__main__"
    TorchDistSuite.__qualname__ = "TorchDistSuite"
    return TorchDistSuite


if os.environ.get(CFG_ENV):
    TorchDistSuite = install(json.loads(os.environ[CFG_ENV]))


def static_tests():
    """[(name, static skip reason or None)] in definition order."""
    import inspect

    out = []
    for name in dir(TorchDistSuite):
        if not name.startswith("test_"):
            continue
        fn = getattr(TorchDistSuite, name)
        if not callable(fn):
            continue
        try:
            line = inspect.unwrap(fn).__code__.co_firstlineno
        except AttributeError:
            line = 0
        why = (
            getattr(fn, "__unittest_skip_why__", "")
            if getattr(fn, "__unittest_skip__", False)
            else None
        )
        out.append((line, name, why))
    out.sort()
    return [(n, w) for _, n, w in out]


def run_one(name, result_path):
    """In the per-test process: run one test, write the outcome as json."""
    import unittest

    if os.environ.get("MASTER_PORT") is None and cfg_is_env():
        import socket

        s = socket.socket()
        s.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(s.getsockname()[1])
        s.close()
    res = unittest.TestResult()
    t0 = time.time()
    TorchDistSuite(name).run(res)
    if res.errors or res.failures:
        status, why = "fail", (res.errors + res.failures)[-1][1]
    elif res.unexpectedSuccesses:
        status, why = "fail", "unexpected success"
    elif res.skipped:
        status, why = "skip", res.skipped[0][1]
    else:
        status, why = "pass", ""
    with open(result_path + ".tmp", "w") as f:
        json.dump({"status": status, "why": why, "sec": time.time() - t0}, f)
    os.rename(result_path + ".tmp", result_path)


def cfg_is_env():
    return json.loads(os.environ[CFG_ENV])["init"] == "env"


def zygote(logdir, jobs):
    """Read test names on stdin (one per line), fork a process for each, print
    one json line per finished test on the saved stdout."""
    cfg = json.loads(os.environ[CFG_ENV])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"tests": static_tests()}), file=out)
    names = [line.strip() for line in sys.stdin if line.strip()]
    hard = cfg["timeout"] + 20
    running = {}

    def reap(block):
        while True:
            for pid in list(running):
                name, t0, rp = running[pid]
                done, st = os.waitpid(pid, os.WNOHANG)
                timed = not done and time.time() - t0 > hard
                if timed:
                    os.killpg(pid, signal.SIGKILL)
                    done, st = os.waitpid(pid, 0)
                if done:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)  # left-over ranks
                    del running[pid]
                    try:
                        r = json.loads(Path(rp).read_text())
                    except Exception:
                        r = {
                            "status": "fail",
                            "why": "hard timeout" if timed else f"test process died: {st}",
                            "sec": time.time() - t0,
                        }
                    r["name"] = name
                    print(json.dumps(r), file=out)
                    return
            if not block:
                return
            time.sleep(0.02)

    for name in names:
        while len(running) >= jobs:
            reap(True)
        rp = os.path.join(logdir, name + ".json")
        if os.path.exists(rp):
            os.unlink(rp)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setsid()
                fd = os.open(
                    os.path.join(logdir, name + ".log"),
                    os.O_CREAT | os.O_TRUNC | os.O_WRONLY,
                    0o644,
                )
                os.dup2(fd, 1)
                os.dup2(fd, 2)
                null = os.open(os.devnull, os.O_RDONLY)
                os.dup2(null, 0)
                run_one(name, rp)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        running[pid] = (name, time.time(), rp)
    while running:
        reap(True)


# --------------------------------------------------------------------------
# command line
# --------------------------------------------------------------------------
def main():
    import subprocess

    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--backend", required=True)
    ap.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE")
    ap.add_argument(
        "--gate", default="gloo", help="treat the backend as this one when the suite decides skips"
    )
    ap.add_argument(
        "--unlock",
        default="alltoall,small-world",
        help="comma list of alltoall, small-world, linux, cpu-as-cuda, nccl; or none, or all",
    )
    ap.add_argument("--only", metavar="REGEX")
    ap.add_argument("--skip", metavar="REGEX")
    ap.add_argument("--names", metavar="FILE", help="run only the tests named in FILE (# comments)")
    ap.add_argument("--world", type=int, default=3)
    ap.add_argument("--timeout", type=int, default=120, metavar="S", help="per test")
    ap.add_argument("--start", choices=("spawn", "fork"), default="spawn")
    ap.add_argument("--init", choices=("file", "env"), default="file")
    ap.add_argument("--jobs", type=int, default=1)
    ap.add_argument(
        "--profiling", action="store_true", help="also expect profiler events named BACKEND:op"
    )
    ap.add_argument(
        "--lenient-exit",
        dest="strict",
        action="store_false",
        help="look at rank 0's exit status only, as torch does",
    )
    ap.add_argument("--path", action="append", default=[], help="put in PYTHONPATH")
    ap.add_argument("--logdir")
    ap.add_argument("--json", metavar="FILE")
    ap.add_argument("--pass-list", metavar="FILE")
    ap.add_argument("--list", action="store_true")
    ap.add_argument(
        "-v", "--verbose", action="store_true", help="print the reason of every failure"
    )
    a = ap.parse_args()

    unlock = [] if a.unlock in ("", "none") else a.unlock.split(",")
    if a.unlock == "all":
        unlock = ["alltoall", "small-world", "linux", "cpu-as-cuda", "nccl"]
    cfg = {
        "backend": a.backend,
        "gate": a.gate,
        "imports": a.imports,
        "world": a.world,
        "timeout": a.timeout,
        "start": a.start,
        "init": a.init,
        "unlock": unlock,
        "profiling": a.profiling,
        "strict": a.strict,
    }
    env = dict(os.environ)
    env[CFG_ENV] = json.dumps(cfg)
    for k in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        env.setdefault(k, "1")
    env["PYTHONPATH"] = os.pathsep.join(
        a.path + [HERE, os.getcwd()] + ([env["PYTHONPATH"]] if env.get("PYTHONPATH") else [])
    )
    env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "")
    logdir = a.logdir or tempfile.mkdtemp(prefix="torch_suite_")
    os.makedirs(logdir, exist_ok=True)
    tmp = os.path.join(logdir, "tmp")
    os.makedirs(tmp, exist_ok=True)
    env["TMPDIR"] = tmp

    t_all = time.time()
    errors = os.open(os.path.join(logdir, "zygote.err"), os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    z = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "--zygote", logdir, str(a.jobs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        stderr=errors,
    )
    line = z.stdout.readline()
    if not line:
        sys.exit(
            "the suite could not be imported; see "
            + os.path.join(logdir, "zygote.err")
            + "\n"
            + Path(logdir, "zygote.err").read_text()[-2000:]
        )
    tests = json.loads(line)["tests"]
    if a.names:
        want = {line.split("#")[0].strip() for line in Path(a.names).read_text().splitlines()}
        want.discard("")
        unknown = want - {n for n, _ in tests}
        if unknown:
            sys.exit(f"unknown tests: {sorted(unknown)}")
        tests = [t for t in tests if t[0] in want]
    if a.only:
        tests = [t for t in tests if re.search(a.only, t[0])]
    if a.skip:
        tests = [t for t in tests if not re.search(a.skip, t[0])]
    results = {}
    for n, why in tests:
        if why is not None:
            results[n] = {"name": n, "status": "skip", "why": why, "sec": 0.0, "static": True}
    todo = [n for n, why in tests if why is None]
    if a.list:
        for n, why in tests:
            print(n, "" if why is None else f"# skip: {why}")
        z.stdin.close()
        z.wait()
        return 0
    for n, r in results.items():
        print(f"skip {n}  [{r['why']}]", flush=True)
    z.stdin.write("\n".join(todo) + "\n")
    z.stdin.close()
    for line in z.stdout:
        r = json.loads(line)
        results[r["name"]] = r
        tail = r["why"].strip().splitlines()[-1] if r["why"].strip() else ""
        if r["status"] == "fail":
            # the interesting line is usually the last "XxxError: ..." one
            err = [x for x in r["why"].splitlines() if re.match(r"^[\w.]*(Error|Exception)\b", x)]
            tail = (err[-1] if err else tail)[:300]
        print(
            f"{r['status']} {r['name']}  {r['sec']:.1f}s" + (f"  [{tail}]" if tail else ""),
            flush=True,
        )
        if a.verbose and r["status"] == "fail":
            print(r["why"])
    z.wait()
    for n in todo:
        results.setdefault(
            n, {"name": n, "status": "fail", "why": "not run: zygote died", "sec": 0.0}
        )
    count = {s: sum(r["status"] == s for r in results.values()) for s in ("pass", "fail", "skip")}
    if a.json:
        found = {"cfg": cfg, "results": [results[n] for n, _ in tests]}
        Path(a.json).write_text(json.dumps(found | {"wall": time.time() - t_all}, indent=1))
    if a.pass_list:
        with open(a.pass_list, "w") as f:
            f.writelines(n + "\n" for n, _ in tests if results[n]["status"] == "pass")
    shutil.rmtree(tmp, ignore_errors=True)
    print(f"logs: {logdir}   wall: {time.time() - t_all:.0f}s   world {a.world}, start {a.start}")
    print(f"{count['pass']} passed, {count['fail']} failed, {count['skip']} skipped")
    return 1 if count["fail"] else 0


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--zygote":
        zygote(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main())
