"""Reinforcement learning: a trainer publishes its weights, and workers send back what they played.

``python examples/weights/rl.py`` shows it: four workers, of which one is killed; one more is added;
then the trainer is killed and started again. If it runs as root, each of them is on a host of its
own, and the hosts are joined by lines of 20 MB/s. On real hosts, start the parts::

    aiodist coordinator --listen tcp://10.0.0.1:29500
    python examples/weights/rl.py train tcp://10.0.0.1:29500
    python examples/weights/rl.py work tcp://10.0.0.1:29500 0    # and 1, 2, … on other hosts

The policy is a small transformer in bfloat16, which learns to count on from a number. Weights go
through a channel. What was played goes back by messages. The trainer is in a group of two with each
worker, so the loss of one worker does not end the others.

A worker sends a batch only after the trainer has taken the one before, so batches do not pile up.
The trainer drops batches that were played with weights older than `STALEST` versions, and prints
how old the oldest one was that it used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

import aiodist
from aiodist.testing.long_links import LongLine, far_hosts

CHANNEL = "policy"
WORKERS = 5
"""Most workers: the trainer waits for each of them to come."""

BATCHES = 4
"""Batches of each step of the trainer."""

STALEST = 4
"""Batches that were played with weights older than so many versions are dropped."""

GAMES, LENGTH, NUMBERS = 32, 12, 16
"""Games of a batch, moves of a game, and numbers to choose from."""

RATE = 1e-3
"""The learning rate. Runs with large models have some 1e-6, and fewer weights change then."""

LINE = LongLine(rate=20e6, delay=0.005)
"""From each host of the demonstration to the others: bytes a second, and seconds."""


class Policy(nn.Module):
    """Says by its logits which number comes next, for each place of (games, moves) numbers."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.numbers = nn.Embedding(NUMBERS, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) / 10)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.out = nn.Linear(width, NUMBERS)
        self.to(torch.bfloat16)

    def forward(self, moves: torch.Tensor) -> torch.Tensor:
        length = moves.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.bfloat16)
        x = self.numbers(moves) + self.places[:length]
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        logits: torch.Tensor = self.out(x).float()
        return logits


def play(policy: Policy) -> torch.Tensor:
    """A batch of games: the first number is given, the others are what the policy says."""
    moves = torch.randint(NUMBERS, (GAMES, 1))
    with torch.no_grad():
        for _ in range(LENGTH):
            chances = policy(moves)[:, -1].softmax(-1)
            moves = torch.cat([moves, torch.multinomial(chances, 1)], dim=1)
    return moves


def rewards(moves: torch.Tensor) -> torch.Tensor:
    """1 for each move that counts on from the number before, modulo NUMBERS."""
    return (moves[:, 1:] == (moves[:, :-1] + 1) % NUMBERS).float()


def learn(policy: Policy, optimizer: torch.optim.Optimizer, moves: torch.Tensor) -> float:
    """A step of policy gradients (REINFORCE with a baseline); the mean reward."""
    reward = rewards(moves)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-3)
    chosen = policy(moves[:, :-1]).log_softmax(-1).gather(-1, moves[:, 1:, None])[..., 0]
    optimizer.zero_grad()
    (-(advantage * chosen).mean()).backward()
    optimizer.step()
    return float(reward.mean())


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """The share of the elements that are not what they were."""
    elements = sum(one.numel() for one in after.values())
    return sum(int((before[name] != one).sum()) for name, one in after.items()) / elements


class Batch:
    """What a worker has played with the weights of `version`. `taken` is set when the trainer takes
    it, so that the worker may send the next one."""

    def __init__(self, version: int, moves: torch.Tensor) -> None:
        self.version = version
        self.moves = moves
        self.taken = asyncio.Event()


