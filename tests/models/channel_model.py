"""The model of a channel of weights: its sizes, and the rules that are left out of it."""

from __future__ import annotations

from dataclasses import dataclass

from checking import Model


@dataclass(frozen=True)
class Size:
    """How many publishers, one after the other, and versions there are, for two subscribers, and
    how often what fails."""

    publishers: int
    versions: int
    kills: int
    restarts: int
    damages: int = 0
    has_deltas: bool = False
    durable: bool = True
    """Whether the coordinator has a state file."""

    def defines(self) -> list[str]:
        given = {
            "S": 2,
            "PUBS": self.publishers,
            "V": self.versions,
            "KILLS": self.kills,
            "RESTARTS": self.restarts,
            "DAMAGES": self.damages,
        }
        options = [f"-D{name}={value}" for name, value in given.items()]
        return options + ["-DDELTAS"] * self.has_deltas + ["-DDURABLE"] * self.durable


SIZES = [
    Size(1, 1, 1, 1, 1),
    Size(1, 1, 1, 2, durable=False),
    Size(1, 2, 1, 0),
    Size(1, 3, 0, 0, has_deltas=True),
    Size(2, 1, 1, 0),
    Size(2, 1, 1, 1, durable=False),
]
"""The sizes for which every state is looked at."""

FAULTS = {
    "NUMBERS_NOT_COMPARED": (
        "a version is listed without comparing its number",
        Size(2, 1, 1, 0),
    ),
    "NOT_TOLD_AGAIN": (
        "a restarted coordinator is not told which versions there are",
        Size(1, 1, 0, 1),
    ),
    "SEAT_NOT_KEPT": (
        "a publisher does not list itself again after a restart",
        Size(1, 1, 0, 1),
    ),
    "NOT_LISTED_AGAIN": (
        "a subscriber does not list its version again after a restart",
        Size(1, 1, 1, 1),
    ),
    "NOT_CHECKED": ("parts are not checked", Size(1, 1, 0, 0, damages=1)),
    "OLDER_GIVEN": (
        "a version may be older than the one that was given before",
        Size(1, 2, 0, 0),
    ),
    "ANY_BASE": (
        "the base of a difference is not compared with what the subscriber has",
        Size(1, 3, 0, 0, has_deltas=True),
    ),
    "TAKES_FROM_BEHIND": (
        "a subscriber takes a version from one that came later",
        Size(1, 1, 0, 0),
    ),
    "STAYS_IN_LINE": (
        "a subscriber keeps its place in line, though only one behind it can help",
        Size(1, 1, 1, 0),
    ),
    "KEEPS_RECEIVERS": (
        "a subscriber that finds no source does not send its receivers away",
        Size(1, 2, 1, 0),
    ),
}
"""Rules that are left out of the model: what each means, and a size in which that is found."""

CHANNEL = Model("channel.pml", SIZES, FAULTS)
