"""The key-value store of a group."""

from __future__ import annotations

from typing import Any

import pytest

from aiodist.membership.effects import SendMessage
from aiodist.membership.store import KeyValueStore
from aiodist.wire.messages import (
    Failed,
    Failure,
    Result,
    StoreAdd,
    StoreCancel,
    StoreChanged,
    StoreCompareSet,
    StoreDelete,
    StoreGet,
    StoreSet,
    StoreWait,
    StoreWatch,
)


class Bench:
    def __init__(self, **limits: int) -> None:
        self.ttls: dict[str, float | None] = {}
        self.store = KeyValueStore(self.ttls.__setitem__, **limits)

    def ask(self, message: Any, conn: int = 1, request: int = 1) -> Any:
        """The reply; what others are told is in `told`."""
        sends = self.store.handle(conn, request, message)
        mine = [one.message for one in sends if (one.conn, one.request) == (conn, request)]
        self.told = [one for one in sends if (one.conn, one.request) != (conn, request)]
        return mine[0].value if mine and isinstance(mine[0], Result) else (mine or [None])[0]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def refused(reply: Any, kind: Failure, text: str) -> bool:
    return isinstance(reply, Failed) and reply.kind is kind and text in reply.text


def test_values_are_set_got_and_deleted(bench: Bench) -> None:
    assert bench.ask(StoreGet("k")) is None
    assert bench.ask(StoreSet("k", b"one")) is None
    assert bench.ask(StoreGet("k")) == b"one"
    assert list(bench.store.values) == ["k"]
    assert bench.store.nbytes == 4
    bench.ask(StoreSet("k", b""))
    assert bench.ask(StoreGet("k")) == b""
    assert bench.store.nbytes == 1
    assert bench.ask(StoreDelete("k")) is True
    assert bench.ask(StoreDelete("k")) is False
    assert bench.store.nbytes == 0


def test_adding_counts_in_decimal(bench: Bench) -> None:
    assert bench.ask(StoreAdd("n", 5)) == 5
    assert bench.ask(StoreAdd("n", -7)) == -2
    assert bench.ask(StoreGet("n")) == b"-2"
    bench.ask(StoreSet("n", b"40"))
    assert bench.ask(StoreAdd("n", 2)) == 42


@pytest.mark.parametrize("value", [b"", b"x", b" 1", b"1_0", b"1" * 40, b"x" * 2000])
def test_adding_to_what_is_no_number_fails(bench: Bench, value: bytes) -> None:
    bench.ask(StoreSet("n", value))
    assert refused(bench.ask(StoreAdd("n", 1)), Failure.NOT_AN_INTEGER, "decimal number in 'n'")
    assert bench.ask(StoreGet("n")) == value


def test_sums_fit_into_64_bits(bench: Bench) -> None:
    bench.ask(StoreAdd("n", 2**63 - 1))
    assert refused(bench.ask(StoreAdd("n", 1)), Failure.NOT_AN_INTEGER, "over 64 bits")
    assert bench.ask(StoreAdd("n", -1)) == 2**63 - 2


def test_compare_set_sets_only_what_was_expected(bench: Bench) -> None:
    assert bench.ask(StoreCompareSet("k", b"", b"no")) is False
    assert bench.ask(StoreCompareSet("k", None, b"first")) is True
    assert bench.ask(StoreCompareSet("k", None, b"no")) is False
    assert bench.ask(StoreCompareSet("k", b"first", b"second")) is True
    assert bench.ask(StoreGet("k")) == b"second"


def test_a_wait_ends_when_all_keys_exist_at_once(bench: Bench) -> None:
    bench.ask(StoreSet("a", b""))
    assert bench.ask(StoreWait(("a",)), conn=2, request=9) is None
    assert bench.store.handle(2, 8, StoreWait(("a", "b", "b"))) == []
    bench.ask(StoreDelete("a"))
    bench.ask(StoreSet("b", b""))
    assert bench.told == []
    bench.ask(StoreSet("a", b""))
    assert bench.told == [SendMessage(2, 8, Result(None))]
    bench.ask(StoreSet("a", b""))
    assert bench.told == []