class Trainer:
    """Learns from what workers play, and publishes what it has learned."""

    def __init__(self, address: str, policy: Policy) -> None:
        self.address = address
        self.policy = policy
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE)
        self.version = 0
        self.dropped = 0
        self._sent = 0  # bytes, up to the last version
        self._batches: asyncio.Queue[Batch] = asyncio.Queue()

    async def run(self, last: float = math.inf) -> None:
        """Train until version `last` is published."""
        async with (
            aiodist.publisher(CHANNEL, address=self.address) as out,
            beside(*(self._hear(worker) for worker in range(WORKERS))),
        ):
            await self._begin(out)
            while self.version < last:
                await self._step(out)

    async def _begin(self, out: aiodist.Publisher) -> None:
        """Go on with the newest weights that a worker still has, if there are any."""
        if out.newest is not None:
            weights = self.policy.state_dict()
            async with aiodist.subscriber(CHANNEL, address=self.address) as channel:
                with contextlib.suppress(TimeoutError):
                    found = await channel.latest(into=weights, timeout=10)
                    say(f"trainer: goes on with version {found}")
            self.version = out.newest + 1
        await out.publish(self.policy.state_dict(), version=self.version)

    async def _step(self, out: aiodist.Publisher) -> None:
        batches: list[Batch] = []
        while len(batches) < BATCHES:
            batch = await self._batches.get()
            batch.taken.set()
            if self.version - batch.version <= STALEST:
                batches.append(batch)
            else:
                self.dropped += 1
        before = {name: one.clone() for name, one in self.policy.state_dict().items()}
        moves = torch.cat([batch.moves for batch in batches])
        # In a thread, because the loop has messages to take meanwhile.
        reward = await asyncio.to_thread(learn, self.policy, self.optimizer, moves)
        oldest = max(self.version - batch.version for batch in batches)
        self.version += 1
        await out.publish(self.policy.state_dict(), version=self.version)
        share = changed(before, self.policy.state_dict())
        say(
            f"version {self.version}: reward {reward:.2f}, {share:.1%} of the weights changed,"
            f" oldest batch {oldest} versions old, {self.dropped} dropped,"
            f" {out.bytes_sent - self._sent:,} bytes sent for the version before"
        )
        self._sent = out.bytes_sent

    async def _hear(self, worker: int) -> None:
        """Take batches from a worker, whenever there is one of that number."""

        async def talk(group: aiodist.Group) -> None:
            while True:
                version, moves = await group.recv(src=1, timeout=math.inf)
                batch = Batch(version, moves)
                self._batches.put_nowait(batch)
                await batch.taken.wait()
                await group.send(version, dst=1)

        await meet(self.address, worker, 0, talk)


class Worker:
    """Plays with the newest weights, and sends what it has played."""

    def __init__(self, address: str, number: int, policy: Policy) -> None:
        self.address = address
        self.number = number
        self.policy = policy
        self.version = -1

    async def run(self) -> None:
        """Play until this is cancelled."""
        async with aiodist.subscriber(CHANNEL, address=self.address) as channel:

            async def talk(group: aiodist.Group) -> None:
                while True:
                    if channel.newest is not None and channel.newest > self.version:
                        await self._take(channel)
                    moves = await asyncio.to_thread(play, self.policy)
                    await group.send((self.version, moves), dst=0)
                    await group.recv(src=0, timeout=math.inf)

            await self._take(channel)
            await meet(self.address, self.number, 1, talk)

    async def _take(self, channel: aiodist.Subscriber) -> None:
        into = self.policy.state_dict()
        await channel.wait(newer_than=self.version)
        begun = time.perf_counter()
        self.version = await channel.latest(newer_than=self.version, into=into)
        pause = time.perf_counter() - begun
        say(f"worker {self.number}: version {self.version} after a pause of {1000 * pause:.0f} ms")


