"""The agreement on which tags to forget, over links that deliver in any order between pairs."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace

import pytest

from aiodist.engine import tags
from aiodist.engine.arrivals import Arrivals
from aiodist.engine.tags import COMMIT, PREPARE, READY, TagCounts
from aiodist.errors import ProtocolError
from aiodist.wire import kinds


class Ranks:
    """Ranks that call collectives in the same order per tag; each "contribution" goes to all."""

    def __init__(self, size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.size = size
        self.counts = [TagCounts(rank, size) for rank in range(size)]
        self.links = {(a, b): deque() for a in range(size) for b in range(size) if a != b}
        # By rank: (tag, seq) that is pending → ranks heard; and calls that wait for the round.
        self.pending = [{} for _ in range(size)]
        self.early = [{} for _ in range(size)]
        self.deferred = [[] for _ in range(size)]
        self.done = [[] for _ in range(size)]

    def call(self, rank, name):
        tag, _ = name
        counts = self.counts[rank]
        if tag in counts.frozen:
            self.deferred[rank].append(name)
            return
        seq = counts.take(tag)
        self.pending[rank][tag, seq] = (name, {rank})
        for peer in range(self.size):
            if peer != rank:
                self.links[rank, peer].append(("contribution", tag, seq, name))
        for src, theirs in self.early[rank].pop((tag, seq), []):
            self.contribution(rank, src, tag, seq, theirs)
        self.check(rank, tag, seq)

    def contribution(self, rank, src, tag, seq, name):
        self.counts[rank].contributed(tag, seq)
        if (tag, seq) in self.pending[rank]:
            mine, heard = self.pending[rank][tag, seq]
            assert mine == name, "two different collectives were matched"
            heard.add(src)
            self.check(rank, tag, seq)
        else:
            assert self.counts[rank].is_ahead(tag, seq), "a contribution would be dropped"
            self.early[rank].setdefault((tag, seq), []).append((src, name))

    def check(self, rank, tag, seq):
        name, heard = self.pending[rank].get((tag, seq), (None, ()))
        if len(heard) == self.size:
            del self.pending[rank][tag, seq]
            self.done[rank].append(name)
            self.counts[rank].release(tag, failed=False)
            self.send(rank, self.counts[rank].propose())

    def send(self, rank, sends):
        for peer, fields in sends:
            self.links[rank, peer].append(fields)

    def deliver(self):
        """One frame of a link that has any. False: none has."""
        ready = [pair for pair, queue in self.links.items() if queue]
        if not ready:
            return False
        src, dst = self.random.choice(ready)
        fields = self.links[src, dst].popleft()
        if fields[0] == "contribution":
            self.contribution(dst, src, *fields[1:])
        else:
            sends, thawed = self.counts[dst].heard(src, fields)
            self.send(dst, sends)
            if thawed:
                waiting, self.deferred[dst] = self.deferred[dst], []
                for name in waiting:
                    self.call(dst, name)
        return True


@pytest.mark.parametrize("seed", range(60))
def test_calls_match_while_tags_are_forgotten(monkeypatch, seed):
    monkeypatch.setattr(tags, "MANY", 3)
    chooser = random.Random(seed)
    size = chooser.choice([1, 2, 3, 5])
    ranks = Ranks(size, seed)
    names = [(chooser.choice([None, "a", "b", "c", "d", *range(10)]), i) for i in range(150)]
    todo = []
    for _ in range(size):
        # Each rank calls in its own order, but in the same one within a tag.
        order = sorted(names, key=lambda name: name[1] + chooser.uniform(0, 12))
        by_tag = {}
        for name in names:
            by_tag.setdefault(name[0], deque()).append(name)
        todo.append(deque(by_tag[tag].popleft() for tag, _ in order))
    while True:
        rank = chooser.randrange(size)
        if todo[rank] and chooser.random() < 0.3:
            ranks.call(rank, todo[rank].popleft())
        elif not ranks.deliver() and not any(todo):
            break
    for done in ranks.done:
        assert sorted(done, key=lambda name: name[1]) == names
    assert not any(ranks.pending)
    assert not any(ranks.early)
    # Once all is quiet, the next collectives clear up.
    for i in range(3):
        for rank in range(size):
            ranks.call(rank, ("last", i))
        while ranks.deliver():
            pass
    for counts in ranks.counts:
        assert not counts.frozen
        assert len(counts) <= 4


def test_tags_of_failed_collectives_are_kept(monkeypatch):
    monkeypatch.setattr(tags, "MANY", 0)
    counts = TagCounts(0, 1)
    counts.take("failed")
    counts.release("failed", failed=True)
    counts.take("asked")
    counts.keep("asked")
    counts.release("asked", failed=False)
    assert counts.propose() == []
    assert len(counts) == 2
    counts.take("fine")
    counts.release("fine", failed=False)
    assert counts.propose() == []
    assert len(counts) == 2


def test_a_round_names_what_fits(monkeypatch):
    counts = TagCounts(0, 2)
    for i in range(tags.MANY + 1):
        counts.take("x" * 1000 + str(i))
        counts.release("x" * 1000 + str(i), failed=False)
    ((rank, fields),) = counts.propose()
    assert rank == 1
    assert fields[0] == PREPARE
    assert 0 < len(fields[2]) < 5
    assert counts.propose() == []  # one round at a time
    counts.disband()
    assert not counts.frozen


def test_a_round_names_what_was_not_called_for_longest(monkeypatch):
    monkeypatch.setattr(tags, "MANY", 2)
    monkeypatch.setattr(tags, "BATCH", 1)
    counts = TagCounts(0, 2)
    for tag in ("used", "old", "new", "used"):
        counts.pass_over(tag)
    assert counts.propose() == [(1, (PREPARE, 1, ["old"], [1]))]
    counts.heard(1, (READY, 1, [True]))
    counts.pass_over("newest")
    for tag in ("new", "used", "newest"):
        counts.pass_over(tag)
    assert counts.propose() == []  # all were called since they were put there
    assert counts.propose() == [(1, (PREPARE, 2, ["new"], [2]))]


@pytest.mark.parametrize(
    ("rank", "src", "fields"),
    [
        (1, 0, []),
        (1, 0, [PREPARE, 1, ["a"], []]),
        (1, 0, [PREPARE, 1, [1.5], [1]]),
        (1, 0, [PREPARE, "1", ["a"], [1]]),
        (1, 2, [PREPARE, 1, ["a"], [1]]),
        (0, 1, [PREPARE, 1, ["a"], [1]]),
        (0, 1, [READY, 1, [True]]),
        (1, 0, [COMMIT, 1, [True]]),
        (1, 0, [COMMIT, 0, [True]]),
        (1, 0, [COMMIT, 0, [1]]),
        (1, 0, [7, 0, [True]]),
    ],
)
def test_what_fits_no_round_is_refused(rank, src, fields):
    with pytest.raises(ProtocolError):
        TagCounts(rank, 3).heard(src, fields)


def test_wrong_answers_are_refused(monkeypatch):
    monkeypatch.setattr(tags, "MANY", 0)
    counts = TagCounts(0, 3)
    counts.take("a")
    counts.release("a", failed=False)
    assert len(counts.propose()) == 2
    with pytest.raises(ProtocolError):
        counts.heard(1, [READY, 1, [True, True]])
    assert counts.heard(1, [READY, 1, [True]]) == ([], False)
    with pytest.raises(ProtocolError):
        counts.heard(1, [READY, 1, [True]])
    sends, thawed = counts.heard(2, [READY, 1, [False]])
    assert [fields for _, fields in sends] == [(COMMIT, 1, [False])] * 2
    assert thawed
    assert len(counts) == 1


def idle(rank, size, tag="a"):
    counts = TagCounts(rank, size)
    counts.take(tag)
    counts.release(tag, failed=False)
    return counts


def test_words_of_a_round_that_was_called_off_are_dropped(monkeypatch):
    """Who sent them had not heard of the loss yet, and does nothing wrong."""
    monkeypatch.setattr(tags, "MANY", 0)
    first, second = idle(0, 3), idle(1, 3)
    (_, prepare), _ = first.propose()
    ((_, ready),), _ = second.heard(0, prepare)
    first.disband()
    assert first.heard(1, ready) == ([], False)
    second.disband()
    assert second.heard(0, (COMMIT, 1, [True])) == ([], False)
    assert second.heard(0, prepare) == ([], False)
    assert not second.frozen
    with pytest.raises(ProtocolError):
        second.heard(0, [COMMIT])


def test_after_a_loss_no_round_begins(monkeypatch):
    """It would never end, and calls with its tags would wait for their deadlines."""
    monkeypatch.setattr(tags, "MANY", 0)
    counts = idle(0, 3)
    counts.disband()
    assert counts.propose() == []
    assert not counts.frozen


def test_a_knock_shows_that_a_tag_was_forgotten(monkeypatch):
    """It may overtake COMMIT, as what it announces would."""
    monkeypatch.setattr(tags, "MANY", 0)
    counts = idle(1, 3)
    counts.heard(0, (PREPARE, 1, ["a"], [1]))
    arrivals = Arrivals(SimpleNamespace(tags=counts, find={}.get))
    arrivals.knock(2, (kinds.KNOCK, b"group", "a", 0), 0)
    assert not counts.frozen
    assert arrivals.early["a", 0].knockers == (2,)


def test_what_is_over_within_its_call_leaves_its_tag_idle(monkeypatch):
    monkeypatch.setattr(tags, "MANY", 0)
    counts = TagCounts(1, 3)
    counts.pass_over("a")
    counts.pass_over(None)
    assert counts.many
    assert counts.heard(0, (PREPARE, 1, ["a"], [1]))[0] == [(0, (READY, 1, [True]))]
    counts.take("b")
    counts.pass_over("b")
    counts.keep("c")
    counts.pass_over("c")
    assert counts.heard(0, (COMMIT, 1, [True])) == ([], True)
    assert not counts.many
    counts.release("b", failed=False)
    assert counts.many


def test_a_call_that_has_begun_is_entered_and_its_tag_is_not_idle():
    counts = tags.TagCounts(1, 2)
    for tag in ("a", "b"):
        counts.pass_over(tag)
    counts.begin("a")
    assert counts.has_entered("a", 1)
    assert counts.is_ahead("a", 1)  # its frames are still early
    assert not counts.has_entered("b", 1)
    heard, _ = counts.heard(0, (tags.PREPARE, 1, ["a", "b"], [1, 1]))
    assert heard == [(0, (tags.READY, 1, [False, True]))]
    counts.heard(0, (tags.COMMIT, 1, [False, True]))
    assert counts.has_entered("a", 1)
    counts.pass_over("a")
    counts.heard(0, (tags.PREPARE, 2, ["a"], [2]))
    counts.heard(0, (tags.COMMIT, 2, [True]))
    assert not counts.has_entered("a", 0)
