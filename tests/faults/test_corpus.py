"""The fuzzer's corpus has every message there is: none can be forgotten."""

from __future__ import annotations

import ast
import re
import types
from pathlib import Path

import corpus
import pytest

import aiodist
from aiodist.devices import memory as device_memory
from aiodist.devices import shares as device_shares
from aiodist.engine import tags
from aiodist.p2p import frames as p2p_frames
from aiodist.transports import retransmission
from aiodist.wire import kinds
from aiodist.wire.codec import decode_message
from aiodist.wire.frames import Decoder, unpack_fields
from aiodist.wire.messages import Message

SOURCES = sorted(Path(aiodist.__file__).parent.rglob("*.py"))


def constants(module: types.ModuleType) -> dict[str, int]:
    return {
        name: value
        for name, value in vars(module).items()
        if name.isupper() and type(value) is int and name != "VERSION"
    }


def test_all_control_messages_are_known() -> None:
    defined = {
        node.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and any(one.arg == "code" for one in node.keywords)
    }
    assert {cls.__name__ for cls in corpus.CONTROL} == defined


@pytest.mark.parametrize("cls", corpus.CONTROL, ids=lambda cls: cls.__name__)
def test_control_messages_are_sound(cls: type[Message]) -> None:
    made = corpus.Corpus(1)
    for _ in range(20):
        [frame] = Decoder(max_payload=2**26).feed(made.control(cls))
        assert type(decode_message(frame)[1]) is cls


def test_all_kinds_of_frames_are_in_the_table() -> None:
    assert corpus.PEER.keys() == constants(kinds).keys()
    assert {name for name, row in corpus.PEER.items() if "…" in row.fields} == {*corpus.WITHIN}


@pytest.mark.parametrize("kind", corpus.PEER)
def test_frames_between_ranks_have_their_kind_and_fields(kind: str) -> None:
    made = corpus.Corpus(1)
    sent = [
        unpack_fields(frame.header)
        for frame in Decoder().feed(b"".join([made.peer(kind) for _ in range(200)]))
    ]
    assert {fields[0] for fields in sent} == {getattr(kinds, kind)}
    if kind in corpus.WITHIN:
        assert {fields[2] for fields in sent} == {int(row[0]) for row in corpus.WITHIN[kind]}
    else:
        assert {len(fields) for fields in sent} == {len(corpus.PEER[kind].fields)}


def test_the_table_of_messages_has_what_is_sent_and_taken() -> None:
    rows = corpus.table(p2p_frames)
    for name, row in rows.items():
        assert int(row.fields[0]) == constants(p2p_frames)[name]
    text = "".join([path.read_text() for path in SOURCES if path.parent.name == "p2p"])
    assert {*re.findall(r"\(wire\.([A-Z]+),", text)} == rows.keys()
    assert {*re.findall(r"^ +wire\.([A-Z]+): self", text, re.MULTILINE)} <= rows.keys()


def numbered(module: types.ModuleType, among: str) -> set[int]:
    """The numbers of the names that are given numbers in the same statement as `among`."""
    source = Path(module.__file__ or "").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            names = [one.id for one in node.targets[0].elts if isinstance(one, ast.Name)]
            if among in names:
                return {getattr(module, name) for name in names}
    raise AssertionError(f"{among} is not where it was in {module.__name__}")


def test_all_words_are_said() -> None:
    steps = {int(row[0]) for row in corpus.WITHIN["TAGS"]}
    assert steps == numbered(tags, "PREPARE")
    assert {*corpus.WORDS} == numbered(device_memory, "FLUSH") | numbered(device_shares, "KEPT")


def test_links_say_what_they_can_say() -> None:
    source = Path(retransmission.__file__).with_name("lasting.py").read_text()
    names = set(re.findall(r"code == ([A-Z]+)", source))
    assert {getattr(retransmission, name) for name in names} == {*corpus.OWN}


def test_a_field_of_a_new_name_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    row = corpus.Row("INQUIRE", ("kind", "context", "novelty"), payload=False)
    monkeypatch.setitem(corpus.PEER, "INQUIRE", row)
    with pytest.raises(AssertionError, match="novelty"):
        corpus.Corpus(1).peer("INQUIRE")
