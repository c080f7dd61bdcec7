"""`aiodist.connect`: what it says where it is used in a way that it cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import sys
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist import environment
from aiodist.schedules.costs import ONE_HOST_TCP, written


@pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="asyncio.run takes whatever can be awaited from 3.14 on"
)
def test_where_a_coroutine_is_wanted_the_error_says_what_to_do() -> None:
    connecting = aiodist.connect("inproc://absent", size=1)
    with pytest.raises((TypeError, ValueError), match=r"aiodist\.connect.* to be awaited, or"):
        asyncio.run(connecting)


def test_what_is_not_awaited_says_what_to_do() -> None:
    connecting: Any = aiodist.connect("inproc://absent", size=1)
    with pytest.raises(
        AttributeError, match=r"is no group, and has no 'rank': use what `await connect"
    ):
        _ = connecting.rank
    with pytest.raises(TypeError, match=r"entered by `async with`, not by `with`"), connecting:
        pass
    assert not hasattr(connecting, "__len__")
    assert copy.copy(connecting).timeout == connecting.timeout


@pytest.mark.parametrize("option", ["group", "bind", "advertise"])
def test_text_that_is_empty_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}='' is empty: give a value, or None"):
        aiodist.connect("inproc://absent", size=1, **{option: ""})


@pytest.mark.parametrize("option", ["bind", "advertise"])
@pytest.mark.parametrize("wrong", [5, 0, False, b"host", ("host", 1)])
def test_a_host_that_is_no_text_is_refused(option: str, wrong: object) -> None:
    with pytest.raises(TypeError, match="a host is a str, such as 'node-3' or 'node-3:29501', not"):
        aiodist.connect("inproc://absent", size=1, **{option: wrong})


async def test_a_host_that_is_another_is_named_by_its_argument() -> None:
    async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
        with pytest.raises(
            OSError, match=r"bind='203.0.113.1' cannot be used: .*\. Give a name or"
        ):
            await aiodist.connect(coordinator.address, size=1, bind="203.0.113.1")


@pytest.mark.parametrize(
    ("environ", "address", "seconds"),
    [
        ({}, "tcp://127.0.0.1:1", 30.0),
        ({"AIODIST_ADDRESS": "tcp://127.0.0.1:1"}, None, 300.0),
        ({"AIODIST_ADDRESS": "tcp://127.0.0.1:1", "AIODIST_TIMEOUT": "7"}, None, 7.0),
        ({"AIODIST_TIMEOUT": "7"}, "tcp://127.0.0.1:1", 7.0),
    ],
)
def test_how_long_joining_may_take(monkeypatch, environ, address, seconds):
    for name in [name for name in os.environ if name.startswith("AIODIST_")]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert aiodist.connect(address, size=1).timeout == seconds
    assert aiodist.connect(address, size=1, timeout=2.0).timeout == 2.0


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_profile_of_costs_that_cannot_be_read_is_named(monkeypatch, tmp_path, by):
    profile = tmp_path / "costs.toml"
    if by == "environment":
        monkeypatch.setenv("AIODIST_COSTS", str(profile))
    options = {"costs": profile} if by == "argument" else {}
    with pytest.raises(ValueError, match=r"profile of costs '.*costs\.toml': .*No such file"):
        aiodist.connect("inproc://absent", size=1, **options)
    profile.write_text("alpha = 1\n")
    with pytest.raises(ValueError, match=r"profile of costs '.*costs\.toml': .*beta.* is missing"):
        aiodist.connect("inproc://absent", size=1, **options)
    profile.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"profile of costs '.*costs\.toml': .*decode"):
        aiodist.connect("inproc://absent", size=1, **options)
    profile.write_text(written(ONE_HOST_TCP))
    aiodist.connect("inproc://absent", size=1, **options)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"size": 0}, ValueError, "size is 1 to 4096, not 0"),
        ({"size": "2"}, TypeError, "size is an int, not '2'"),
        ({"size": 2, "rank": -1}, ValueError, "rank is 0 to 4095, not -1"),
        ({"size": 2, "rank": 1.0}, TypeError, "rank is an int, not 1.0"),
        ({"size": True}, TypeError, "size is an int, not True"),
        ({"size": 2, "rank": False}, TypeError, "rank is an int, not False"),
        ({"min_size": 0, "max_size": 2}, ValueError, "min_size is 1 to 4096, not 0"),
        ({"min_size": 3, "max_size": 2}, ValueError, "min_size=3 is over max_size=2"),
        ({"size": 2, "min_size": 1}, ValueError, "size=2 makes a fixed group, .* give one or the"),
        ({"size": 2, "rank": 2}, ValueError, "rank=2 with size=2: expected a rank from 0 to 1"),
        ({"max_size": 2, "rank": 2}, ValueError, "rank=2 with max_size=2: expected a rank from"),
    ],
)
def test_numbers_that_make_no_sense_wait_for_no_coordinator(options, error, text):
    with pytest.raises(error, match=text):
        aiodist.connect("inproc://absent", **options)


@pytest.mark.parametrize("size", [0, -1, 4097])
async def test_a_local_group_has_a_rank(size: int) -> None:
    with pytest.raises(ValueError, match=f"size is 1 to 4096, not {size}"):
        await aiodist.local(size).__aenter__()


@pytest.mark.parametrize(
    ("environ", "options", "text"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, {"size": 1}, "RANK=1 with size=1: expected a rank from"),
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            {"rank": 2},
            "rank=2 with WORLD_SIZE=2: expected a rank",
        ),
        ({"AIODIST_MAX_SIZE": "2"}, {"rank": 2}, "rank=2 with AIODIST_MAX_SIZE=2: expected a rank"),
        ({"WORLD_SIZE": "5000"}, {}, "WORLD_SIZE is 1 to 4096, not 5000"),
        ({"RANK": "1"}, {}, "connect needs size= .* WORLD_SIZE is not set, either"),
        ({"JOB_COMPLETION_INDEX": "1"}, {}, "connect needs size= .* AIODIST_SIZE is not set"),
        ({"AIODIST_ADDRESS": "tcp://127.0.0.1:0"}, {"size": 1}, "AIODIST_ADDRESS: .* has port 0"),
        ({"AIODIST_TRANSPORTS": ","}, {"size": 1}, "AIODIST_TRANSPORTS=',': expected names"),
    ],
)
def test_what_the_environment_has_wrong_is_named_by_its_variable(
    monkeypatch, environ, options, text
):
    for name in environment.NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"AIODIST_ADDRESS": "tcp://127.0.0.1:1", **environ}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=text):
        aiodist.connect(**options)


@pytest.mark.parametrize(
    ("address", "error", "text"),
    [
        ("tcp://127.0.0.1:0", ValueError, "'tcp://127.0.0.1:0' has port 0, .*: give the port of"),
        ("tls://[::1]:0", ValueError, "has port 0"),
        (5, TypeError, "an address is a str, not 5: expected tcp://host:port"),
    ],
)
def test_an_address_that_nobody_can_have_is_refused_at_once(address, error, text):
    with pytest.raises(error, match=text):
        aiodist.connect(address, size=1)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"join_window": -1}, ValueError, "join_window=-1: expected seconds from 0 to"),
        ({"group": 5}, ValueError, "group=5: expected a text of 1 to"),
        ({"name": "x" * 9999}, ValueError, "name='x+: expected a text of 0 to"),
        ({"metadata": [1]}, TypeError, r"metadata is a dict of values by name, not \[1\]"),
        ({"metadata": {1: 2}}, ValueError, "metadata={1: 2}: expected .* with text keys"),
        ({"metadata": {"a": {1: 2}}}, ValueError, "metadata={'a': {1: 2}}: .* with text keys"),
        ({"metadata": {"a": {1}}}, TypeError, r"metadata=.*: set \{1\} cannot be sent"),
        ({"metadata": {"a": 2**70}}, TypeError, "metadata=.*: int .* cannot be sent"),
        ({"max_message_bytes": None}, TypeError, "max_message_bytes is an int, not None"),
        ({"max_message_bytes": 0}, ValueError, "max_message_bytes is at least 1, not 0"),
        ({"ssl": True}, TypeError, "ssl is an ssl.SSLContext, or .*, not True"),
        ({"ssl": ()}, TypeError, r"or \(client side, server side\), not \(\)"),
    ],
)
def test_an_option_that_means_nothing_is_named_as_the_argument(options, error, text):
    with pytest.raises(error, match=text):
        aiodist.connect("inproc://absent", size=1, **options)


def test_an_argument_that_there_is_not_is_named_with_what_to_use():
    with pytest.raises(TypeError, match=r"connect\(\) got .* argument 'run_id': use group=$"):
        aiodist.connect("inproc://absent", size=1, run_id="7")
    with pytest.raises(TypeError, match=r"connect\(\) got .* 'world_size': use size=$"):
        aiodist.connect("inproc://absent", world_size=1)
    with pytest.raises(TypeError, match=r"connect\(\) got an unexpected .* 'no_such_option'$"):
        aiodist.connect("inproc://absent", size=1, no_such_option=1)


async def test_numbers_may_be_those_of_numpy() -> None:
    async with aiodist.Coordinator("inproc://numbers") as coordinator:
        options = {"rank": np.int64(0), "size": np.uint8(1), "join_window": np.float64(0.5)}
        async with aiodist.connect(coordinator.address, **options) as group:
            assert await group.all_gather(group.rank) == [0]


async def test_a_connection_is_entered_again_only_after_its_end() -> None:
    async with aiodist.Coordinator("inproc://entered") as coordinator:
        connecting = aiodist.connect(coordinator.address, size=1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await connecting.__aenter__()
        await (await connecting.__aenter__()).close()
        for _ in range(2):
            async with connecting as group:
                with pytest.raises(RuntimeError, match="was entered, and not left yet: call conn"):
                    await connecting.__aenter__()
                await group.barrier()


async def test_all_ranks_of_a_local_group_leave_although_one_cannot_close() -> None:
    left: list[int] = []

    async def fails() -> None:
        groups[0].abort()
        raise ZeroDivisionError

    async def takes_long() -> None:
        for _ in range(1000):
            await asyncio.sleep(0)
        await close()
        left.append(1)

    with pytest.raises(ZeroDivisionError):
        async with aiodist.local(2) as ranks:
            groups: list[Any] = ranks
            close = groups[1].close
            groups[0].close, groups[1].close = fails, takes_long
    assert left == [1]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_block_of_a_group_leaves_its_newest_epoch(fails: bool) -> None:
    async with aiodist.Coordinator("inproc://newest") as coordinator:
        connecting = [aiodist.connect(coordinator.address, rank=r, size=2) for r in range(2)]
        groups = await asyncio.gather(*connecting)

        async def block(group: aiodist.Group) -> aiodist.Group:
            with contextlib.suppress(ZeroDivisionError):
                async with group:
                    group = await group.shrink()
                    if fails and group.rank == 0:
                        raise ZeroDivisionError
                    if fails:
                        with pytest.raises(aiodist.PeerLostError, match="ZeroDivisionError"):
                            await group.barrier(timeout=5.0)
            return group

        newest = await asyncio.gather(*map(block, groups))
        assert [group.closed for group in newest] == [True, True]
        assert coordinator.status()["groups"] == []
