"""The choice of transports."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from aiodist.buffers.segment import unsupported_reason
from aiodist.transports import registry
from aiodist.transports.registry import Contact, candidates, choose, host_id, make, process_id

ALL = ("inproc", "shm", "unix", "tcp")
ADDRESSES = {
    "tcp": "tcp://10.0.0.2:1",
    "inproc": "inproc://rank-1",
    "unix": "unix-abstract:x",
    "shm": "shm:x",
}


def endpoint(process: str, host: str, allowed: tuple[str, ...] = ALL) -> Contact:
    return Contact(process, host, ADDRESSES, allowed)


def test_the_same_process_prefers_inproc() -> None:
    own, peer = endpoint("p", "h"), endpoint("p", "h")
    assert candidates(own, peer) == [(name, ADDRESSES[name]) for name in ALL]


def test_the_same_host_prefers_shared_memory() -> None:
    assert [name for name, _ in candidates(endpoint("p", "h"), endpoint("q", "h"))] == [
        "shm",
        "unix",
        "tcp",
    ]


def test_other_hosts_take_tcp() -> None:
    assert candidates(endpoint("p", "h"), endpoint("q", "i")) == [("tcp", "tcp://10.0.0.2:1")]


def test_other_users_of_the_same_host_take_tcp() -> None:
    root, other = (replace(endpoint(user, "h"), user=user) for user in ("0-1", "65534-1"))
    for own, peer in ((root, other), (other, root)):
        assert candidates(own, peer) == [("tcp", "tcp://10.0.0.2:1")]
    inside = replace(endpoint("p", "h"), user="0-2")  # of another namespace
    assert candidates(root, inside) == [("tcp", "tcp://10.0.0.2:1")]


def test_both_sides_must_allow_it() -> None:
    own, peer = endpoint("p", "h", ("unix",)), endpoint("p", "h", ("tcp", "unix"))
    assert candidates(own, peer) == [("unix", "unix-abstract:x")]
    assert candidates(own, endpoint("p", "h", ("tcp",))) == []


def test_the_peer_must_have_an_address() -> None:
    peer = Contact("q", "h", {"tcp": "tcp://10.0.0.2:1"}, ALL)
    assert candidates(endpoint("p", "h"), peer) == [("tcp", "tcp://10.0.0.2:1")]


def test_choose_orders_by_preference() -> None:
    assert choose(("tcp", "inproc")) == ("inproc", "tcp")
    assert choose("tcp") == ("tcp",)
    assert choose(" tcp, inproc ") == ("inproc", "tcp")
    assert choose(["tcp", "tcp"]) == ("tcp",)


@pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))
def test_choose_all_where_memory_can_be_shared() -> None:
    assert choose(None) == ALL


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no transport 'udp'.*'inproc', 'shm', 'unix', 'tcp'"):
        choose(("tcp", "udp"))
    with pytest.raises(ValueError, match="no transport ''"):
        choose("")
    with pytest.raises(ValueError, match="leaves no transport"):
        choose(())
    with pytest.raises(
        ValueError, match=r"=\('cuda_ipc',\) leaves no .* 'cuda_ipc': it is for ten"
    ):
        choose(("cuda_ipc",))


def test_make_gives_the_kind_that_was_asked_for() -> None:
    assert [make(name).kind for name in choose(None)] == list(choose(None))


def test_host_id_is_stable_and_says_where() -> None:
    assert host_id() == host_id()
    assert len(host_id()) > 10


def test_host_id_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nowhere:
        def __init__(self, path: str) -> None:
            self.path = path

        def read_text(self, encoding: str) -> str:
            raise FileNotFoundError(self.path)

    monkeypatch.setattr(registry, "Path", Nowhere)
    assert host_id() == host_id()


def test_process_id_tells_loops_apart() -> None:
    one, two = asyncio.new_event_loop(), asyncio.new_event_loop()
    try:
        assert process_id(one) == process_id(one)
        assert process_id(one) != process_id(two)
    finally:
        one.close()
        two.close()
