"""Channels as backends of vLLM and verl, without models and Ray's actors: with `make integrations`
on the Python files of their packages, else on what they document (vllm_standin.py and
verl_standin.py). See docs/weights.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import sys
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cached_property
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import aiodist
from aiodist.threads.engine import engine

ROOT = Path(__file__).parents[2]

# Theirs, while they are imported.
pytestmark = [pytest.mark.filterwarnings("ignore::Warning"), pytest.mark.timeout(300)]


def standin(project: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what stands for a package, unless it is installed."""
    if importlib.util.find_spec(project) is not None:
        return
    path = Path(__file__).with_name(f"{project}_standin.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    for name in module.NAMES:
        monkeypatch.setitem(sys.modules, name, module)
    for name in [one for one in sys.modules if one.startswith(f"aiodist_{project}")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a coordinator, which lives where these backends have their channels."""
    coordinator = aiodist.Coordinator("tcp://127.0.0.1:0", token="secret")
    engine().wait_for(coordinator.__aenter__())
    monkeypatch.setenv("AIODIST_TOKEN", "secret")
    yield coordinator.address
    engine().wait_for(coordinator.__aexit__(None, None, None))


def tensors(version: int) -> dict[str, torch.Tensor]:
    return {
        "layers.0.weight": torch.full((300, 40), version, dtype=torch.bfloat16),
        "layers.0.bias": torch.arange(40) + version,
        "layers.1.weight": torch.full((300, 40), version // 4, dtype=torch.bfloat16),
        "layers.1.bias": torch.zeros(40),
        "norm": torch.tensor(version // 4),
    }


def same(got: dict[str, torch.Tensor], version: int) -> None:
    expected = tensors(version)
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)


class Model(torch.nn.Module):
    """What vLLM has loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, torch.Tensor] = {}
        self.asked: list[str] = []
        self.fails = False

    def load_weights(self, weights: Any) -> None:
        self.asked = []
        for name, tensor in weights:
            self.asked.append(name)
            self.loaded[name] = tensor
            if self.fails:
                raise RuntimeError("out of memory")


class Client:
    """Calls the workers as vLLM does, which is asked by HTTP."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.said: list[Any] = []

    def _all(self, method: str, *words: Any) -> None:
        self.said.append((method, *json.loads(json.dumps(words))))
        for one in self.workers:
            getattr(one, method)(*self.said[-1][1:])

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.said.append(json.loads(json.dumps(info)))
        for one in self.workers:
            one.init_transfer_engine(one.parse_init_info(self.said[-1]))

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, info: dict[str, Any]) -> None:
        self._all("update_weights", info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update")
        self.said.append(weight_version)


def test_vllm_loads_what_the_trainer_says(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    standin("vllm", monkeypatch)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["vllm.general_plugins"].items()
    register = EntryPoint(name, value, "vllm.general_plugins").load()
    register()
    register()
    from vllm.distributed.weight_transfer.base import WeightSource
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    from aiodist_vllm.trainer import TrainerInfo

    # How vLLM puts tensors into a model needs one of its models: here it is asked to, in order.
    asked: list[str] = []
    reload, validation = ModuleType("reload"), ModuleType("mtp_validation")
    reload.initialize_layerwise_reload = lambda model: asked.append("begin")
    reload.finalize_layerwise_reload = lambda model, config: asked.append("end")
    validation.disable_mtp_completeness_check = contextlib.nullcontext
    for module in (reload, validation):
        name = f"vllm.model_executor.model_loader.{module.__name__}"
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    if not torch.accelerator.is_available():
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)

    class Source(WeightSource):
        version = 1
        gathered = 0

        @cached_property
        def metadata(self) -> list[Any]:
            return []

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            self.gathered += 1
            yield from tensors(self.version).items()

    def away(info: dict[str, Any]) -> None:
        raise ConnectionError("vLLM is not up yet")

    config = SimpleNamespace(parallel_config=None, model_config=None)
    models = [Model(), Model()]
    workers = [
        WeightTransferEngineFactory.create_engine(
            SimpleNamespace(backend="aiodist"), config, torch.device("cpu"), model
        )
        for model in models
    ]
    client, source = Client(workers), Source()
    begin = WeightTransferTrainerFactory.trainer_init
    info = TrainerInfo("policy", address, rank=0)
    trainer = begin(info, client=client, source=source)
    idle = begin(TrainerInfo("policy", address, rank=1), client=client, source=source)
    assert "secret" not in str(client.said)
    for version in (1, 2):
        source.version = version
        trainer.send_weights()
        idle.send_weights()
        for model in models:
            same(model.loaded, version)
        assert client.said[-1] == str(version - 1)
    assert source.gathered == 4  # by both ranks, as it is an operation of both
    assert asked == ["begin", "begin", "end", "end"] * 2
    with pytest.raises(ValueError, match="version 7 is not available"):
        workers[0].update_weights({"version": 7})
    # A layer is left out if nothing in it has changed, and the last load was complete.
    everything = list(tensors(0))
    assert [model.asked for model in models] == [[*everything[:2], "norm"]] * 2
    source.version, models[0].fails = 3, True
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.send_weights()
    models[0].fails = False
    source.version = 4
    trainer.send_weights()
    assert [model.asked for model in models] == [everything] * 2
    for model in models:
        same(model.loaded, 4)
    trainer.shutdown()
    # A trainer that is started again goes on, and vLLM with it, even if vLLM was away at first.
    with monkeypatch.context() as patch, pytest.raises(ConnectionError):
        patch.setattr(client, "init_weight_transfer_engine", away)
        begin(info, client=client, source=source)
    trainer = begin(info, client=client, source=source)
    trainer.send_weights()
    assert client.said[-1] == "4"
    for one in (trainer, idle, *workers):
        one.shutdown()
        one.shutdown()


async def test_verl_sends_to_replicas_that_come_and_go(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin("verl", monkeypatch)
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    importlib.import_module("aiodist_verl")  # what `custom_backend_module` does
    backend = CheckpointEngineRegistry.get("aiodist")
    options = {"bucket_size": 1 << 20, "address": address, "device": "cpu"}
    options |= {"keep": 3, "deltas": False, "max_bytes": 1 << 30}  # not all for both sides

    def new(**more: Any) -> Any:
        return CheckpointEngineRegistry.new("aiodist", **options, **more)

    async def received(one: Any, step: int) -> dict[str, torch.Tensor]:
        return {name: tensor async for name, tensor in one.receive_weights(global_steps=step)}

    async def update(actors: list[Any], rollout: list[Any], version: int) -> None:
        """As verl's CheckpointEngineManager does it."""
        metadata = [one.prepare() for one in (*actors, *rollout)]
        told = backend.build_topology(len(actors), len(rollout), metadata)
        for workers, words in zip((actors, rollout), told, strict=True):
            for at, one in enumerate(workers):
                one.init_process_group(**{name: each[at] for name, each in words.items()})
        gathered = [iter(tensors(version).items()) for _ in actors]
        *_, first, last = await asyncio.gather(
            *(one.send_weights(it) for one, it in zip(actors, gathered, strict=True)),
            *(received(one, version) for one in rollout),
        )
        for it in gathered:
            assert next(it, None) is None  # also the one that sends nothing takes part in that
        same(first, version)
        same(last, version)
        for one in (*actors, *rollout):
            one.finalize()

    actors, rollout = [new(is_master=True), new(is_master=False)], [new(), new()]
    await update(actors, rollout, 1)
    rollout.pop(0).close()
    rollout.append(new())
    await update(actors, rollout, 2)
    actors.pop(0).close()
    actors.insert(0, new(is_master=True))
    await update(actors, rollout, 3)
    for one in (*actors, *rollout):
        one.close()


class Stalled:
    """A channel whose second array does not come. Its stream ends after the first step of the task
    that is made next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stalls: Callable[[], object] = lambda: None
        self.ended = False
        self._patch = monkeypatch

    async def wait(self, **_: object) -> None: ...

    async def stream(self, version: int) -> AsyncIterator[tuple[str, torch.Tensor]]:
        yield "norm", torch.ones(1)
        loop, made = asyncio.get_running_loop(), asyncio.Event()
        create = loop.create_task

        def create_task(*args: Any, **options: Any) -> Any:
            task = create(*args, **options)
            made.set()
            return task

        self._patch.setattr(loop, "create_task", create_task)
        self.stalls()
        try:
            await asyncio.Event().wait()
        finally:
            await made.wait()
            await asyncio.sleep(0)  # the first step of that task
            self.ended = True


def test_an_interrupt_of_vllm_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    standin("vllm", monkeypatch)
    worker = importlib.import_module("aiodist_vllm.worker")
    one = worker.ChannelEngine.__new__(worker.ChannelEngine)
    one.device, one._timeout = torch.device("cpu"), 300.0
    weights = Stalled(monkeypatch)
    weights.stalls = lambda: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        list(one._tensors(weights, 1, None))
    assert weights.ended


async def test_a_cancellation_of_verl_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    standin("verl", monkeypatch)
    one = importlib.import_module("aiodist_verl").ChannelCheckpointEngine(1, device="cpu")
    one._weights = weights = Stalled(monkeypatch)

    async def received() -> list[str]:
        return [name async for name, _ in one.receive_weights()]

    loop, task = asyncio.get_running_loop(), asyncio.create_task(received())
    weights.stalls = lambda: loop.call_soon_threadsafe(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert weights.ended
