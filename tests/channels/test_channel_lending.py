"""Arrays that are published where they lie, on simulated hosts and on this one."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
import torch.distributed as dist
from channel_stage import PATIENCE, ChannelStage, next_sign_of_life
from standin import StandinDevice

import aiodist
from aiodist.channels import manifest
from aiodist.channels.holding import Holding
from aiodist.channels.lots import Lot

CHUNK = 1 << 12


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", CHUNK)


def tree(version):
    """Arrays that end within chunks, and between two."""
    return {
        "w": np.full((30, 100), version, np.float32),
        "none": np.empty((0, 2)),
        "b": np.arange(70) + version,
        "c": torch.full((2000,), version, dtype=torch.bfloat16),
        "transposed": np.arange(12.0).reshape(3, 4).T * version,
        "n": version,
    }


def same(got, version):
    expected = tree(version)
    assert got.keys() == expected.keys()
    for key, one in got.items():
        assert bool(np.all(np.asarray(one == expected[key]))), key


@pytest.mark.parametrize("transports", [None, ("tcp",)])
def test_what_is_lent_is_read_where_it_lies(run, transports):
    """On one host, too, where whoever comes second maps the memory of the first."""

    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            options = {"address": coordinator.address, "transports": transports}
            async with (
                aiodist.publisher("policy", **options) as out,
                aiodist.subscriber("policy", **options) as first,
                aiodist.subscriber("policy", **options) as second,
            ):
                params = tree(1)
                await out.publish(params, version=1, lend=True)
                holding = out._participant.stock.holdings[1]
                assert np.shares_memory(holding.part(1), params["w"])
                same((await first.latest())[1], 1)
                same((await second.latest())[1], 1)
                memories = [one._participant.stock.holdings[1].memory for one in (first, second)]
                assert [one.is_own for one in memories] == [True, transports is not None]
                w = params["w"]
                into = {"w": aiodist.Shard(np.zeros((9, 100)), (slice(5, 14),), w.shape)}
                assert await second.latest(into=into, convert=True) == 1
                assert np.array_equal(into["w"].array, w[5:14])
                await out.take_back(1)
                assert holding.memory is None
                await out.take_back(1)
                for wrong, error in ((-1, ValueError), ("a", TypeError)):
                    with pytest.raises(error, match="a version is an int"):
                        await out.take_back(wrong)
                await out.publish(tree(2), version=2)
                same((await first.latest(newer_than=1))[1], 2)

    run(main())


@pytest.mark.parametrize("sliced", [False, True])
def test_what_is_written_meanwhile_is_given_to_nobody(sliced):
    stage = ChannelStage(2)

    async def publish():
        async with stage.publisher() as out:
            await out.publish(tree(1), version=1)
            params = tree(2)
            await out.publish(params, version=2, lend=True)
            params["w"][20] = 7
            await stage.done.wait()

    async def take():
        await asyncio.sleep(1)
        async with stage.subscriber() as weights:
            into = tree(0)
            into["c"] = into["c"].float()
            assert weights.newest == 2
            assert await weights.latest(into=into if sliced else tree(0), convert=sliced) == 1
            with pytest.raises(aiodist.CollectiveTimeoutError):
                await weights.latest(newer_than=1, timeout=3)
            assert not sliced or (into["w"] == 1).all()
        stage.done.set()

    stage.play({0: publish(), 1: take()})


@pytest.mark.long
@pytest.mark.parametrize("sliced", [False, True])
def test_taking_back_ends_what_is_being_given(sliced, monkeypatch):
    """Who has begun to take it gets no more of it, and waits for the next version."""
    stage = ChannelStage(3)
    begun, back = asyncio.Event(), asyncio.Event()
    for cls in (Holding, Lot):

        def noted(coming, *piece, fill=cls.fill):
            fill(coming, *piece)
            begun.set()

        monkeypatch.setattr(cls, "fill", noted)

    async def publish():
        async with stage.publisher() as out:
            params = {"w": np.ones((400, 1000), np.float32)}
            await out.publish(params, version=1, lend=True)
            await begun.wait()
            await out.take_back(1)
            params["w"][:] = 9
            back.set()
            await out.publish(params, version=2, lend=True)
            await stage.done.wait()

    async def latest(weights, version):
        into = {"w": np.zeros((400, 1000), np.float64 if sliced else np.float32)}
        assert await weights.latest(into=into, convert=sliced, timeout=60) == version
        assert (into["w"] == 9).all()

    async def first():
        async with stage.subscriber() as weights:
            await latest(weights, 2)
            assert back.is_set()
            assert 1 not in {key[0] for key in weights._participant.stock.lots}
            await stage.done.wait()

    async def second():
        await back.wait()
        async with stage.subscriber() as weights:
            await asyncio.sleep(1)
            await latest(weights, 2)
        stage.done.set()

    stage.play({0: publish(), 1: first(), 2: second()})


def test_a_version_that_is_lent_again_meanwhile_is_taken_back_again():
    stage = ChannelStage(1)

    async def main():
        async with stage.publisher() as out:
            params = tree(1)
            await out.publish(params, version=1, lend=True)
            first = out._participant.stock.holdings[1]
            with first:  # as a receiver does
                taking = asyncio.ensure_future(out.take_back(1))
                await asyncio.sleep(0.1)
                await out.publish(params, version=1, lend=True)
                second = out._participant.stock.holdings[1]
            await taking
            assert not second.gone.is_set()
            with second:
                taking = asyncio.ensure_future(out.take_back(1))
                await asyncio.sleep(0.1)
                taking.cancel()
                await out.publish(params, version=1, lend=True)
                taking = asyncio.ensure_future(out.take_back(1))
                await asyncio.sleep(0.1)
                assert not taking.done()  # it waits for the arrays that were lent before, too
            await taking
            assert second.gone.is_set()
            assert not out._lent

    stage.play({0: main()})


def test_arrays_on_devices_go_through_the_host(run):
    async def main():
        device, other = StandinDevice(), StandinDevice()
        try:
            async with (
                aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator,
                aiodist.publisher("policy", address=coordinator.address) as out,
                aiodist.subscriber("policy", address=coordinator.address) as weights,
            ):
                w = device.put(np.arange(12.0).reshape(3, 4))
                params = {"w": w, "t": [w.T, np.ones(2)], "o": other.put(np.ones(3, np.int32))}
                await out.publish(params, version=1)
                device.fill(w, 5.0)  # it may change already
                _, got = await weights.latest()
                assert np.array_equal(got["w"], np.arange(12.0).reshape(3, 4))
                assert np.array_equal(got["t"][0], got["w"].T)
                assert np.array_equal(got["o"], [1, 1, 1])
        finally:
            device.close()
            other.close()

    run(main())


def test_dtensors_are_the_parts_that_their_placements_give(run):
    """Published by one share, and wanted in another."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        own = torch.arange(8.0).reshape(2, 4)
        held = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
        wanted = DTensor.from_local(torch.zeros(4, 2), mesh, [Shard(1)], run_check=False)
    finally:
        dist.destroy_process_group()

    async def main():
        async with aiodist.Coordinator("tcp://127.0.0.1:0") as coordinator:
            address = coordinator.address
            async with (
                aiodist.publisher("policy", address=address, part=(0, 2)) as one,
                aiodist.publisher("policy", address=address, part=(1, 2)) as other,
                aiodist.subscriber("policy", address=address) as weights,
            ):
                await other.publish({"w": held}, version=1)
                rest = torch.arange(8.0).reshape(2, 4) + 8
                await one.publish({"w": aiodist.Shard(rest, slice(2), (4, 4))}, version=1)
                assert await weights.latest(into={"w": wanted}) == 1
                assert torch.equal(wanted.to_local(), torch.cat([rest, own])[:, 2:])

    run(main())


@pytest.mark.parametrize("way", ["timeout", "cancel", "close"])
def test_what_cannot_be_published_is_taken_back_meanwhile(way):
    """The call fails for its own reason, and not because the version is gone from here already."""
    stage = ChannelStage(1)
    errors = {
        "timeout": aiodist.CollectiveTimeoutError,
        "cancel": asyncio.CancelledError,
        "close": aiodist.GroupClosedError,
    }

    async def main():
        async with stage.publisher() as out:
            params = tree(1)
            await next_sign_of_life(out._participant)  # then it publishes without asking before
            stage.sim.restart_coordinator(4 * PATIENCE)
            timeout = PATIENCE if way == "timeout" else None
            publishing = asyncio.ensure_future(
                out.publish(params, version=1, lend=True, timeout=timeout)
            )
            await asyncio.sleep(PATIENCE / 4)
            assert 1 in out._participant.stock.holdings
            if way == "close":
                await out.__aexit__(None, None, None)
            else:
                await out.take_back(1)
            if way == "cancel":
                publishing.cancel()
            with pytest.raises(errors[way]):
                await publishing

    stage.play({0: main()})
