"""Control messages: what is sent arrives, and nothing else gets through."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiodist.errors import MessageTooLargeError, ProtocolError
from aiodist.wire import activity, averaging, codec, counts, returning
from aiodist.wire import messages as m
from aiodist.wire import recovery as r
from aiodist.wire.columns import pack_rows
from aiodist.wire.frames import Decoder, Frame, pack_fields
from aiodist.wire.limits import MAX_CONTROL_HEADER, MAX_REPLY, MAX_REQUEST, MAX_VALUE
from aiodist.wire.schema import field_names

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
blobs = st.binary(max_size=40)
ranks = st.integers(0, 4095)
sizes = st.none() | st.integers(1, 4096)
ttls = st.none() | st.floats(1e-3, 1e6)
leaves = st.none() | st.integers(-(2**63), 2**63) | texts | st.lists(blobs, max_size=3)
trees = st.dictionaries(texts, leaves, max_size=3)
addresses = st.lists(names, max_size=3).map(tuple)
epochs = st.integers(1, 2**62)
numbers = st.integers(-(2**63), 2**63 - 1)
infos = st.builds(
    m.MemberInfo,
    rank=ranks,
    id=names,
    host=texts,
    pid=st.integers(0, 2**22),
    name=texts,
    metadata=trees,
    joined_at=st.floats(0, 1e10),
    host_id=texts,
    addresses=addresses,
    lease=st.floats(0.1, 1e6),
)

BY_TYPE: dict[type[m.Message], st.SearchStrategy[Any]] = {
    r.Vote: st.builds(
        r.Vote,
        context=st.binary(max_size=8),
        number=st.integers(0, 2**62),
        purpose=st.sampled_from(r.Purpose),
        flag=st.booleans(),
        members=addresses,
        least=sizes,
        most=sizes,
        refusal=texts,
    ),
    r.GiveUpVote: st.builds(
        r.GiveUpVote, st.binary(max_size=8), st.integers(0, 2**62), st.sampled_from(r.Cause), texts
    ),
    r.BallotResult: st.builds(r.BallotResult, st.booleans(), addresses, epochs),
    r.Void: st.builds(r.Void, st.sampled_from(r.Cause), texts, names, trees),
    r.WatchWaiting: st.builds(r.WatchWaiting),
    r.Waiting: st.builds(r.Waiting, ranks),
    r.NextView: st.builds(
        r.NextView,
        before=st.binary(max_size=16),
        epoch=epochs,
        digest=st.binary(max_size=16),
        gone=st.lists(ranks, max_size=3).map(tuple),
        joined=st.lists(infos, max_size=3).map(tuple),
    ),
    r.Unreachable: st.builds(r.Unreachable, names, texts, st.booleans()),
    m.Hello: st.builds(m.Hello, blobs, names, st.integers(0, 9)),
    m.Challenge: st.builds(m.Challenge, blobs, st.booleans()),
    m.Proof: st.builds(m.Proof, blobs),
    m.Welcome: st.builds(m.Welcome, texts, blobs, texts, st.integers(1, 9), st.booleans()),
    m.Failed: st.builds(m.Failed, st.sampled_from(m.Failure), texts),
    m.JoinRequest: st.builds(
        m.JoinRequest,
        group=names,
        id=names,
        rank=st.none() | ranks,
        size=sizes,
        min_size=sizes,
        max_size=sizes,
        join_window=st.floats(0, 100),
        lease=st.floats(0.05, 100),
        pid=st.integers(0, 2**22),
        host=texts,
        host_id=texts,
        name=texts,
        metadata=trees,
        addresses=addresses,
        run_id=texts,
        store=texts,
    ),
    m.EpochView: st.builds(m.EpochView, names, epochs, st.lists(infos, max_size=3).map(tuple)),
    m.Withdraw: st.just(m.Withdraw()),
    m.Withdrawn: st.builds(m.Withdrawn, texts, st.lists(ranks, max_size=3).map(tuple)),
    m.Leave: st.just(m.Leave()),
    m.Left: st.just(m.Left()),
    m.Renew: st.just(m.Renew()),
    m.MemberLost: st.builds(m.MemberLost, epochs, st.lists(ranks, max_size=3).map(tuple), texts),
    m.MemberLeft: st.builds(m.MemberLeft, epochs, st.lists(ranks, max_size=3).map(tuple)),
    m.Evicted: st.builds(m.Evicted, texts),
    m.Draining: st.just(m.Draining()),
    m.Goodbye: st.just(m.Goodbye()),
    m.ClockRequest: st.just(m.ClockRequest()),
    m.Clock: st.builds(m.Clock, st.floats(0.0, 1e8)),
    m.StatusRequest: st.builds(m.StatusRequest, st.booleans()),
    m.Status: st.builds(m.Status, trees),
    m.Abort: st.builds(m.Abort, texts),
    m.StoreGet: st.builds(m.StoreGet, names),
    m.StoreSet: st.builds(m.StoreSet, names, blobs, ttls),
    m.StoreWait: st.builds(m.StoreWait, addresses),
    m.StoreAdd: st.builds(m.StoreAdd, names, numbers, ttls),
    m.StoreCompareSet: st.builds(m.StoreCompareSet, names, st.none() | blobs, blobs, ttls),
    m.StoreDelete: st.builds(m.StoreDelete, names),
    m.StoreWatch: st.builds(m.StoreWatch, names, st.booleans()),
    m.StoreCancel: st.builds(m.StoreCancel, st.integers(0, MAX_REQUEST)),
    m.StoreChanged: st.builds(m.StoreChanged, names, st.none() | blobs),
    m.Result: st.builds(m.Result, st.none() | st.booleans() | numbers | blobs),
}
views = st.none() | BY_TYPE[m.EpochView]
BY_TYPE[returning.Rejoin] = st.builds(
    returning.Rejoin,
    BY_TYPE[m.JoinRequest],
    ranks,
    epochs.map(lambda epoch: min(epoch, 2**61)),
    st.binary(max_size=16),
    st.lists(ranks, max_size=3).map(tuple),
    st.lists(ranks, max_size=3).map(tuple),
    views,
    st.lists(
        st.builds(r.Heard, st.binary(max_size=8), st.integers(0, 2**62), void=BY_TYPE[r.Void])
        | st.builds(r.Heard, st.binary(max_size=8), st.integers(0, 2**62), BY_TYPE[r.BallotResult]),
        max_size=2,
    ).map(tuple),
)
BY_TYPE[returning.Rejoined] = st.builds(
    returning.Rejoined,
    st.lists(ranks, max_size=3).map(tuple),
    st.lists(ranks, max_size=3).map(tuple),
)
waits = st.builds(
    activity.Wait,
    st.binary(max_size=8),
    names,
    epochs.map(lambda epoch: min(epoch, 2**61)),
    names,
    texts,
    st.none() | st.integers(0, 2**62),
    st.floats(0, 100),
    st.binary(max_size=512),
)
BY_TYPE[activity.Inquire] = st.just(activity.Inquire())
BY_TYPE[activity.Activity] = st.builds(
    activity.Activity,
    st.floats(0, 100),
    st.lists(texts, max_size=5).map(tuple),
    texts,
    st.lists(waits, max_size=8).map(tuple),
)
BY_TYPE[activity.Stalled] = st.builds(
    activity.Stalled, st.floats(0, 100), st.lists(waits, max_size=2).map(tuple)
)
BY_TYPE[activity.SeenRequest] = st.builds(
    activity.SeenRequest, st.lists(ranks, max_size=3).map(tuple), st.floats(0, 100)
)
BY_TYPE[activity.Seen] = st.builds(
    activity.Seen, st.lists(ranks, max_size=3).map(tuple), st.lists(texts, max_size=3).map(tuple)
)
counted = st.integers(0, 2**62)
BY_TYPE[counts.CountsRequest] = st.just(counts.CountsRequest())
BY_TYPE[counts.Counts] = st.builds(
    counts.Counts,
    st.lists(counted, max_size=4).map(tuple),
    st.lists(st.builds(counts.Payload, names, counted, counted), max_size=3).map(tuple),
    st.lists(
        st.builds(
            counts.Times,
            names,
            st.integers(0, 4),
            st.lists(counted, max_size=12).map(tuple),
            st.floats(0, 100),
        ),
        max_size=3,
    ).map(tuple),
)
BY_TYPE[returning.ViewWanted] = st.just(returning.ViewWanted())
BY_TYPE[returning.Later] = st.just(returning.Later())
rounds = st.integers(0, 2**62)
some_ranks = st.lists(ranks, max_size=3).map(tuple)
weights = st.floats(0, 1e6)
some_names = st.lists(texts, max_size=3).map(tuple)
rules = st.builds(averaging.Rules, st.integers(1, 9), st.none() | st.floats(0, 99), texts, texts)
digests = st.binary(max_size=8)
each_reached = st.builds(averaging.Reached, rounds, digests)
reached = st.none() | each_reached
states = st.lists(each_reached, max_size=2).map(tuple)
outcomes = st.builds(
    averaging.Outcome,
    texts,
    rounds,
    digests,
    digests,
    some_names,
    some_names,
    st.lists(weights, max_size=3).map(tuple),
)
BY_TYPE[averaging.AverageDecision] = st.builds(
    averaging.AverageDecision,
    texts,
    rounds,
    digests,
    rounds,
    rounds,
    st.lists(infos, max_size=3).map(tuple),
    st.lists(weights, max_size=3).map(tuple),
    st.lists(rounds, max_size=3).map(tuple),
    some_ranks,
)
BY_TYPE[averaging.AverageEnter] = st.builds(
    averaging.AverageEnter,
    rules,
    some_names,
    st.integers(0, 9),
    st.lists(reached, max_size=2).map(tuple),
    st.none() | states,
    st.lists(outcomes, max_size=2).map(tuple),
    st.lists(BY_TYPE[averaging.AverageDecision], max_size=2).map(tuple),
)
BY_TYPE[averaging.AverageEntered] = st.builds(averaging.AverageEntered, st.integers(0, 9))
BY_TYPE[averaging.AverageOffer] = st.builds(
    averaging.AverageOffer, texts, rounds, reached, weights, blobs, texts
)
BY_TYPE[averaging.AverageWithdraw] = st.builds(averaging.AverageWithdraw, texts, rounds)
BY_TYPE[averaging.AverageWithdrawn] = st.builds(
    averaging.AverageWithdrawn, st.booleans(), ranks, some_names
)
BY_TYPE[averaging.AverageProgress] = st.builds(
    averaging.AverageProgress, texts, rounds, rounds, some_ranks, some_ranks
)
BY_TYPE[averaging.AverageLacks] = st.builds(averaging.AverageLacks, texts, rounds, rounds)
BY_TYPE[averaging.AverageDone] = st.builds(averaging.AverageDone, outcomes, st.integers(0, 9))
BY_TYPE[averaging.AverageReopened] = st.builds(averaging.AverageReopened, texts, rounds)
BY_TYPE[averaging.AverageRefused] = st.builds(
    averaging.AverageRefused, texts, rounds, texts, rounds
)
BY_TYPE[averaging.AverageFetch] = st.builds(
    averaging.AverageFetch, st.none() | texts, infos, st.binary(max_size=16), st.none() | outcomes
)
BY_TYPE[averaging.AverageServe] = st.builds(
    averaging.AverageServe, st.none() | texts, rounds, infos, st.binary(max_size=16)
)
BY_TYPE[averaging.AverageFetched] = st.builds(
    averaging.AverageFetched, st.binary(max_size=16), st.booleans()
)
BY_TYPE[averaging.AverageElect] = st.builds(averaging.AverageElect, states)
BY_TYPE[averaging.AverageElected] = st.builds(averaging.AverageElected, st.booleans())
BY_TYPE[averaging.AverageStateKept] = st.builds(averaging.AverageStateKept, st.none() | states)
BY_TYPE[averaging.AverageWantState] = st.builds(averaging.AverageWantState, st.booleans())
BY_TYPE[averaging.AverageGone] = st.builds(averaging.AverageGone, some_names)
any_message = st.one_of(*BY_TYPE.values())


def frame_of(message: m.Message, *fields: object) -> Frame:
    return Frame(pack_fields(message.code, 1), msgpack.packb(fields))


def test_every_message_is_tried() -> None:
    made = [cls for cls in m.Message.__subclasses__() if cls.__module__.startswith("aiodist.")]
    assert {cls.code for cls in BY_TYPE} == {cls.code for cls in made}


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(0, MAX_REQUEST), any_message), max_size=4),
    st.lists(st.integers(0, 10_000), max_size=10),
)
def test_what_is_sent_arrives(sent: list[tuple[int, m.Message]], cuts: list[int]) -> None:
    data = b"".join(codec.encode_message(message, request) for request, message in sent)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    decoder = Decoder(max_header=MAX_CONTROL_HEADER)
    got = []
    for start, stop in pairwise(edges):
        got += [codec.decode_message(frame) for frame in decoder.feed(data[start:stop])]
    assert got == sent
    assert [type(message) for _, message in got] == [type(message) for _, message in sent]


@pytest.mark.parametrize("cls", BY_TYPE, ids=lambda cls: cls.__name__)
@settings(max_examples=10)
@given(st.data())
def test_each_type_survives(cls: type[m.Message], data: st.DataObject) -> None:
    message = data.draw(BY_TYPE[cls])
    [frame] = Decoder().feed(codec.encode_message(message, 1))
    assert codec.decode_message(frame) == (1, message)


@pytest.mark.parametrize("value", [None, True, False, 0, -7, b"", b"bytes"])
def test_results_keep_their_type(value: Any) -> None:
    [frame] = Decoder().feed(codec.encode_message(m.Result(value)))
    _, result = codec.decode_message(frame)
    assert isinstance(result, m.Result)
    assert result.value == value
    assert type(result.value) is type(value)


@given(st.binary(max_size=40), st.binary(max_size=200))
def test_garbage_raises_protocol_error_and_nothing_else(header: bytes, payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode_message(Frame(header, payload))


@given(
    st.sampled_from(sorted(BY_TYPE, key=lambda cls: cls.code)),
    st.lists(st.booleans() | leaves | st.floats() | st.lists(leaves, max_size=2), max_size=16),
)
def test_fields_of_other_types_are_refused_or_hold(cls: type[m.Message], fields: list[Any]) -> None:
    try:
        _, message = codec.decode_message(Frame(pack_fields(cls.code, 0), msgpack.packb(fields)))
    except ProtocolError:
        return
    codec.encode_message(message, max_body=MAX_REPLY)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (Frame(pack_fields(1), b"\x90"), "header is .type, request."),
        (Frame(pack_fields(999, 0), b"\x90"), "unknown type 999"),
        (Frame(pack_fields("1", 0), b"\x90"), "unknown type '1'"),
        (Frame(pack_fields(True, 0), b"\x90"), "unknown type True"),
        (Frame(pack_fields(14, -1), b"\x90"), "an integer from 0"),
        (Frame(pack_fields(14, 0), b"\x80"), "msgpack array, not dict"),
        (Frame(pack_fields(14, 0), b"\x91\x01"), "0 fields of Leave, not 1"),
        (frame_of(m.Proof(b""), "text"), "at most 64 bytes in mac"),
        (frame_of(m.Challenge(b"", True), b"", 1, "aiodist", 1), "a boolean in token_needed"),
        (frame_of(m.Status({}), None), "a map with text keys"),
        (frame_of(m.Proof(b""), bytes(65)), "at most 64 bytes in mac"),
        (
            frame_of(m.Welcome("", b"", "c", 1, True), 7, b"", "c", 1, True),
            "0 to 256 characters in seen_host",
        ),
        (frame_of(m.Failed(m.Failure.INVALID, ""), "nonsense", ""), "one of rank_taken"),
        (frame_of(m.MemberLost(1, (), ""), 1, 7, ""), "an array of at most 4096 in ranks"),
        (frame_of(m.MemberLost(1, (), ""), 1, [5000], ""), "from 0 to 4095 in ranks"),
        (
            frame_of(m.EpochView("g", 1, ()), "g", 0, pack_rows([])),
            "an integer from 1 to .* in epoch",
        ),
        (frame_of(m.EpochView("g", 1, ()), "g", 1), "3 fields of EpochView, not 2"),
        (
            frame_of(m.EpochView("g", 1, ()), "g", 1, [[7]]),
            "View message: expected rows as columns",
        ),
        (
            frame_of(m.EpochView("g", 1, ()), "g", 1, pack_rows([[7]])),
            "10 fields of MemberInfo, not 1",
        ),
        (
            Frame(pack_fields(returning.Rejoin.code, 1), msgpack.packb([7] * 8)),
            "the fields of JoinRequest in ask",
        ),
        (frame_of(m.Status({}), []), "a map with text keys"),
        (frame_of(m.Status({}), {b"key": 1}), "a map with text keys"),
        (frame_of(m.StoreSet("k", b""), "", b"", None), "1 to 1024 characters in key"),
        (frame_of(m.StoreSet("k", b""), "k", b"", float("nan")), "seconds from 0.001 .* in ttl"),
        (frame_of(m.StoreSet("k", b""), "k", bytes(MAX_VALUE + 1), None), "1048576 bytes in value"),
        (frame_of(m.Result(None), 2**63), "a boolean or an integer .* or at most"),
    ],
)
def test_each_field_is_checked(frame: Frame, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        codec.decode_message(frame)


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\x91\xdd\x00\x10\x00\x00",
        b"\x91\xdf\x00\x10\x00\x00",
        b"\x91\xc6\xff\xff\xff\xff",
        b"\x91\xdb\xff\xff\xff\xff",
        b"\x91\xc9\xff\xff\xff\xff\x01",
    ],
)
def test_forged_lengths_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="expected msgpack"):
        codec.decode_message(Frame(pack_fields(23, 0), body))


def test_metadata_is_bounded() -> None:
    join = m.JoinRequest(group="g", id="i", size=1, metadata={"blob": bytes(9000)})
    with pytest.raises(ValueError, match="JoinRequest message needs a map of at most 8192 bytes"):
        codec.encode_message(join)


def test_what_the_other_side_would_refuse_is_not_sent() -> None:
    with pytest.raises(ValueError, match="1 to 1024 characters in key"):
        codec.encode_message(m.StoreGet(""))
    with pytest.raises(ValueError, match="needs msgpack with text keys"):
        codec.encode_message(m.Status({"map": {1: 2}}))
    with pytest.raises(TypeError, match=r"object .* cannot be sent"):
        codec.encode_message(m.Status({"thing": object()}))


def test_a_status_may_be_of_more_groups_than_a_group_has_members() -> None:
    status = m.Status({"groups": [{"name": f"g{number}"} for number in range(5000)]})
    [frame] = Decoder(max_payload=10**7).feed(codec.encode_message(status, 7))
    assert codec.decode_message(frame) == (7, status)


def test_the_size_of_a_message_is_bounded() -> None:
    with pytest.raises(MessageTooLargeError, match=r"StoreSet message of 2[0-9]* bytes"):
        codec.encode_message(m.StoreSet("k", bytes(200)), max_body=100)


def test_the_largest_request_fits() -> None:
    whole = m.StoreCompareSet("k" * 1024, bytes(MAX_VALUE), bytes(MAX_VALUE))
    [frame] = Decoder(max_payload=10**7).feed(codec.encode_message(whole, 7))
    assert codec.decode_message(frame) == (7, whole)


def test_a_view_knows_ranks_by_id() -> None:
    info = m.MemberInfo(3, "me", "", 0, "", {}, 0.0, "", ())
    view = m.EpochView("g", 1, (info,))
    assert view.ranks["me"] == 3
    with pytest.raises(KeyError):
        view.ranks["you"]


def test_who_shares_a_process_shares_the_view() -> None:
    info = m.MemberInfo(0, "me", "", 0, "", {}, 0.0, "", ())
    frames = [codec.encode_message(m.EpochView("g", 7, (info,)), request) for request in (1, 2)]
    first, second = (codec.decode_message(frame)[1] for frame in Decoder().feed(b"".join(frames)))
    assert first is second
    other = codec.encode_message(m.EpochView("g", 8, (info,)), 1)
    assert codec.decode_message(Decoder().feed(other)[0])[1] != first


def test_rows_are_unpacked_only_where_they_are_wanted() -> None:
    [frame] = Decoder().feed(codec.encode_message(m.EpochView("g", 1, ()), 1))
    with pytest.raises(
        ProtocolError, match="the message EpochView is not expected here, or not yet"
    ):
        codec.decode_message(frame, rows=False)


def info_of(rank: int, name: str) -> m.MemberInfo:
    return m.MemberInfo(rank, f"id of {name}", "", 0, name, {}, 0.0, "", ())


def view_of(epoch: int, names: str) -> m.EpochView:
    return m.EpochView("g", epoch, tuple([info_of(rank, name) for rank, name in enumerate(names)]))


@pytest.mark.parametrize(
    ("before", "after", "gone", "joined"),
    [
        ("abcd", "abcd", (), ""),
        ("abcd", "acd", (1,), ""),
        ("abcd", "bd", (0, 2), ""),
        ("abcd", "bdxy", (0, 2), "xy"),
        ("ab", "abx", (), "x"),
        ("ab", "xy", (0, 1), "xy"),
    ],
)
def test_a_view_and_what_changes_give_the_next_one(
    before: str, after: str, gone: tuple[int, ...], joined: str
) -> None:
    old, new = view_of(1, before), view_of(2, after)
    change = r.NextView.between(old, new)
    assert (change.gone, "".join([one.name for one in change.joined])) == (gone, joined)
    assert change.after(old) == new
    made = change.after(old)
    assert change.after(old) is made
    assert change.after(view_of(1, before)) == new  # of another process


def test_a_change_of_another_view_is_none() -> None:
    change = r.NextView.between(view_of(1, "abc"), view_of(2, "ab"))
    with pytest.raises(ValueError, match="a change of another view than that of epoch 1"):
        change.after(view_of(1, "abd"))
    with pytest.raises(ValueError, match="of the view of epoch 1 that makes no sense"):
        replace(change, gone=(1,)).after(view_of(1, "abc"))


def test_all_messages_can_be_listed_with_their_fields() -> None:
    types = m.message_types()
    assert {m.Hello, r.Vote, activity.Inquire, returning.Rejoin} <= {*types}
    assert len({one.code for one in types}) == len(types)
    assert field_names(r.GiveUpVote) == ("context", "number", "cause", "text")
