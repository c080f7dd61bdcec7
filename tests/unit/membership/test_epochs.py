"""Numbers of epochs."""

from __future__ import annotations

from aiodist.membership.epochs import Epochs


def test_epochs_of_a_name_only_grow() -> None:
    epochs = Epochs(remembered=2)
    assert [epochs.take("a"), epochs.take("a"), epochs.take("b")] == [1, 2, 1]
    assert epochs.take("c") == 1  # "a" is forgotten: its 2 is the floor for new names from now on
    assert epochs.take("d") == 3
    assert epochs.take("a") == 3
    assert epochs.take("a") == 4


def test_epochs_start_above_the_floor() -> None:
    epochs = Epochs()
    epochs.observe("", 7)
    assert epochs.floor == 7
    assert epochs.take("a") == 8


def test_a_late_member_of_a_forgotten_name_does_not_bring_back_old_epochs() -> None:
    epochs = Epochs(remembered=1)
    assert [epochs.take("a") for _ in range(3)] == [1, 2, 3]
    epochs.take("b")
    epochs.observe("a", 1)  # a member comes back whose group has gone on without it
    assert epochs.take("a") > 3
