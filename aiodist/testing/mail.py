"""Messages of random programs: sender, receiver, and the way to receive them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

SIZES = (0, 1, 1000, 7000, 30_000, 120_000)
"""Elements of 8 bytes: eager messages, and large ones that are pulled in pieces."""
LONG = 100.0
"""Seconds after which a receive that should have found its message has failed."""


@dataclass(frozen=True)
class Letter:
    """One message. `number` is unique. Messages of one (source, tag) must arrive in its order."""

    number: int
    src: int
    dst: int
    tag: str | int
    size: int


@dataclass(frozen=True)
class Mail:
    """The messages of a program.

    `wild`: receives name no source ("source"), a list of sources ("some"), neither source nor tag
    ("all"), or both ("no"). `patience`: seconds until a receive is given up and posted again.
    `cancelled`: how often it is given up at once. `late`: seconds before a rank begins to receive.
    `plain`: values are single arrays, received into given memory.
    """

    messages: tuple[Letter, ...]
    wild: str
    patience: float
    cancelled: float
    late: float
    plain: bool


def random_mail(chooser: Random, size: int, *, calm: bool, narrow: bool) -> Mail:
    """Choose messages among `size` ranks."""
    count = chooser.choice([0, 10, 40])
    wild = chooser.choice(["no", "no", "source", "some", "all"])
    flood = not narrow and chooser.random() < 0.1
    sizes = (7000,) if flood else SIZES[:3] if narrow or chooser.random() < 0.5 else SIZES
    tags: tuple[str | int, ...] = ("a", "b", 3)
    return Mail(
        tuple(
            Letter(
                number,
                chooser.randrange(size),
                chooser.randrange(size),
                chooser.choice(tags),
                chooser.choice(sizes),
            )
            for number in range(100 if flood else count)
        ),
        wild,
        patience=LONG if calm else chooser.choice([0.002, 0.1, LONG]),
        cancelled=0.0 if calm else chooser.choice([0.0, 0.2]),
        late=chooser.choice([0.0, 0.0, 0.3]),
        plain=wild == "no" and chooser.random() < 0.6,
    )
