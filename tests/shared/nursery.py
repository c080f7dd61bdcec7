"""Ranks that need not import anything: a process that has imported what they need forks them.

To import torch takes two seconds of the processor, and twice that with what its data parallelism
needs. A test of four ranks, each a process of its own, would spend more on that than on the rest.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

READ = selectors.EVENT_READ


class Nursery:
    """A process that has imported `modules`, with the environment `env`; it ends, and what it has
    forked, when this is closed, or this process ends."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str], *options: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *options, __file__, str(theirs.fileno()), *modules],
                env=env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def start(self, program: Path, args: Sequence[str], env: Mapping[str, str]) -> Born:
        """A process that runs `program`, with that environment."""
        line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        born = Born(program, line)
        with theirs:
            words = json.dumps([str(program), [*args], dict(env)]).encode()
            files = [theirs.fileno(), born.out.fileno(), born.err.fileno()]
            socket.send_fds(self._socket, [words], files)
        return born

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


class Born:
    """A process of a nursery. Has of `subprocess.Popen` what tests need."""

    def __init__(self, program: Path, line: socket.socket) -> None:
        self.returncode: int | None = None
        self.out = tempfile.TemporaryFile("w+")  # noqa: SIM115, `close` closes them
        self.err = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._program = program
        self._line = line  # says how it has ended; it is killed when this side is closed

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end: what it has written to stdout and stderr."""
        if self.returncode is None:
            self._line.settimeout(timeout)
            try:
                status = self._line.recv(16)
            except TimeoutError:
                raise subprocess.TimeoutExpired(str(self._program), timeout) from None
            assert status, "the nursery has ended"
            self.returncode = int(status)
        texts = []
        for file in (self.out, self.err):
            file.seek(0)
            texts.append(file.read())
        return texts[0], texts[1]

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        if self.returncode is None:
            self._line.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Forget what it has written."""
        self._line.close()
        self.out.close()
        self.err.close()


# -- in the process that forks --------------------------------------------------------------------


class Parent:
    """Forks what it is asked for over `control`, and tells how each of them has ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[socket.socket, int] = {}  # by the line on which their ends are told
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()  # by the end of a child
        self._wake.setblocking(False)
        self._selector.register(control, READ)
        self._selector.register(self._woken, READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

    def children(self) -> tuple[list[Any], list[int]]:
        """Returns in a child alone: the words and files that it was asked for with."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    words, files, _, _ = socket.recv_fds(self._control, 1 << 20, 3)
                    if not words:
                        for pid in self._children.values():
                            os.kill(pid, signal.SIGKILL)
                        sys.exit()
                    line = socket.socket(fileno=files.pop(0))
                    pid = os.fork()
                    if not pid:
                        line.close()
                        self._forget()
                        return json.loads(words), files
                    self._children[line] = pid
                    self._selector.register(line, READ, line)
                    for fd in files:
                        os.close(fd)
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                    self._tell_ends()
                elif key.data in self._children:
                    self._selector.unregister(key.data)
                    os.kill(self._children[key.data], signal.SIGKILL)

    def _tell_ends(self) -> None:
        for line, child in list(self._children.items()):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                del self._children[line]
                with contextlib.suppress(KeyError):  # its end was asked for
                    self._selector.unregister(line)
                with line, contextlib.suppress(BrokenPipeError):
                    line.send(str(os.waitstatus_to_exitcode(status)).encode())

    def _forget(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for one in (self._control, self._woken, self._wake, *self._children):
            one.close()


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    (program, args, env), files = Parent(control).children()
    for fd, target in zip(files, (1, 2), strict=True):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = [program, *args]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
