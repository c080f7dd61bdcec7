"""Federated learning: clients keep their images, come for a round, and go.

    python examples/federated/digits.py

Each client has images of five kinds of handwritten digits, which no other process sees. In each
round some clients come. They take the weights, learn from their images, and give the difference.
Connections are encrypted by TLS, and a client needs a certificate and the token. This program makes
both for the demonstration. In earnest, start clients on their own machines, with AIODIST_TOKEN,
AIODIST_TLS_CA, AIODIST_TLS_CERT and AIODIST_TLS_KEY in their environment::

    python examples/federated/digits.py tls://10.0.0.1:29500 3
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import secrets
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import aiodist

CLIENTS, COME, ROUNDS, STEPS = 10, 5, 12, 50
"""Clients that there are, and that are here at a time; rounds; steps of a client in a round."""
RULES: dict[str, Any] = {"quorum": 3, "grace": 1.0, "transports": ("tcp",)}
"""A round needs three clients, and waits a second for others that are here. All that they send goes
over TLS, as between machines."""
TESTED = 360
"""Images that no client has."""

Array = NDArray[np.float64]


@functools.cache
def images() -> tuple[Array, Array]:
    """Rows of pixels in 0..1 with a 1 for the bias, and rows with a 1 for the digit they show."""
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    return np.hstack([pixels / 16, np.ones((len(pixels), 1))]), np.eye(10)[digits]


def own(number: int) -> tuple[Array, Array]:
    """The images of a client: every fifth image of five digits."""
    rows, digits = [one[TESTED:] for one in images()]
    kinds = (digits.argmax(axis=1) - number) % CLIENTS
    mine = (kinds < 5) & (np.arange(len(rows)) % 5 == kinds)
    return rows[mine], digits[mine]


def accuracy(weights: Array) -> float:
    """The share of the tested images that are recognised."""
    rows, digits = [one[:TESTED] for one in images()]
    return float(((rows @ weights).argmax(axis=1) == digits.argmax(axis=1)).mean())


async def take_part(address: str, number: int) -> aiodist.Averaged:
    """One visit of a client."""
    rows, digits = own(number)
    name = f"client {number}"
    async with aiodist.averager("digits", address=address, name=name, **RULES) as averager:
        begun = (await averager.state()).tree
        weights = begun.copy()
        for _ in range(STEPS):
            scores = np.exp(rows @ weights)
            scores /= scores.sum(axis=1, keepdims=True)
            weights -= 0.5 * rows.T @ (scores - digits) / len(rows)
        return await averager.average(weights - begun, weight=len(rows))


async def organise(address: str, rounds: int) -> Array:
    """Keep the weights for clients that come. It has no images, so its weight is 0."""
    weights = np.zeros((65, 10))
    async with aiodist.averager("digits", address=address, name="organiser", **RULES) as averager:
        for _ in range(rounds):
            await averager.publish_state(weights)
            found = await averager.average(np.zeros_like(weights), weight=0.0)
            weights += found.value
            came = [one for one, w in zip(found.contributors, found.weights, strict=True) if w]
            print(f"round {found.round}: {', '.join(sorted(came))}: {accuracy(weights):.0%}")
    return weights


def certificates(folder: Path) -> dict[str, str]:
    """An authority's certificate, and one for 127.0.0.1: settings for the environment."""

    def openssl(command: str) -> None:
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)

    curve = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    openssl(f"req -x509 {curve} -days 2 -subj /CN=authority -keyout ca.key -out ca.pem")
    openssl(f"req -new {curve} -subj /CN=member -keyout member.key -out member.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    openssl("x509 -req -in member.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2"
            " -extfile names -out member.pem")  # fmt: skip
    files = {"CA": "ca.pem", "CERT": "member.pem", "KEY": "member.key"}
    return {f"AIODIST_TLS_{name}": str(folder / file) for name, file in files.items()}


def coordinator() -> aiodist.Coordinator:
    """One that lets members in that have a certificate of the authority, and the token."""
    context = ssl.create_default_context(
        ssl.Purpose.CLIENT_AUTH, cafile=os.environ["AIODIST_TLS_CA"]
    )
    context.load_cert_chain(os.environ["AIODIST_TLS_CERT"], os.environ["AIODIST_TLS_KEY"])
    context.verify_mode = ssl.CERT_REQUIRED
    return aiodist.Coordinator("tls://127.0.0.1:0", ssl=context)


async def visits(address: str, numbers: Sequence[int]) -> None:
    """Clients that come one after the other, with pauses."""
    while True:
        await take_part(address, random.choice(numbers))
        await asyncio.sleep(random.random() / 2)


async def demonstrate() -> None:
    """The organiser, while clients come and go: all in this process."""
    async with coordinator() as server, asyncio.TaskGroup() as tasks:
        clients = [
            tasks.create_task(visits(server.address, range(first, CLIENTS, COME)))
            for first in range(COME)
        ]
        await organise(server.address, ROUNDS)
        for one in clients:
            one.cancel()


def main() -> None:
    if len(sys.argv) == 3:
        asyncio.run(visits(sys.argv[1], [int(sys.argv[2])]))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(certificates(Path(folder)), AIODIST_TOKEN=secrets.token_hex())
        asyncio.run(demonstrate())


if __name__ == "__main__":
    main()
