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
