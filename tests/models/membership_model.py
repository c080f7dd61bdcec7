"""The model of the membership protocol: its sizes, and the rules that are left out of it."""

from __future__ import annotations

from dataclasses import dataclass

from checking import Model


@dataclass(frozen=True)
class Size:
    """How many members and joiners there are, and how often what fails."""

    members: int
    joiners: int
    kills: int
    cuts: int
    restarts: int
    rulings: int = 0
    durable: bool = True
    """Whether the coordinator has a state file."""
    epochs: int = 2

    def defines(self) -> list[str]:
        given = {
            "N": self.members,
            "J": self.joiners,
            "KILLS": self.kills,
            "CUTS": self.cuts,
            "RESTARTS": self.restarts,
            "RULINGS": self.rulings,
            "EPOCHS": self.epochs,
        }
        return [f"-D{name}={value}" for name, value in given.items()] + ["-DDURABLE"] * self.durable


SIZES = [
    Size(2, 0, 1, 2, 2, 1),
    Size(2, 1, 1, 1, 1),
    Size(3, 0, 1, 1, 1),
    Size(2, 0, 1, 2, 1, durable=False),
    Size(2, 1, 1, 1, 1, durable=False),
    Size(3, 0, 1, 0, 1, durable=False),
]
"""The sizes for which every state is looked at."""

FAULTS = {
    "NO_FENCE": ("a member that was ruled lost may come back", Size(2, 0, 0, 1, 0, 1)),
    "LOSS_NOT_TOLD": ("a loss is not told to the other members", Size(2, 0, 1, 0, 0)),
    "LOSS_NOT_LEARNED": (
        "what a returning member knows of losses is not taken over",
        Size(3, 0, 0, 0, 1, 1, durable=False),
    ),
    "ABSENT_VOTERS": (
        "a vote is decided while a voter may still come back",
        Size(3, 0, 1, 0, 1),
    ),
    "ONE_YES": ("one vote for yes is enough", Size(3, 0, 1, 0, 0)),
    "OUTCOME_FORGOTTEN": (
        "the outcome of a vote is not remembered for a voter that asks again",
        Size(2, 0, 0, 1, 0),
    ),
    "OUTCOME_NOT_LEARNED": (
        "outcomes that returning members have heard are not learned",
        Size(2, 0, 0, 0, 1),
    ),
    "VIEW_NOT_TOLD_AGAIN": (
        "a member that missed the next view is not told it",
        Size(2, 0, 0, 1, 0),
    ),
    "OLD_EPOCH": (
        "a member of an older epoch is let in, though the group went on without it",
        Size(2, 0, 0, 1, 0, 1),
    ),
    "END_OF_REPLACED": (
        "the end of a connection that was replaced counts as the death of its member",
        Size(2, 0, 0, 1, 0),
    ),
    "EPOCHS_ANEW": ("the numbers of epochs begin anew after a group ended", Size(2, 1, 2, 0, 0)),
    "FORMS_EARLY": (
        "a coordinator that lost its memory forms groups before members can come back",
        Size(2, 1, 0, 0, 1, durable=False),
    ),
}
"""Rules that are left out of the model: what each means, and a size in which that is found."""

MEMBERSHIP = Model("membership.pml", SIZES, FAULTS)