def test_a_watch_sees_every_change_until_it_is_cancelled(bench: Bench) -> None:
    bench.ask(StoreSet("k", b"before"))
    assert bench.store.handle(2, 5, StoreWatch("k")) == [SendMessage(2, 5, Result(None))]
    bench.ask(StoreSet("k", b"1"))
    assert bench.told == [SendMessage(2, 5, StoreChanged("k", b"1"))]
    bench.ask(StoreAdd("k", 1))
    assert bench.told == [SendMessage(2, 5, StoreChanged("k", b"2"))]
    bench.ask(StoreDelete("k"))
    assert bench.told == [SendMessage(2, 5, StoreChanged("k", None))]
    bench.ask(StoreSet("other", b""))
    assert bench.told == []
    assert bench.store.handle(2, 0, StoreCancel(5)) == []
    assert bench.store.handle(2, 0, StoreCancel(5)) == []
    bench.ask(StoreSet("k", b"3"))
    assert bench.told == []


def test_a_reply_precedes_what_its_own_watch_sees(bench: Bench) -> None:
    bench.store.handle(1, 5, StoreWatch("k"))
    sends = bench.store.handle(1, 6, StoreSet("k", b"1"))
    assert sends == [SendMessage(1, 6, Result(None)), SendMessage(1, 5, StoreChanged("k", b"1"))]


def test_a_connection_that_goes_listens_no_more(bench: Bench) -> None:
    bench.store.handle(2, 5, StoreWatch("k"))
    bench.store.handle(2, 6, StoreWait(("k", "j")))
    bench.store.handle(3, 5, StoreWatch("k"))
    bench.store.drop(2)
    bench.store.drop(4)
    bench.ask(StoreSet("k", b""))
    assert [one.conn for one in bench.told] == [3]


def test_a_ttl_is_set_with_each_write_and_called_off(bench: Bench) -> None:
    bench.ask(StoreSet("k", b"1", 5.0))
    assert bench.ttls == {"k": 5.0}
    bench.ask(StoreAdd("k", 1, 7.0))
    assert bench.ttls == {"k": 7.0}
    bench.ask(StoreCompareSet("k", b"2", b"3", 8.0))
    assert bench.ttls == {"k": 8.0}
    bench.ask(StoreSet("k", b"1"))
    assert bench.ttls == {"k": None}
    bench.ask(StoreSet("k", b"1", 5.0))
    bench.ask(StoreDelete("k"))
    assert bench.ttls == {"k": None}


def test_an_expired_key_is_deleted_and_its_watchers_told(bench: Bench) -> None:
    bench.ask(StoreSet("k", b"1", 5.0))
    bench.store.handle(2, 5, StoreWatch("k"))
    assert bench.store.expire("k") == [SendMessage(2, 5, StoreChanged("k", None))]
    assert bench.ask(StoreGet("k")) is None
    assert bench.store.expire("k") == []


def test_clearing_forgets_everything(bench: Bench) -> None:
    bench.ask(StoreSet("k", b"1", 5.0))
    bench.store.handle(2, 5, StoreWatch("k"))
    bench.store.clear()
    assert bench.store.values == {}
    assert bench.store.nbytes == 0
    assert bench.ttls == {"k": None}
    bench.ask(StoreSet("k", b""))
    assert bench.told == []


def test_bytes_are_bounded() -> None:
    bench = Bench(max_bytes=10)
    assert bench.ask(StoreSet("k", b"123456789")) is None
    assert refused(bench.ask(StoreSet("j", b"")), Failure.TOO_LARGE, "limit of 10: delete keys")
    assert refused(bench.ask(StoreSet("k", b"1234567890")), Failure.TOO_LARGE, "to 10 bytes")
    assert bench.ask(StoreGet("k")) == b"123456789"
    assert bench.ask(StoreSet("k", b"1")) is None
    assert bench.ask(StoreSet("é", b"123456")) is None
    assert bench.store.nbytes == 10


def test_keys_are_bounded() -> None:
    bench = Bench(max_keys=1)
    assert bench.ask(StoreSet("k", b"")) is None
    assert refused(bench.ask(StoreSet("j", b"")), Failure.TOO_LARGE, "1 keys, its limit")
    assert bench.ask(StoreSet("k", b"1")) is None


def test_waits_and_watches_are_bounded() -> None:
    bench = Bench(max_pending=1)
    assert bench.ask(StoreWatch("k"), request=1) is None
    assert refused(bench.ask(StoreWait(("j",)), request=2), Failure.TOO_LARGE, "the limit")
    assert refused(bench.ask(StoreWatch("j"), request=1), Failure.INVALID, "already under way")
    assert bench.ask(StoreWatch("j"), conn=2) is None
