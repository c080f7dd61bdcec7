"""Channels of weights: what is published comes, whole, and never older than what came before."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import NamedTuple

import numpy as np
import pytest

import aiodist
from aiodist.channels.fetching import Fetching
from aiodist.wire.limits import MAX_NAME

OPTIONS = {"timeout": 20.0}


@pytest.fixture(params=["tcp", "all"])
def options(request):
    """Without shared memory, and with it."""
    return {**OPTIONS, "transports": ("tcp",) if request.param == "tcp" else None}


def tree(version, size=1000):
    return {
        "layers": [np.full(size, version, np.float32), np.arange(size) * version],
        "scale": version / 2,
        "empty": np.empty((0, 3)),
        "step": version,
    }


def same(got, expected):
    assert got.keys() == expected.keys()
    for one, other in zip(got["layers"], expected["layers"], strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    assert (got["scale"], got["step"]) == (expected["scale"], expected["step"])
    assert got["empty"].shape == (0, 3)


class Channel:
    """A coordinator, and who takes part in a channel of it."""

    def __init__(self, address, options):
        self.address = address
        self.options = options

    def publisher(self, **more):
        return aiodist.publisher("policy", address=self.address, **{**self.options, **more})

    def subscriber(self, **more):
        return aiodist.subscriber("policy", address=self.address, **{**self.options, **more})


@pytest.fixture
def channel(options):
    def make(coordinator):
        return Channel(coordinator.address, options)

    return make


def test_versions_come_whole_and_only_grow(run, channel):
    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            weights = channel(coordinator)
            async with weights.publisher() as out, weights.subscriber() as first:
                await out.publish(tree(3), version=3)
                version, got = await first.latest()
                assert version == 3
                same(got, tree(3))
                assert not got["layers"][0].flags.writeable
                waiting = asyncio.ensure_future(first.latest(newer_than=3))
                await out.publish(tree(7), version=7)
                assert (await waiting)[0] == 7
                assert (await first.latest())[0] == 7
                same(got, tree(3))  # what was given stays
                # A late joiner, from whoever has it.
                async with weights.subscriber() as late:
                    version, got = await late.latest()
                    assert version == 7
                    same(got, tree(7))

    run(main())


def test_into_is_written_as_a_whole_or_not_at_all(run, channel):
    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            weights = channel(coordinator)
            async with weights.publisher() as out, weights.subscriber() as server:
                await out.publish(tree(1), version=1)
                into = tree(0)
                kept = into["layers"][1]
                wrong = {**into, "layers": [into["layers"][0], np.zeros(7)]}
                with pytest.raises(TypeError, match=r"into\['layers'\]\[1\].*float64\[7\]"):
                    await server.latest(into=wrong)
                # If floats are converted, arrays may be missing in `into`, but not all of them.
                wrong = [5, "x", False, {**into, "layers": 5}, {**into, "empty": "x"}]
                wrong += [{**into, "layers": [into["layers"][0], 1.5]}, [], {}, {"step": 1}]
                for one in wrong:
                    for convert in (False, True):
                        with pytest.raises((TypeError, ValueError), match=r"^into"):
                            await server.latest(into=one, convert=convert)
                        with pytest.raises((TypeError, ValueError), match=r"^into"):
                            await server.latest(into=one, convert=convert, in_place=True)
                assert not into["layers"][0].any()
                some = {"layers": [np.zeros(1000)], "step": 7, "scale": 0.0, "empty": None}
                assert await server.latest(into=some, convert=True) == 1
                assert np.array_equal(some["layers"][0], tree(1)["layers"][0])
                assert await server.latest(into=into) == 1
                assert np.array_equal(into["layers"][0], tree(1)["layers"][0])
                assert np.array_equal(kept, tree(1)["layers"][1])

    run(main())


def test_a_version_without_arrays_is_taken_into_a_tree_without_them(run, channel):
    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            weights = channel(coordinator)
            async with weights.publisher() as out, weights.subscriber() as server:
                await out.publish({"step": 1}, version=1)
                for convert in (False, True):
                    assert await server.latest(into={"step": 0}, convert=convert) == 1

    run(main())


def test_iteration_and_streams(run, channel):
    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            weights = channel(coordinator)
            async with weights.publisher() as out, weights.subscriber() as server:
                await out.publish(tree(1), version=1)
                names = {name: array async for name, array in server.stream(1)}
                assert list(names) == ["layers.0", "layers.1", "empty"]
                assert np.array_equal(names["layers.1"], tree(1)["layers"][1])
                with pytest.raises(ValueError, match=r"version 5 .* the channel has \[1\]"):
                    async for _ in server.stream(5):
                        pass
                seen = []
                async for version, got in server:
                    same(got, tree(version))
                    seen.append(version)
                    if version == 3:
                        break
                    await out.publish(tree(version + 1), version=version + 1)
                assert seen == [1, 2, 3]

    run(main())


def test_what_cannot_be_published(run, channel):
    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            weights = channel(coordinator)
            async with weights.publisher() as out:
                with pytest.raises(TypeError, match=r"value\['a'\]"):
                    await out.publish({"a": object()}, version=1)
                with pytest.raises(TypeError, match=r"an int from 0 to 2\*\*62, not True"):
                    await out.publish({}, version=True)
                await out.publish(tree(5), version=5)
                for version in (4, 5):
                    with pytest.raises(ValueError, match="the newest is 5"):
                        await out.publish(tree(1), version=version)
                assert out.newest == 5

    run(main())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (type("Module", (), {}), r"of type Module does not travel.*publish its `state_dict\(\)`"),
        (NamedTuple("Pair", [("a", int)]), r"send tuple\(…\) or \._asdict\(\) of it$"),
    ],
    ids=["object", "named tuple"],
)
def test_no_error_of_publish_names_an_option_that_channels_do_not_have(run, channel, kind, text):
    async def main():
        async with (
            aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
            channel(coordinator).publisher() as out,
        ):
            with pytest.raises(TypeError, match=text) as failed:
                await out.publish({"a": kind(*[1][: hasattr(kind, "_fields")])}, version=1)
            assert "pickle" not in str(failed.value)

    run(main())


def test_what_publish_did_when_its_time_was_over(run, channel):
    async def main():
        async with (
            aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
            channel(coordinator).publisher() as out,
        ):
            with pytest.raises(TimeoutError, match="its arrays were still being copied"):
                await out.publish(tree(1), version=1, timeout=0)
            async with out._publishing:
                with pytest.raises(TimeoutError, match="another version was still being"):
                    await out.publish(tree(1), version=1, timeout=0)

    run(main())


def test_a_participant_that_is_entered_again_goes_on(run, channel):
    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            both = channel(coordinator)
            async with both.publisher() as out, both.subscriber() as weights:
                for one in (out, weights):
                    with pytest.raises(RuntimeError, match="'policy' was entered before"):
                        await one.__aenter__()
                await out.publish([2], version=2)
                assert await weights.latest() == (2, [2])
            for one in (out, weights):
                with pytest.raises(RuntimeError, match="'policy' was entered before"):
                    await one.__aenter__()

    run(main())


def test_waiting_for_a_version_takes_nothing(run, channel):
    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            weights = channel(coordinator)
            async with weights.publisher() as out, weights.subscriber() as server:
                waiting = asyncio.ensure_future(server.wait())
                await asyncio.sleep(0)
                await out.publish(tree(3), version=3)
                assert await waiting == 3
                assert await server.wait() == 3  # there is one: it says so again
                waits = [asyncio.ensure_future(server.wait(newer_than=one)) for one in (3, 4, 3)]
                latest = asyncio.ensure_future(server.latest(newer_than=4))
                await out.publish(tree(5), version=5)
                assert await asyncio.gather(*waits) == [5, 5, 5]
                assert (await latest)[0] == 5
                assert list(server._participant.stock.holdings) == [5]
                with pytest.raises(
                    aiodist.CollectiveTimeoutError,
                    match=r"no version over 5 of the channel 'policy' was known within 0\.01 s",
                ):
                    await server.wait(newer_than=5, timeout=0.01)
                nbytes = server.arrived.nbytes
                with pytest.raises(
                    aiodist.CollectiveTimeoutError,
                    match="version 5 of the channel 'policy' was not taken within 0 s:"
                    f" {nbytes} of its {nbytes} bytes are here",
                ):
                    await server.latest(newer_than=4, timeout=0)
                closed = asyncio.ensure_future(server.wait(newer_than=5))
                await asyncio.sleep(0)
            with pytest.raises(aiodist.GroupClosedError, match="was closed here"):
                await closed

    run(main())


def test_who_waits_for_a_later_version_holds_up_nobody(run, channel):
    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            weights = channel(coordinator)
            async with weights.publisher() as out, weights.subscriber() as server:
                await out.publish(tree(3), version=3)
                later = asyncio.ensure_future(server.latest(newer_than=3))
                into = tree(0)
                in_place = server.latest(newer_than=3, into=into, in_place=True)
                written = asyncio.ensure_future(in_place)
                await server.wait()  # both of them wait, too
                version, got = await server.latest()
                assert version == 3
                same(got, tree(3))
                await out.publish(tree(4), version=4)
                assert (await later)[0] == await written == 4
                assert np.array_equal(into["layers"][0], tree(4)["layers"][0])

    run(main())


def test_who_waits_for_a_version_that_nobody_has_holds_up_nobody(run, channel, monkeypatch):
    pauses, pause = asyncio.Semaphore(0), Fetching._pause

    async def noted(self, *news):
        pauses.release()
        return await pause(self, *news)

    monkeypatch.setattr(Fetching, "_pause", noted)

    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            weights = channel(coordinator)
            async with weights.publisher() as out, weights.subscriber() as server:
                await out.publish(tree(3), version=3)
                await server.latest()
                await out.publish(tree(4), version=4, lend=True)
                await out.take_back(4)
                into = tree(0)
                calls = (
                    server.latest(newer_than=3),
                    server.latest(newer_than=3, into=into, in_place=True),
                )
                later = [asyncio.ensure_future(call) for call in calls]
                for _ in later:
                    await pauses.acquire()  # it has looked for version 4
                assert (await server.latest())[0] == 3
                assert not any(call.done() for call in later)
                await out.publish(tree(5), version=5)
                (version, _), written = await asyncio.gather(*later)
                assert version == written == 5
                assert np.array_equal(into["layers"][0], tree(5)["layers"][0])

    run(main())


def test_a_stream_is_closed_where_its_user_leaves_it(run, channel):
    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            weights = channel(coordinator)
            async with weights.publisher() as out, weights.subscriber() as server:
                await out.publish(tree(1), version=1)
                async with aclosing(server.stream(1)) as arrays:
                    async for name, _ in arrays:
                        assert name == "layers.0"
                        break
                assert (await server.latest())[0] == 1

    run(main())


def test_versions_above_the_size_that_is_allowed_do_not_come(run, channel):
    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            stage = channel(coordinator)
            async with stage.publisher() as out, stage.subscriber(max_bytes=60_000) as weights:
                assert weights.arrived is None
                await out.publish(tree(1), version=1)
                got, value = await weights.latest()
                assert got == 1
                same(value, tree(1))
                version, here, nbytes = weights.arrived
                assert (version, here) == (1, nbytes)
                assert 12_000 < nbytes < 60_000
                await out.publish(tree(2, 10_000), version=2)
                for _ in range(2):
                    with pytest.raises(
                        aiodist.MessageTooLargeError, match=r"version 2 takes 12.,... bytes"
                    ):
                        await weights.latest(newer_than=1)
                await weights.wait(newer_than=1)
                with pytest.raises(aiodist.MessageTooLargeError, match="max_bytes is 60,000"):
                    async with aclosing(weights.stream(2)) as arrays:
                        await anext(arrays)
                assert weights.arrived.here == 0
                # Of slices, what is wanted of them counts.
                await out.publish({"w": np.ones(20_000, np.float32)}, version=3)
                arrays = [np.zeros(rows, np.float32) for rows in (19_000, 100)]
                large, small = (
                    {"w": aiodist.Shard(one, (slice(0, len(one)),), (20_000,))} for one in arrays
                )
                with pytest.raises(aiodist.MessageTooLargeError, match=r"3 takes 76,... bytes"):
                    await weights.latest(newer_than=2, into=large)
                assert await weights.latest(newer_than=2, into=small) == 3
                assert (arrays[0].max(), arrays[1].min()) == (0, 1)
                await out.publish(tree(3), version=4)
                assert (await weights.latest(newer_than=3))[0] == 4
            with pytest.raises(ValueError, match="max_bytes is more than 0, not 0"):
                stage.subscriber(max_bytes=0)
            for wrong in ("a", 1.5, True):
                with pytest.raises(TypeError, match="max_bytes is a number of bytes, an int, not"):
                    stage.subscriber(max_bytes=wrong)

    run(main())


def test_hosts_acknowledge_a_version(run, channel):
    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            stage = channel(coordinator)
            async with stage.publisher() as out, stage.subscriber() as weights:
                await out.publish(tree(1), version=1)
                async with aclosing(out.acknowledged(1)) as counts:
                    waiting = asyncio.ensure_future(anext(counts))
                    await weights.acknowledge(2)
                    await weights.acknowledge(1, "other bytes")
                    assert not waiting.done()
                    await weights.acknowledge(1)
                    assert await waiting == 1
                wrong = [((one,), TypeError) for one in ("7", 1.5, None, True, np.float64(5))]
                wrong += [((-1,), ValueError), ((1, "x" * 257), ValueError)]
                wrong += [((1, one), TypeError) for one in (5, None, b"x")]
                for arguments, error in wrong:
                    match = rf"from 0 to 2\*\*62, not|content is a str of at most {MAX_NAME} char"
                    with pytest.raises(error, match=match):
                        await weights.acknowledge(*arguments)
                    with pytest.raises(error, match=match):
                        await anext(out.acknowledged(*arguments))

    run(main())


@pytest.mark.parametrize(
    "tree", [{1: np.ones(1), "1": np.zeros(1)}, {"1": {"b": np.ones(1)}, "1.b": np.zeros(1)}]
)
def test_arrays_of_one_name_are_not_streamed(run, channel, tree):
    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            both = channel(coordinator)
            async with both.publisher() as out, both.subscriber() as weights:
                await out.publish(tree, version=1)
                assert len((await weights.latest())[1]) == 2
                with pytest.raises(ValueError, match="2 arrays of this version have the name '1"):
                    await anext(weights.stream(1))
                with pytest.raises(ValueError, match="2 arrays of this version have the name '1"):
                    await weights.changed(1, since=0)

    run(main())


def test_arguments_of_a_subscriber_that_make_no_sense(run, channel):
    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            both = channel(coordinator)
            async with both.publisher() as out, both.subscriber() as weights:
                await out.publish({"w": np.ones(1)}, version=1)
                for options in ({"in_place": True}, {"convert": True}):
                    with pytest.raises(ValueError, match="say how `into` is written"):
                        await weights.latest(**options)
                for call in (weights.latest, weights.wait):
                    for wrong in (None, "a"):
                        with pytest.raises(TypeError, match=r"newer_than is the number.*not"):
                            await call(newer_than=wrong)
                    await call(newer_than=np.int64(0))
                with pytest.raises(TypeError, match=r"an int from 0 to 2\*\*62, not '1'"):
                    await anext(weights.stream("1"))
                with pytest.raises(TypeError, match="version to compare with, not 'x'"):
                    await anext(weights.stream(1, changed_since="x"))
                with pytest.raises(TypeError, match="version to compare with, not None"):
                    await weights.changed(1, since=None)

    run(main())


def test_only_arrays_that_have_changed(run, channel):
    def version(number, **more):
        arrays = {"same": np.full(400_000, np.nan), "new": np.zeros(400_000, np.int32)}
        arrays["new"][-1] = number
        return {"layers": [arrays, {"t": np.full(3, number // 2)}], **more}

    async def names(weights, number, **options):
        async with aclosing(weights.stream(number, **options)) as arrays:
            return [name async for name, _ in arrays]

    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            stage = channel(coordinator)
            async with stage.publisher(deltas=True) as out, stage.subscriber() as weights:
                everything = ["layers.0.same", "layers.0.new", "layers.1.t"]
                for number in range(2, 5):
                    await out.publish(version(number), version=number)
                    await weights.wait(newer_than=number - 1)
                    if number == 2:
                        # It has had no version before.
                        assert await names(weights, 2, changed_since=1) == everything
                    elif number == 3:
                        assert await names(weights, 3, changed_since=2) == everything[1:2]
                        assert await weights.changed(3, since=2) == set(everything)  # it is gone
                    else:
                        assert await weights.changed(4, since=3) == set(everything[1:])
                        assert await names(weights, 4, changed_since=4) == []
                # Another tree.
                await out.publish(version(4, x=1), version=5)
                await weights.wait(newer_than=4)
                assert await names(weights, 5, changed_since=4) == everything
                with pytest.raises(ValueError, match="version 4 is not available"):
                    await weights.changed(4, since=3)

    run(main())
