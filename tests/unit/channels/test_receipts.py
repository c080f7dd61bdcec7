"""Hosts say which version they have."""

from __future__ import annotations

import msgpack
import pytest

from aiodist.channels import directory, receipts
from aiodist.channels.receipts import Receipt


def test_the_last_receipt_of_a_host_counts() -> None:
    found: list[Receipt] = []
    for new in [Receipt(7, "x", "a"), Receipt(7, "x", "b"), Receipt(7, "x", "a")]:
        found = receipts.added(found, new)
    assert receipts.hosts(found, 7, "x") == {"a", "b"}
    # The numbers began anew: the same number with other bytes is another version.
    assert receipts.hosts(found, 7, "y") == set()
    found = receipts.added(found, Receipt(0, "y", "a"))
    assert receipts.hosts(found, 7, "x") == {"b"}
    assert receipts.hosts(found, 0, "y") == {"a"}


def test_receipts_are_bounded() -> None:
    found = [Receipt(1, "x", f"h{at}") for at in range(receipts.MOST)]
    after = receipts.added(found, Receipt(1, "x", "new"))
    assert len(after) == receipts.MOST
    assert after[0].host == "h1"
    assert after[-1].host == "new"


@pytest.mark.parametrize("wrong", [[7, 5, "b"], [7, "x"], 3, [7, "x" * 257, "b"]])
def test_a_bad_receipt_hides_no_other(wrong: object) -> None:
    good = Receipt(7, "x", "a")
    assert receipts.read(directory.packed([good])) == [good]
    assert receipts.read(msgpack.packb([wrong, [7, "x", "a"], wrong])) == [good]


@pytest.mark.parametrize("value", [None, b"", msgpack.packb(5), b"\xc1"])
def test_what_is_no_list_has_no_receipts(value: bytes | None) -> None:
    assert receipts.read(value) == []
