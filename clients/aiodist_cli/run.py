"""`aiodist run`: a script as N ranks on this host, or on each of several.

The coordinator runs on the event loop of the command, unless one is given. A thread writes the
output of the ranks, so that a pager that stops reading does not stop the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from aiodist.environment import FLIGHT_RECORDER, TRACE
from aiodist.errors import AiodistError
from aiodist.launching import spawn
from aiodist.wire.address import Address, parse_address
from aiodist.wire.limits import MAX_MEMBERS
from aiodist_cli import tls
from aiodist_cli.errors import CommandError, unwritable, usable_address, usage_error
from aiodist_cli.trace import joined

EPILOG = """Run a script as four ranks on this host; arguments after the script belong to it:

    aiodist run -n 4 train.py --epochs 3

Run on two hosts, with a coordinator that both reach (on the second host: --node-rank 1):

    aiodist run -n 8 --nnodes 2 --node-rank 0 --coordinator tcp://10.0.0.1:29500 train.py

Debug rank 2 here, with `await aiodist.breakpoint(group, rank=2)` in the script:

    aiodist run -n 4 --stdin 2 train.py

Run eight ranks, start dead ones again (ten times in all), and go on while two are left:

    aiodist run -n 2:8 --max-restarts 10 train.py

Exit status: 0 if all ranks ended with 0; else that of the rank that failed first, 128 + n if
signal n ended it. 130 after Ctrl-C, 141 if the reader of the output has gone, 1 if the run could
not be started or its output not be written, 2 for wrong usage.
"""


TORCH_REPLACES = "AIODIST_TORCH_REPLACES"
"""Read by the torch backend."""


def run(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The script (with -m the module) of each rank.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARG", help="Arguments of the script.")
    ] = None,
    *,
    nprocs: Annotated[
        str,
        typer.Option(
            "-n",
            "--ranks",
            metavar="N|MIN:MAX",
            help="Ranks to start on this node. MIN:MAX: an elastic group of at most MAX ranks, "
            "which goes on while MIN are left.",
        ),
    ],
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="How many times, in all, dead ranks are started again."
        ),
    ] = 0,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")
    ] = False,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="A coordinator that runs already, such as tcp://10.0.0.1:29500. "
            "On one node, rank 0 serves the address if none runs there. Without it, the run has a "
            "coordinator of its own.",
        ),
    ] = None,
    group: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            envvar="AIODIST_GROUP",
            help="Name of the group; each run needs its own.",
        ),
    ] = "world",
    nnodes: Annotated[int, typer.Option(min=1, help="Nodes (hosts) of the run.")] = 1,
    node_rank: Annotated[
        int | None, typer.Option(min=0, help="Which of the nodes this one is, from 0.")
    ] = None,
    node_timeout: Annotated[
        float,
        typer.Option(min=0.1, metavar="SECONDS", help="How long to wait for the other nodes."),
    ] = 300.0,
    grace: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Time between SIGTERM and SIGKILL for ranks that have to stop.",
        ),
    ] = spawn.GRACE,
    stdin: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="RANK",
            help="Pass standard input to this rank, for a debugger. Its output is then passed on "
            "unchanged, without its rank.",
        ),
    ] = None,
    tls_ca: tls.Ca = None,
    tls_cert: tls.Cert = None,
    tls_key: tls.Key = None,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve a page with what the ranks do, and metrics, to this host: 127.0.0.1:8080; "
            "port 0 takes a free one.",
        ),
    ] = None,
    flight_recorder: Annotated[
        str | None,
        typer.Option(
            metavar="WHERE",
            envvar=FLIGHT_RECORDER,
            help="A directory, or 'stderr': where ranks write their last operations after an error "
            "and on SIGUSR1.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write what all ranks did, in one clock, as a trace for https://ui.perfetto.dev.",
        ),
    ] = None,
    torch_backend_for: Annotated[
        str | None,
        typer.Option(
            metavar="BACKEND",
            help="gloo or tcp: ranks that ask torch.distributed for this backend get aiodist.",
        ),
    ] = None,
) -> None:
    """Run a script as N ranks, each in a process of its own.

    Every rank gets AIODIST_ADDRESS, AIODIST_RANK and AIODIST_SIZE, so that `aiodist.connect()`
    needs no arguments, and the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
    …). Its output appears line by line with its rank. The first rank that fails stops the others,
    and the end of its stderr is shown last. Ctrl-C ends all ranks at once. SIGUSR1 shows what the
    ranks are doing, and which ranks hold up others.
    """
    spawn.require_posix("aiodist run")
    least, most = _sizes(nprocs)
    if nnodes * most > MAX_MEMBERS:
        raise usage_error(
            f"{nnodes * most} ranks on all nodes: a group has at most {MAX_MEMBERS}", "--ranks"
        )
    elastic = ":" in nprocs or max_restarts > 0
    if elastic and nnodes > 1:
        raise usage_error("MIN:MAX and --max-restarts are for one node")
    if elastic and stdin is not None:
        raise usage_error("--stdin is for ranks that are started once")
    if nnodes > 1 and coordinator is None:
        raise usage_error("several nodes need a --coordinator that all of them can reach")
    if coordinator is not None:
        usable_address(coordinator, "--coordinator")
    if http is not None and coordinator is not None:
        raise usage_error("the page is the coordinator's: start `aiodist coordinator` with --http")
    page = None if http is None else _page(http)
    if trace is not None and nnodes > 1:
        raise usage_error(
            f"--trace is for one node: set {TRACE} to a directory on each, and join what is in "
            "them with aiodist trace"
        )
    if trace is not None and (why := unwritable(trace)) is not None:
        raise usage_error(why, "--trace")
    node = _node(nnodes, node_rank)
    first = node * most
    if stdin is not None and stdin not in range(first, first + most):
        raise usage_error(f"--stdin is a rank of this node, {first} to {first + most - 1}")
    if torch_backend_for is not None:
        os.environ[TORCH_REPLACES] = _replaceable(torch_backend_for)  # which the ranks inherit
    # Imported only now: other commands do not need it, and Windows lacks it.
    from aiodist_cli.elastic import Spare
    from aiodist_cli.launcher import Place, launch

    program = [sys.executable, "-u", *_target(script, module), *(args or [])]
    if flight_recorder:
        _check_directory(flight_recorder)
        os.environ[FLIGHT_RECORDER] = flight_recorder  # which the ranks inherit
    tls.use(tls_ca, tls_cert, tls_key)
    spare = Spare(least, max_restarts) if elastic else None
    place = Place(most, nnodes, node, coordinator, group, node_timeout, spare, page)
    try:
        with _tracing(trace), asyncio.Runner(loop_factory=spawn.new_event_loop) as runner:
            status = runner.run(launch(program, place, grace, stdin))
    except KeyboardInterrupt:  # before there were ranks to stop
        status = 128 + signal.SIGINT
    except (AiodistError, OSError, ValueError) as error:
        raise CommandError(f"aiodist run: {error}") from error
    except ImportError as error:
        if page is None:
            raise
        text = f"aiodist run --http: {error}. Install what it needs: pip install 'aiodist[server]'"
        raise CommandError(text) from error
    raise typer.Exit(status)


def _page(given: str) -> Address:
    """The address of the page. It must be on this host, because no token guards it.

    Raises a usage error.
    """
    try:
        address = parse_address(f"tcp://{given.removeprefix('http://')}")
    except ValueError as error:
        raise usage_error(f"expected HOST:PORT ({error})", "--http") from error
    if not address.is_loopback:
        text = f"{given} can be reached from other hosts, and no token guards it: use 127.0.0.1"
        raise usage_error(text, "--http")
    return address


def _check_directory(where: str) -> None:
    """Check before the run that flight records can be written. Raises a usage error."""
    if where == "stderr":
        return
    try:
        Path(where).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=where):
            pass
    except OSError as error:
        text = f"{Path(where).absolute()} cannot be written: {error.strerror}"
        raise usage_error(text, "--flight-recorder") from error


@contextlib.contextmanager
def _tracing(output: Path | None) -> Iterator[None]:
    """Let the ranks write traces, and join them at the end, however the run ends."""
    if output is None:
        yield
        return
    parts = tempfile.mkdtemp(prefix="aiodist-trace-")
    os.environ[TRACE] = parts  # which the ranks inherit
    try:
        yield
    finally:
        files = sorted(Path(parts).glob("*.json"))
        try:
            typer.echo(f"aiodist run: {joined(files, output, 'aiodist run')}", err=True)
        except BaseException as error:
            if files:
                text = f"the ranks' traces are kept: aiodist trace {parts} -o FILE joins them"
                parts = ""  # before that line, because another Ctrl-C may come while it is written
                typer.echo(f"aiodist run: {text}", err=True)
            if not isinstance(error, CommandError):  # its message is printed, and the run counts
                raise
        finally:
            if parts:
                shutil.rmtree(parts, ignore_errors=True)


def _sizes(nprocs: str) -> tuple[int, int]:
    """The least and the greatest number of ranks. Raises a usage error."""
    least, _, most = nprocs.partition(":")
    try:
        sizes = int(least), int(most if ":" in nprocs else least)
    except ValueError:
        sizes = 0, 0
    if not 1 <= sizes[0] <= sizes[1]:
        text = f"expected a number of ranks, as 4, or the least and the most, as 2:8, not {nprocs}"
        raise usage_error(text, "--ranks")
    return sizes


def _node(nodes: int, given: int | None) -> int:
    """The number of this node, from 0. Raises a usage error."""
    if given is None and nodes > 1:
        raise usage_error(
            f"say with --node-rank which of the {nodes} nodes this one is: 0 to {nodes - 1}"
        )
    if given is not None and given >= nodes:
        raise usage_error(f"--node-rank is 0 to {nodes - 1} with --nnodes {nodes}")
    return given or 0


def _replaceable(backend: str) -> str:
    """The torch backend that aiodist replaces. Raises a usage error."""
    name = backend.strip().lower()
    if name not in ("gloo", "tcp"):
        raise usage_error(
            f"aiodist can answer for gloo or tcp, not for {backend!r}", "--torch-backend-for"
        )
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        raise usage_error(
            "with TORCH_DEVICE_BACKEND_AUTOLOAD=0 torch does not learn of aiodist: unset it",
            "--torch-backend-for",
        )
    return name


def _target(script: str, module: bool) -> list[str]:
    """The arguments for Python. Raises a usage error if there is no such script."""
    if module:
        return ["-m", script]
    path = Path(script)
    if path.is_file() or (path / "__main__.py").is_file():
        return [script]
    hint = f"; for a module: aiodist run … -m {script}" if "/" not in script else ""
    raise usage_error(f"there is no script {script!r} here ({Path.cwd()}){hint}", "SCRIPT")
