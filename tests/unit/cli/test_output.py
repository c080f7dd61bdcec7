"""Lines of ranks: any chunking gives the same lines; what is written keeps its order."""

from __future__ import annotations

import asyncio
import fcntl
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist_cli import output


def lines_of(*chunks: bytes) -> list[bytes]:
    splitter = output.LineSplitter()
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.flush()


def test_lines_come_whole() -> None:
    splitter = output.LineSplitter()
    assert splitter.feed(b"one\ntw") == [b"one"]
    assert splitter.feed(b"o\n") == [b"two"]
    assert splitter.flush() == []


def test_last_line_without_end_is_flushed_once() -> None:
    splitter = output.LineSplitter()
    assert splitter.feed(b"half") == []
    assert splitter.flush() == [b"half"]
    assert splitter.flush() == []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"\n", [b""]),
        (b"\n\n", [b"", b""]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"10%\r20%\r30%\n", [b"10%", b"20%", b"30%"]),
        (b"a\r", [b"a"]),
        (b"a\r\rb", [b"a", b"", b"b"]),
        (b"\xff\xfe\x00\n\x80", [b"\xff\xfe\x00", b"\x80"]),
    ],
)
def test_what_ends_a_line(text: bytes, lines: list[bytes]) -> None:
    assert lines_of(text) == lines


@given(st.lists(st.sampled_from([b"a", b"\r", b"\n", b"\xff", b"bc"]), max_size=30), st.data())
def test_chunking_does_not_matter(parts: list[bytes], data: st.DataObject) -> None:
    text = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert lines_of(*chunks) == lines_of(text)


def test_endless_line_is_cut() -> None:
    splitter = output.LineSplitter()
    lines = splitter.feed(b"x" * (2 * output.MAX_LINE + 10))
    assert [len(line) for line in lines] == [output.MAX_LINE, output.MAX_LINE]
    assert splitter.flush() == [b"x" * 10]


def test_prefix_names_the_rank() -> None:
    assert output.joined([b"a", b""], output.prefix(3, colour=False)) == b"[3] a\n[3] \n"
    coloured = output.prefix(12, colour=True)
    assert coloured.startswith(b"\x1b[")
    assert b"[12]" in coloured
    assert coloured.endswith(b"\x1b[0m ")


def test_colour_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, terminal = os.openpty()
    reader, pipe = os.pipe()
    try:
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert output.wants_colour(terminal)
        assert not output.wants_colour(pipe)
        monkeypatch.setenv("NO_COLOR", "1")
        assert not output.wants_colour(terminal)
    finally:
        for fd in (ours, terminal, reader, pipe):
            os.close(fd)


async def test_writer_keeps_order() -> None:
    reader, pipe = os.pipe()
    writer = output.Writer()
    try:
        for number in range(20):
            await writer.write(pipe, b"%d " % number)
        assert os.read(reader, 1000) == b" ".join(b"%d" % n for n in range(20)) + b" "
        assert not writer.broken.done()
    finally:
        os.close(reader)
        os.close(pipe)
        writer.close()


async def test_writer_tells_of_a_reader_that_is_gone() -> None:
    reader, pipe = os.pipe()
    os.close(reader)
    writer = output.Writer()
    try:
        await writer.write(pipe, b"lost")
        assert isinstance(await writer.broken, BrokenPipeError)
    finally:
        os.close(pipe)
        writer.close()


async def test_writer_waits_for_room_in_a_pipe_that_does_not_block() -> None:
    reader, pipe = os.pipe()
    os.set_blocking(pipe, False)
    room = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
    writer = output.Writer()
    try:
        writing = asyncio.create_task(writer.write(pipe, bytes(2 * room)))
        left = 2 * room
        while left:
            left -= len(await asyncio.to_thread(os.read, reader, left))
        await writing
        assert not writer.broken.done()
    finally:
        os.close(reader)
        os.close(pipe)
        writer.close()
