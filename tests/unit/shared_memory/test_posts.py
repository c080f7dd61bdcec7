"""The rings in which ranks post: what is read is what was put, in its order, and nothing else."""

from __future__ import annotations

import math
import mmap
import random
from collections import deque
from functools import partial

import numpy as np
import pytest
from processors import machine_of

from aiodist.errors import ProtocolError
from aiodist.shared_memory import posts
from aiodist.shared_memory.board import SEGMENT, Board
from aiodist.shared_memory.posts import HEAD, SLEEP, START, Posts, padded, prefixes
from aiodist.types import SUM


@pytest.fixture
def ring(monkeypatch):
    """Rings of few bytes."""
    monkeypatch.setattr(posts, "SIZE", 1024)
    monkeypatch.setattr(posts, "NEAR", 256)


def posting(size):
    """The posts of `size` ranks, and their memory."""
    memories = [memoryview(mmap.mmap(-1, SEGMENT)) for _ in range(size)]
    found = [
        Posts(
            Board(
                rank,
                memories[rank],
                {peer: memories[peer].toreadonly() for peer in range(size) if peer != rank},
            )
        )
        for rank in range(size)
    ]
    return found, memories


def test_nobody_posts_before_all_others_read():
    memories = [memoryview(mmap.mmap(-1, SEGMENT)) for _ in range(3)]
    boards = [
        Board(rank, own, {peer: each for peer, each in enumerate(memories) if peer != rank})
        for rank, own in enumerate(memories)
    ]
    prefix = prefixes(b"words", 4)(1)
    one = Posts(boards[0])
    for late in boards[1:]:
        assert one.put_parts(prefix, [b"data"], 96) == -1
        assert not one.has_room(8)
        Posts(late)
    assert one.has_room(8)
    assert is_put(one, prefix, b"data")


@pytest.mark.parametrize("seed", range(30))
def test_everyone_reads_all_in_order(ring, seed):
    chance = random.Random(seed)
    size = chance.choice([2, 3, 5])
    ranks, _ = posting(size)
    due = {(rank, reader.rank): deque() for rank in range(size) for reader in ranks[rank].readers}
    refused = number = 0
    for _ in range(600):
        rank = chance.randrange(size)
        if chance.random() < 0.5:
            number += 1
            words, data = bytes(chance.randrange(1, 40)), chance.randbytes(chance.randrange(200))
            prefix = prefixes(words, len(data))(number)
            cut = chance.randrange(len(data) + 1)
            whole = len(prefix) + padded(len(data))
            # The first of the data comes with what is before it.
            head = prefixes(words, len(data), data[:cut])(number)
            at = ranks[rank].put_parts(head, (data[cut:], b""), whole)
            if at >= 0:
                assert ranks[rank].ring[at : at + whole].tobytes().startswith(prefix + data)
                ranks[rank].tell()
                for peer in range(size):
                    if peer != rank:
                        due[peer, rank].append((number, words, data))
            else:
                refused += 1
                assert any(due[peer, rank] for peer in range(size) if peer != rank)
        else:
            reader = chance.choice(ranks[rank].readers)
            while reader.has_more() and chance.random() < 0.9:
                left = due[rank, reader.rank]
                number_, words, data = left[0]
                other = prefixes(words, len(data))(number_ + 1)
                assert reader.shown(other) is None
                prefix = prefixes(words, len(data))(number_)
                if chance.random() < 0.5:
                    assert taken_of(reader) == left[0]
                else:
                    assert reader.shown(prefix) == data
                    reader.move(len(prefix) + padded(len(data)))
                left.popleft()
    assert refused
    for (rank, peer), left in due.items():
        (reader,) = [one for one in ranks[rank].readers if one.rank == peer]
        while reader.has_more():
            assert taken_of(reader) == left.popleft()
        assert not left