async def meet(
    address: str, worker: int, rank: int, talk: Callable[[aiodist.Group], Awaitable[None]]
) -> None:
    """Talk in the group of the trainer and a worker; again in a new one, if either was lost."""
    while True:
        with contextlib.suppress(aiodist.AiodistError):
            name = f"worker {worker}"
            async with aiodist.connect(address, group=name, rank=rank, size=2, timeout=60) as group:
                await talk(group)
        await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def beside(*work: Any) -> AsyncIterator[None]:
    """Do that meanwhile, and end it in the end."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def say(text: str) -> None:
    print(text, flush=True)


class Host(NamedTuple):
    """A host of the demonstration. `prefix`: the beginning of a command that runs there."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()

    def part(self, *words: str) -> Part:
        """A part of the demonstration there: "train ADDRESS" or "work ADDRESS NUMBER"."""
        return Part((*self.prefix, sys.executable, __file__, *words))

    @contextlib.asynccontextmanager
    async def coordinator(self) -> AsyncIterator[str]:
        """A coordinator there; its address."""
        listen = ("--listen", f"tcp://{self.address}:0")
        command = (*self.prefix, sys.executable, "-m", "aiodist_cli", "coordinator", *listen)
        async with Part(command, errors=asyncio.subprocess.DEVNULL) as part:
            async for line in part.lines():
                if line.startswith("listening on "):
                    yield line.removeprefix("listening on ")
                    return
        raise RuntimeError("the coordinator did not start")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts joined by lines. Without root, all of them are this one."""
    with contextlib.ExitStack() as stack:
        found = [Host()] * count
        try:
            far, _ = stack.enter_context(far_hosts(count, LINE))
        except OSError as error:
            say(f"all parts are on this host, because lines cannot be made: {error}")
        else:
            found = [Host(one.address, one.prefix) for one in far]
        yield found


TOKEN = secrets.token_hex()


class Part:
    """A process of the demonstration. `errors`: where its stderr goes."""

    def __init__(self, command: tuple[str, ...], errors: int | None = None) -> None:
        self.command = command
        self.errors = errors

    async def __aenter__(self) -> Part:
        # Over TCP, because parts on one host would map one copy of the weights.
        env = os.environ | {"AIODIST_TRANSPORTS": "tcp", "AIODIST_TOKEN": TOKEN}
        self.process = await asyncio.create_subprocess_exec(
            *self.command, stdout=asyncio.subprocess.PIPE, stderr=self.errors, env=env
        )
        return self

    async def lines(self) -> AsyncIterator[str]:
        """What it says."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            yield line.decode().rstrip()

    async def version(self, wanted: int) -> None:
        """Show what it says, until it has that version, or a newer one."""
        async for line in self.lines():
            say(line)
            match line.split(":")[0].split():
                case ["version", number] if int(number) >= wanted:
                    return
        raise RuntimeError(f"{' '.join(self.command)} has ended before version {wanted}")

    async def show(self) -> None:
        """Show what it says, to its end."""
        async for line in self.lines():
            say(line)

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


async def demonstrate(each: int = 5) -> None:
    """Kill a worker after so many versions, add one after as many more, and then restart the
    trainer."""
    async with contextlib.AsyncExitStack() as stack:
        home, *others = stack.enter_context(hosts(1 + WORKERS))
        address = await stack.enter_async_context(home.coordinator())

        async def worker(number: int) -> Part:
            part = others[number].part("work", address, str(number))
            await stack.enter_async_context(part)
            await stack.enter_async_context(beside(part.show()))
            return part

        first = await worker(0)
        for number in range(1, WORKERS - 1):
            await worker(number)
        async with home.part("train", address) as trainer:
            await trainer.version(each)
            say("worker 0 is killed")
            first.process.kill()
            await trainer.version(2 * each)
            say(f"worker {WORKERS - 1} is added")
            await worker(WORKERS - 1)
            await trainer.version(3 * each)
            say("the trainer is killed")
        async with home.part("train", address) as trainer:
            await trainer.version(4 * each)


def main(words: list[str]) -> None:
    match words:
        case []:
            asyncio.run(demonstrate())
        case ["train", address]:
            asyncio.run(Trainer(address, Policy()).run())
        case ["work", address, number]:
            asyncio.run(Worker(address, int(number), Policy()).run())
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("aiodist").setLevel(logging.ERROR)  # it warns of workers that do not come
    main(sys.argv[1:])
