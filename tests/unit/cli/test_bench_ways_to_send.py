"""The benchmark of the ways to send."""

from __future__ import annotations

import errno
import socket
import sys

import pytest

from benchmarks import ways_to_send
from benchmarks.ways_to_send import Source

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these are ways that Linux has")


def test_each_way_carries_all_and_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert ways_to_send.main(["--mib", "3", "--rounds", "2"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["3", "MiB,", "processor", "ms", "sender", "receiver", "both"]
    shown = {line[:24].rstrip(): [float(cell) for cell in line[24:].split()] for line in lines}
    # A sandbox may forbid the others.
    assert {"send", "sendfile"} <= shown.keys() <= ways_to_send.WAYS.keys()
    for sender, receiver, both in shown.values():
        assert abs(sender + receiver - both) < 0.2


def test_what_the_system_does_not_know_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(sock: socket.socket, source: Source) -> None:
        raise OSError(errno.ENOSYS, "not here")

    monkeypatch.setitem(ways_to_send.WAYS, "sendfile", unknown)
    assert ways_to_send.main(["--mib", "1", "--rounds", "1"]) == 0
    out, err = capsys.readouterr()
    assert "sendfile" not in out
    assert "not measured: sendfile: [Errno 38] not here\n" in err


def test_what_came_is_compared_with_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(sock: socket.socket, source: Source) -> None:
        sock.sendall(bytes(len(source.memory)))

    monkeypatch.setitem(ways_to_send.WAYS, "send", wrong)
    with pytest.raises(ValueError, match="not what was sent"):
        ways_to_send.main(["--mib", "1", "--rounds", "1"])