def test_what_is_held_is_not_read_again(ring):
    (one, two), _ = posting(2)
    (reader,) = two.readers
    prefix = prefixes(b"words", 300)(1)
    whole = len(prefix) + padded(300)
    assert is_put(one, prefix, bytes(300))
    assert one.last(300) == bytes(300)
    assert is_put(one, prefix, b"x" * 300)
    assert one.last(300) == b"x" * 300
    one.tell()
    first = reader.shown(prefix)
    reader.hold(whole, "call")
    assert reader.has_more()
    assert two.met([reader], 0)
    assert not two.sleep()
    assert reader.holder == "call"
    reader.let_go()
    assert (first, reader.holder) == (bytes(300), None)
    assert reader.shown(prefix) == b"x" * 300
    reader.hold(whole, "call")
    assert not reader.has_more()
    assert two.met([reader], 0) is None
    assert two.sleep()
    two.awake()
    # There is no room yet for what would be written over it.
    assert is_put(one, prefix, b"y" * 300)
    assert not is_put(one, prefix, b"z" * 300)
    reader.let_go()
    assert is_put(one, prefix, b"z" * 300)
    one.tell()
    assert reader.has_more()
    reader.hold(whole, "call")
    reader.give_up()
    assert not reader.has_more()


def taken_of(reader):
    """The next post, which is needed no more."""
    number, words, data, whole = reader.next_post()
    data = data.tobytes()
    reader.move(whole)
    return number, words, data


@pytest.mark.parametrize("near", [64, 200, 320])
@pytest.mark.parametrize("size", [2, 3])
def test_laps_word_by_word(size, near, monkeypatch):
    """Whoever goes back to the beginning of its ring: all read all that it posts, as it was."""
    monkeypatch.setattr(posts, "SIZE", 320)
    monkeypatch.setattr(posts, "NEAR", near)
    laps = 0
    for seed in range(40):
        chance = random.Random(seed)
        with machine_of(size, chance) as machine:
            ranks = [Posts(machine.board(rank)) for rank in machine.ranks]
            due = []
            read = [0] * size

            def post(one=ranks[0], due=due, chance=chance):
                data = chance.randbytes(chance.choice([0, 8, 32, 60, 150]))
                # Some look like those before.
                prefix = prefixes(b"words", len(data))(chance.randrange(2))
                if is_put(one, prefix, data):
                    due.append((prefix, data))
                    one.tell()

            def take(rank, ranks=ranks, due=due, read=read):
                reader = ranks[rank].readers[0]
                while reader.has_more():
                    prefix, data = due[read[rank]]
                    shown = reader.shown(prefix)
                    assert shown is not None
                    assert shown.tobytes() == data
                    reader.move(len(prefix) + padded(len(data)))
                    read[rank] += 1

            todo = [[post] * 25, *([partial(take, rank)] * 12 for rank in range(1, size))]
            machine.run(lambda rank, todo=todo: [todo[rank]])
            todo = [[], *([partial(take, rank)] for rank in range(1, size))]
            machine.run(lambda rank, todo=todo: [todo[rank]])
            assert read[1:] == [len(due)] * (size - 1)
            laps += ranks[0]._base > 0
    assert laps


def test_what_is_large_stays_where_it_was(monkeypatch):
    """Who has read all leaves the beginning of the ring to what comes next."""
    monkeypatch.setattr(posts, "NEAR", 64)
    (one, two), memories = posting(2)
    (reader,) = two.readers
    for number in range(5):
        put(one, bytes([number]) * 200)
        one.tell()
        assert reader.shown(prefixes(b"words", 200)(1)).tobytes() == bytes([number]) * 200
        assert reader.at == 0
        taken_of(reader)
    assert not any(memories[0][START + 400 : START + 4096])


def test_who_has_given_up_is_known_once():
    ranks, _ = posting(3)
    ranks[0].give_up()
    ranks[2].give_up()
    assert [each.is_given_up() for each in ranks] == [True, True, True]
    assert [each.is_given_up() for each in ranks] == [False, False, False]
    ranks[0].give_up()
    assert [each.is_given_up() for each in ranks] == [False, True, True]


