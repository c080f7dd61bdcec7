"""What a rank without a certificate says, and dials, where the coordinator is reached by TLS."""

from __future__ import annotations

import asyncio

import pytest

from aiodist.coordinator.exposure import Guard
from aiodist.reach import Reach
from aiodist.transports.registry import Contact
from aiodist.wire.messages import JoinRequest, MemberInfo


def reach(stays: bool) -> Reach:
    return Reach(("tcp",), None, Guard(keeps_out=True), None, None, stays)


def ask() -> JoinRequest:
    return JoinRequest(
        group="g", id="", rank=0, size=2, min_size=None, max_size=None, join_window=1.0, lease=1.0,
        name="", metadata={}, run_id="",
    )  # fmt: skip


@pytest.mark.parametrize("stays", [True, False])
def test_where_it_listens_and_what_it_says(stays):
    async def main():
        listeners = []
        try:
            await reach(stays).listen("tls://10.0.0.1:5", "0.0.0.0", lambda link: None, listeners)
            loop = asyncio.get_running_loop()
            said = reach(stays).introduce(ask(), "10.0.0.2", 0.0, listeners, loop)
            return listeners[0].address, said
        finally:
            for listener in listeners:
                listener.close()

    listens, said = asyncio.run(main())
    assert listens.startswith("tcp://127.0.0.1:" if stays else "tcp://0.0.0.0:")
    (address,) = [one for one in said.addresses if one.startswith("tcp:")]
    assert address.startswith("tcp://127.0.0.1:" if stays else "tcp://10.0.0.2:")
    assert said.host == "10.0.0.2"


def member(address: str, host_id: str) -> MemberInfo:
    return MemberInfo(
        rank=1, id="one", host="10.0.0.2", pid=1, name="", metadata={}, joined_at=0.0,
        host_id=host_id, addresses=("process:p", "user:u", address), lease=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stays", "address"), [(True, "tcp://10.0.0.2:5"), (False, "tcp://127.0.0.1:5")]
)
def test_nothing_is_dialed_between_hosts_in_the_clear(stays, address):
    own = Contact("process", "here", "u", {"tcp": "tcp://10.0.0.1:4"}, ("tcp",))
    dialing = reach(stays).dial(own, member(address, "there"), "10.0.0.1", object(), 1.0)
    with pytest.raises(OSError, match=r"no certificate.*AIODIST_TLS_CERT") as caught:
        asyncio.run(dialing)
    assert "tried" not in str(caught.value)
