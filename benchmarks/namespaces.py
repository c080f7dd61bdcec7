"""Some "hosts" on this machine: network namespaces with virtual wires between them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator

from aiodist.testing.owned_namespaces import remove, remove_left_over, this_process
from aiodist_cli.bench_peers import PeerMissing, Site

_NETWORK = "10.231.8"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def namespaces(count: int = 2) -> Iterator[list[Site]]:
    """A site in each of so many namespaces, gone afterwards. Two have a wire between them, more are
    joined by a bridge in a namespace of its own. Raises PeerMissing where they cannot be made: that
    needs root and iproute2."""
    program = shutil.which("ip")
    if program is None or os.geteuid() != 0:
        raise PeerMissing("network namespaces need root, and `ip` of the package iproute2")
    remove_left_over()
    *names, switch = this_process().names("bench", [*range(count), "switch"])
    devices = [f"ad{os.getpid() % 1_000_000}x{number}" for number in range(count)]
    try:
        try:
            for name in names if count == 2 else [*names, switch]:
                _ip("netns", "add", name)
            if count == 2:
                _wire(names[0], devices[0], names[1], devices[1])
            else:
                _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
                _ip("-n", switch, "link", "set", "bridge", "up")
                for name, device in zip(names, devices, strict=True):
                    port = f"{device}p"
                    _wire(name, device, switch, port)
                    _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            for number, (name, device) in enumerate(zip(names, devices, strict=True), 1):
                _ip("-n", name, "addr", "add", f"{_NETWORK}.{number}/24", "dev", device)
                _ip("-n", name, "link", "set", device, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            raise PeerMissing(
                f"network namespaces cannot be made: {error.stderr.strip()}"
            ) from error
        yield [
            Site((program, "netns", "exec", name), f"{_NETWORK}.{number}", device)
            for number, (name, device) in enumerate(zip(names, devices, strict=True), 1)
        ]
    finally:
        remove([*names, switch])


def _wire(first: str, device: str, second: str, peer: str) -> None:
    """A pair of devices, one in each of two namespaces."""
    _ip("link", "add", device, "netns", first, "type", "veth", "peer", "name", peer,
        "netns", second)  # fmt: skip


def iperf3(first: Site, second: Site, *, runs: int = 3, seconds: int = 1) -> float:
    """Bytes per second each way of `iperf3 --bidir` between two sites: the best of `runs`, the
    mean of both ways. Raises PeerMissing if it is not installed, or fails."""
    program = shutil.which("iperf3")
    if program is None:
        raise PeerMissing("iperf3 is not installed")
    return max(_iperf3(program, first, second, seconds) for _ in range(runs))


def _iperf3(program: str, first: Site, second: Site, seconds: int) -> float:
    serve = [*second.prefix, program, "-s", "-1", "-B", second.host, "--forceflush"]
    ask = [*first.prefix, program, "-c", second.host, "--bidir", "-t", str(seconds), "-J"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if "listening" in line:
                    break
            done = subprocess.run(
                ask, capture_output=True, text=True, timeout=seconds + 30, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise PeerMissing("iperf3 did not end") from error
        finally:
            server.kill()
    return parse_iperf3(done.stdout)


def parse_iperf3(text: str) -> float:
    """Bytes per second each way from the JSON of `iperf3 --bidir`. Raises PeerMissing."""
    try:
        end = json.loads(text)["end"]
        ways = [end[name] for name in ("sum_received", "sum_received_bidir_reverse")]
        return float(sum(way["bits_per_second"] for way in ways)) / 2 / 8
    except (ValueError, KeyError) as error:
        raise PeerMissing(f"iperf3 answered {text.strip()[:300]!r}") from error