def test_one_wake_up_for_each_sleep():
    (one, two), _ = posting(2)
    put(one)
    assert one.tell() == []
    assert not two.sleep(), "something is there already"
    taken_of(two.readers[0])
    assert two.sleep()
    put(one)
    assert one.tell() == [1]
    put(one)
    assert one.tell() == []
    two.awake()
    put(one)
    assert one.tell() == []
    while two.readers[0].has_more():
        taken_of(two.readers[0])
    assert two.sleep()
    put(one)
    assert one.tell() == [1]


def put(one, data=b"data"):
    assert is_put(one, prefixes(b"words", len(data))(1), data)


def is_put(one, prefix, data):
    return one.put_parts(prefix, (data,), len(prefix) + padded(len(data))) >= 0


@pytest.mark.parametrize(
    "header", [(64, 5, 400, 1), (0, 5, 4, 1), (1 << 30, 5, 4, 1), (64, 0, 0, 0)]
)
def test_what_is_no_post(header):
    (one, two), memories = posting(2)
    put(one)
    one.tell()
    memories[0][START : START + 24] = posts._BEGIN.pack(*header)
    (reader,) = two.readers
    with pytest.raises(ProtocolError, match="rank 0 posted"):
        reader.next_post()
    reader.give_up()
    put(one)
    one.tell()
    assert not reader.has_more()


def test_nothing_is_left_of_what_is_closed():
    (one, two), memories = posting(2)
    put(one)
    one.tell()
    two.close()
    two.awake()
    assert not two.readers
    words = memories[1][:4096].cast("Q")
    assert (words[HEAD], words[SLEEP]) == (0, 0)


def test_what_is_read_while_others_are_woken(lanes, monkeypatch):
    """A rank that wakes another may find that it has lost one, and reads all that was posted."""
    world = lanes.World(3, lanes.Chance(0))
    arrays = [np.full(3, 1.0 + rank) for rank in world.ranks]

    def call(rank):
        return world.contexts[rank].post_express.all_reduce(arrays[rank], SUM, math.inf, "a")

    for context in world.contexts:
        context.may_post = True
    for rank in (1, 2):
        call(rank)
    world.kill(2)
    monkeypatch.setattr(world.contexts[0], "kick", lambda peer: world.tell_of(2))
    assert (call(0).result() == 6.0).all()


def dozes_on(chance, publishers, *, fences=True):
    """One that dozes until the first of some others has posted; all of them post: whether it dozes
    on, and how often it was rung for."""
    with machine_of(1 + publishers, chance, fences=fences) as machine:
        ranks = [Posts(machine.board(rank, dozes=True)) for rank in machine.ranks]
        late = ranks[0].readers

        def doze():
            while not late[0].has_more():
                ranks[0].doze(late, 0, 1.0)

        def post(one):
            put(one)
            assert one.tell() == []  # nobody is sent a frame who dozes

        machine.run(lambda _: [])  # all hear that all read
        todo = [[doze], *([partial(post, one)] * 2 for one in ranks[1:])]
        machine.run(lambda rank: [todo[rank]])
        return bool(machine.dozing), len(machine.rings)


@pytest.mark.parametrize("publishers", [1, 2])
def test_nobody_dozes_on(publishers):
    ends = [dozes_on(random.Random(seed), publishers) for seed in range(300)]
    assert {rung for _, rung in ends} >= {0, 1}
    assert not any(lost for lost, _ in ends)


def test_without_fences_one_would_doze_on():
    assert any(dozes_on(random.Random(seed), 1, fences=False)[0] for seed in range(400))


def test_who_sleeps_for_other_calls_does_not_doze():
    with machine_of(2, random.Random(0)) as machine:
        one = Posts(machine.board(0, dozes=True))
        assert one.can_doze
        assert one.sleep()
        assert not one.can_doze
        one.awake()
        assert one.can_doze
