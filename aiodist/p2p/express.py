"""Point to point for what is not large, within the call.

It sends the same EAGER frames as the engine, byte for byte, so that no peer can tell. Credit, order
and losses are those of the engine. The part that is the same in all messages of one dtype, shape
and tag is kept: the frame up to its data. A receive compares what comes with the frame that it
expects, and takes the data to its place. If something else comes, or something has to wait, the
engine does the work.

Larger arrays, up to `frames.MOST_PUSHED`, take the PUSH, DATA and FIN frames of a pushed message.
This needs leave of the receiver, and room in the link for all three. They are written together. The
receiver can expect them, because the ids of messages ascend by one.

Other values, such as a dict of arrays and numbers, go in one piece: metadata and copies of the
arrays. A receive over shared memory expects one with as many bytes of both as the last one, and
reads it then. Pickles and what is on a device are left to the engine.

The compiled part does the same for arrays over shared memory, once this code has taught it their
kind. It calls this code for all other messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from aiodist.buffers import arrays, tensors, values
from aiodist.buffers.descriptions import Part, described, word
from aiodist.buffers.encoding import encode_within
from aiodist.buffers.tokens import Spec
from aiodist.compiled import core
from aiodist.errors import AiodistError, ProtocolError
from aiodist.links.endpoint import Endpoint
from aiodist.p2p import frames as wire
from aiodist.p2p.credit import EAGER, SHARED_BATCH, Key, MessageTag
from aiodist.p2p.message_forms import Credits, MessageForm, ValueForm
from aiodist.p2p.point_to_point import PointToPoint, as_tag
from aiodist.recorder import FEW, MOST_TEXT, Records
from aiodist.transports import futex
from aiodist.transports.base import Link
from aiodist.transports.framed import FramedLink, Whole
from aiodist.transports.polling import HELD, cores, neighbours
from aiodist.transports.shm_rings import Rings
from aiodist.transports.surroundings import is_virtual
from aiodist.types import ANY_SOURCE, ANY_TAG
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields, prefix
from aiodist.work import Work

K = TypeVar("K")

TRIES: Final = 4
"""How often a receive looks again after something else has come, most likely credit."""

KEPT: Final = 1024
"""The most forms of each kind that are kept. Each takes some 500 bytes, or 1 KiB with the longest
tag, and those by metadata `REMEMBERED` more at most."""


class MessageGroup(Protocol):
    """The group whose messages are sent and received within the call."""

    id: bytes
    rank: int
    size: int
    loop: asyncio.AbstractEventLoop
    max_message_bytes: int
    endpoint: Endpoint
    p2p: PointToPoint
    records: Records

    def link(self, peer: int) -> Link | None:
        """Returns the link to rank `peer`, if there is one."""
        ...

    def has_lost(self, peer: int) -> bool:
        """Returns whether `peer` is lost."""
        ...


class P2PExpress:
    """The short way for messages of one group."""

    def __init__(self, context: MessageGroup) -> None:
        self._context = context
        self._loop = context.loop
        # The halves of the ordinary way, which keep the credit, and its frames that go with others.
        self._sender, self._receiver = context.p2p.sender, context.p2p.receiver
        self._wire, self._held = context.p2p.wire, context.p2p.wire.held
        self.crowded = context.size > cores()  # a peer may need this core: see `Progress._spin`
        self._progress = context.endpoint.progress  # looks for a frame within the call
        self._moved = context.endpoint.traffic.moved  # counts the bytes that links do not count
        self._records = context.records
        # The most bytes of an eager message, with metadata.
        self._most = min(EAGER, context.max_message_bytes)
        # By dtype and shape. None: the fast path does not take such arrays.
        self._sent: dict[tuple[Any, Any], MessageForm | None] = {}  # of values that were sent
        self._due: dict[tuple[Any, Any], MessageForm | None] = {}  # of `out` in receives
        self._links: dict[int, FramedLink] = {}  # by rank: the links that were used last
        # By rank: those that go through shared memory. The first one has waited longest for its
        # turn in receives from any rank.
        self._near: dict[int, tuple[FramedLink, Rings]] = {}
        self._asked = 0  # the rank whose link was looked for last, for such a receive
        self.in_vain = False
        """Whether the last receive waited, and nothing came."""
        self._came: dict[bytes, MessageForm | None] = {}  # by metadata
        # Of other values, by their bytes of metadata and of arrays.
        self._values: dict[tuple[int, int], MessageForm | None] = {}
        self._compiled: Any = None
        """Sends and receives messages of known kinds over shared memory."""
        if not is_virtual(self._loop):
            self._use_compiled(context)

    def send(self, x: Any, dst: Any, tag: Any) -> Work[None] | None:
        """Send an array or another value. None: the fast path does not apply, and nothing was
        done.

        Raises TypeError or ValueError if `tag` is not a tag.
        """
        link = self._link(dst)
        if link is None:
            return None
        form = self._form(self._sent, x)
        if form is not None:
            text, data = form.text, arrays.window(x, form.spec.nbytes)
            if data is None:
                return None
        else:
            encoded = None if _is_array(x) else encode_within(x, self._most)
            if encoded is None:
                return None
            form = self._value_form(len(encoded.meta), encoded.nbytes)
            text = _text_of(encoded.specs[:FEW])
            data = memoryview(b"".join((encoded.meta, *encoded.buffers)))
        tag = _plain(tag)
        head, price, *_ = form[tag]
        # Pay first: a frame in the link cannot be taken back, but credit can.
        if form.is_pushed:
            if not self._push(link, dst, tag, form, data):
                return None
        elif not self._sender.pay(dst, tag, price):
            return None
        elif not (
            (self._held and self._post_behind(link, dst, form, (head, data)))
            or link.post(head, data, form.nbytes)
        ):
            self._sender.repay(dst, tag, price)
            self._forget(dst)  # there may be a newer one
            return None
        if type(form) is MessageForm and self._teaches(link):
            self._teach("send", form, form, described(x))
        work: Work[None] = Work.begin(self._loop, "send", tag, None, form.shown)
        # If the loop is due, give it a turn now, while the message is in flight, and not when the
        # answer is there.
        if self._progress.finish(work, None, self._note(work, text, dst)):
            link.leave_to_call()
        return work

    def recv(self, src: Any, tag: Any, out: Any) -> Work[Any] | None:
        """Receive an array, or another value as long as the last one, if it comes next from `src`.

        None: the fast path does not apply, or nothing came in time, or something else came. Part
        of an array may be in `out` then, but the whole array still has to be received.
        """
        self.in_vain = False
        if src is ANY_SOURCE:
            src = self._next_source()
        link = self._link(src)
        if link is None:
            return None
        key: Key = None if tag is ANY_TAG else _plain(tag)
        receiver = self._receiver
        last_tag, last_meta = receiver.last(src)
        form = self._came.get(last_meta)
        if form is None and last_meta not in self._came:
            form = self._learn(last_meta)
        value, is_value = out, False
        if out is None:
            is_value = type(form) is ValueForm
            # A stream hands on what is behind a message before this code could look at it. What the
            # ordinary way has to read must not come after that.
            if form is None or (is_value and link.rings is None):
                return None
            value = _new(form.spec)
        else:
            due = self._form(self._due, out)
            if due is None:
                return None
            # A sender may have tensors if this rank has numpy arrays.
            if form is None or form.plain != due.plain:
                form = due
        expected = last_tag if key is None else key
        head, price, *_ = form[expected]
        into = arrays.window(value, form.spec.nbytes)
        if into is None:
            return None
        work: Work[Any] = Work.begin(self._loop, "recv", expected, None, form.shown)
        progress = self._progress
        look: Callable[[Any, Any], bool | None] = link.look_for
        if is_value:
            look = partial(_look_alone, link)
        what: Any = head
        if form.is_pushed:
            sid = receiver.next_pushed(src)
            if sid is None:
                return None
            start, end = form.around(expected, sid)
            look, what = link.look_for_whole, Whole(start, into, end)
        if progress.is_due(HELD):
            return None
        found: bool | None = False
        for _ in range(TRIES):
            if not link.is_clear:
                self._forget(src)
                return None
            # Ask before each look. This message may have come in between, or a receive that has
            # waited for longer may need it.
            if not receiver.is_free(src, expected, key):
                return None
            found = look(what, into)
            if found is None:
                if self._held:
                    self._wire.let_all_go()
                found = progress.look(link, look, what, into, crowded=self.crowded)
            if found or is_value or (found is None and not (form.is_pushed and what.there)):
                break
        if not found:
            self.in_vain = found is None
            return None
        text = form.text
        if is_value:
            try:
                value, specs = values.read(into[: form.described], into[form.described :])
                text = _text_of(tuple(specs[:FEW]))
            except (TypeError, ValueError, MemoryError, AiodistError):
                # The ordinary way can read it, or says what is wrong.
                self._came_otherwise(link, src, expected, form, into)
                return None
        try:
            (receiver.took_pushed if form.is_pushed else receiver.took)(src, expected, price)
        except ProtocolError as error:  # the sender had no credit left
            link.close(error)
            return None
        # The link has only counted the data.
        self._moved.received += len(form.meta)
        if out is not None and type(out) is not np.ndarray:
            tensors.mark_written(out)
        if not is_value and self._teaches(link):
            if out is None:
                make = partial(_new, form.spec)
                self._teach("recv", form, form.spec, word(None), described(value), finish=make)
            else:
                mark = tensors.mark_written if type(out) is not np.ndarray else None
                self._teach("recv", form, form, described(out, is_place=True), finish=mark)
        work.source = src
        work.finish_within_call(value, self._note(work, text, src))
        return work

    def _came_otherwise(
        self,
        link: FramedLink,
        src: int,
        tag: MessageTag,
        form: MessageForm,
        payload: memoryview,
    ) -> None:
        """Let the ordinary way have a message that was taken from `link`."""
        fields = (wire.EAGER, tag, False, form.described)
        try:
            landing = self._context.p2p.frame(src, fields, len(payload))
        except (ProtocolError, MemoryError) as error:
            # The sender had no credit left, or the message cannot be kept, as if the link had read
            # it.
            link.close(error)
            return
        if landing is not None and landing.memory is not None:
            landing.memory[:] = payload
            landing.landed()

    def _push(
        self, link: FramedLink, dst: int, tag: MessageTag, form: MessageForm, data: memoryview
    ) -> bool:
        """Send the whole of a larger array, if the receiver has given leave. False: nothing was
        done."""
        price = form[tag].cost
        sid = self._sender.push(dst, tag, price)
        if sid is None:
            return False
        start, end = form.around(tag, sid)
        if not self._post_behind(link, dst, form, (start, data, end)):
            self._sender.unpush(dst, tag, price)
            return False
        return True

    def _post_behind(
        self, link: FramedLink, dst: int, form: MessageForm, parts: Sequence[bytes | memoryview]
    ) -> bool:
        """Send a message in one piece, with the frame that is held for `dst`.

        False: the message was not sent, but that frame may have been.
        """
        held = self._held.pop(dst, None)
        # It goes first: it may be leave, which the answer needs. Also, a frame left in a ring would
        # keep that from being empty, so that it could not start again at its beginning.
        before = b"" if held is None else prefix(pack_fields(*form.start, *held), 0)
        if link.post_whole((before, *parts), form.nbytes):
            return True
        if held is not None:
            self._held[dst] = held
            self._wire.let_go(dst)
        return False

    def _note(self, work: Work[Any], text: bytes, peer: int) -> float:
        """Record a message that is done. Return the time, by the clock of the loop."""
        records, ended = self._records, self._loop.time()
        records.add((
            records.where, work.op, work.tag, None, text, peer, work.nbytes, work._started,
            ended,
        ))  # fmt: skip
        if records.trace is not None:
            records.started(work)
        return ended

    def _link(self, peer: Any) -> FramedLink | None:
        """Return the link to another rank. None: the fast path cannot use it."""
        if type(peer) is not int:
            return None
        link = self._links.get(peer)
        if link is None:
            context = self._context
            if not 0 <= peer < context.size or context.has_lost(peer):
                return None
            found = context.link(peer)
            if not isinstance(found, FramedLink):
                return None
            link = self._links[peer] = found
            if link.rings is not None:
                self._near[peer] = link, link.rings
            receives = self._receiver.books(peer)
            if self._compiled is not None and link.rings is not None and receives is not None:
                self._compiled.use(peer, link, link.rings, *self._sender.books(peer), *receives)
        return link

    def _next_source(self) -> int | None:
        """Return the next rank of which something is in shared memory. None: there is none, or
        messages that have come before are first."""
        context = self._context
        self._asked = (self._asked + 1) % context.size
        if self._asked != context.rank:
            self._link(self._asked)
        messages, *_ = self._receiver.waiting
        if not messages:
            for peer, (link, rings) in self._near.items():
                # A link may have ended before its rank is known to be lost.
                if link.is_clear and rings.has_news():
                    self._near[peer] = self._near.pop(peer)
                    return peer
        return None

    def rank_lost(self, peer: int) -> None:
        """Forget the link to `peer`."""
        self._forget(peer)

    def _forget(self, peer: int) -> None:
        self._links.pop(peer, None)
        self._near.pop(peer, None)
        if self._compiled is not None:
            self._compiled.leave(peer)

    # -- the compiled part ------------------------------------------------------------------------

    def _use_compiled(self, context: MessageGroup) -> None:
        """Let the compiled part do the calls that it can do. It calls this code for the others."""
        if core is None:
            return
        boxes, receives, owing, flow = self._receiver.waiting
        leave = kinds.P2P, context.id, wire.PULL, wire.FIRST_SID, wire.LEAVE
        limits = context.p2p.limits
        self._compiled = core.Messages(
            records=self._records,
            progress=self._progress,
            loop={"loop": self._loop},
            nothing=(),
            time=self._loop.time,
            where=self._records.where,
            work=Work,
            ordinary=Work,
            unseen=self._records.unseen,
            neighbours=neighbours,
            frames=self._held,
            boxes=boxes,
            receives=receives,
            owing=owing,
            flow=flow,
            credits=Credits(context.id),
            leave=prefix(pack_fields(*leave), 0)[:-10],  # without the id, LEAVE, and no payload
            send=self.send,
            recv=self.recv,
            packed=self._packed,
            let_all_go=self._wire.let_all_go,
            took=self._took,
            express=self,
            any_tag=ANY_TAG,
            any_source=ANY_SOURCE,
            rank=context.rank,
            size=context.size,
            crowded=self.crowded,
            dozes=futex.works(),
            window=limits.window,
            most=limits.total,
            batch=SHARED_BATCH,
        )
        vars(self).update(send=self._compiled.send, recv=self._compiled.recv)

    def _teaches(self, link: FramedLink) -> bool:
        """Whether the compiled part can send and receive such messages over this link."""
        return self._compiled is not None and link.rings is not None

    def _teach(
        self,
        op: str,
        form: MessageForm,
        name: object,
        *parts: Part | None,
        finish: Callable[..., object] | None = None,
    ) -> None:
        """Let the compiled part send or receive such messages from now on.

        `parts` describe the array. For a receive without `out` they are the None and the new array,
        which `finish` makes. Otherwise `finish` is called with the array that was written. The new
        kind replaces the one of the same `name`.
        """
        if None not in parts:
            self._compiled.know(op, name, [*parts], -1, False, form, finish)

    def _packed(self, dst: int) -> bytes | None:
        """Return the frame that is held for `dst`, if there is one."""
        held = self._held.get(dst)
        return None if held is None else prefix(pack_fields(kinds.P2P, self._context.id, *held), 0)

    def _took(self, src: int, tag: MessageTag, price: int, is_pushed: bool) -> bool:
        """Count a message that was received. False: its sender had no credit left."""
        try:
            if is_pushed:
                self._receiver.took_pushed(src, tag, price)
            else:
                self._receiver.took(src, tag, price, SHARED_BATCH)
        except ProtocolError as error:
            if (link := self._links.get(src)) is not None:
                link.close(error)
            return False
        return True

    # -- forms ------------------------------------------------------------------------------------

    def _form(self, forms: dict[tuple[Any, Any], MessageForm | None], x: Any) -> MessageForm | None:
        if not _is_array(x):
            return None
        try:
            key = (x.dtype, x.shape)
        except RuntimeError:  # a nested tensor has no shape
            return None  # the ordinary way refuses it
        try:
            return forms[key]
        except KeyError:
            # The next array of this dtype and shape may be fine, so do not keep a None.
            return None if arrays.plain(x) is None else _keep(forms, key, self._form_of(x))

    def _form_of(self, x: Any) -> MessageForm | None:
        try:
            array = arrays.view(x, "x")
        except TypeError:
            return None  # the ordinary way raises it
        if array is None or not array.is_flat or array.base.dtype.kind not in "biufc":
            return None
        kind: arrays.Kind = "torch" if array.kind == "torch" else "numpy"
        return self._make(Spec(kind, array.name, array.shape, array.base.nbytes))

    def _learn(self, meta: bytes) -> MessageForm | None:
        """Return the form of a message that came with this metadata."""
        try:
            value = values.parse(meta) if meta else None
        except ProtocolError:  # it failed its receive, and says nothing about the next message
            value = None
        form = None
        if value is None or value.has_foreign:
            pass
        elif value.array is not None:
            form = self._make(value.array)
        elif len(meta) + value.nbytes <= self._most:
            form = self._value_form(len(meta), value.nbytes)
        return _keep(self._came, meta, form)

    def _value_form(self, described: int, nbytes: int) -> MessageForm:
        """Return the form of values with so many bytes of metadata and of arrays."""
        form = self._values.get((described, nbytes))
        if form is None:
            form = ValueForm(self._context.id, described, nbytes)
            _keep(self._values, (described, nbytes), form)
        return form

    def _make(self, spec: Spec) -> MessageForm | None:
        if not 0 < spec.nbytes <= wire.MOST_PUSHED:
            return None
        form = MessageForm(self._context.id, spec)
        return form if form.nbytes <= self._most or form.is_pushed else None


def _plain(tag: Any) -> MessageTag:
    """Return a tag as it is sent, checked when it is packed if it is an int or str itself."""
    # True equals 1, but is not a tag, and `as_tag` refuses it.
    return tag if type(tag) is int or type(tag) is str else as_tag(tag)


def _look_alone(link: FramedLink, head: bytes, into: memoryview) -> bool | None:
    """Do what `FramedLink.look_for` does with a link in shared memory, but leave there what else
    comes.

    A receive is posted before that is read, because a frame behind it may end the group.
    """
    rings = link.rings
    assert rings is not None
    try:
        if rings.has_news() and not rings.goes_on_with(head):
            return False
    except ProtocolError:
        pass  # the link finds it again
    return link.look_for(head, into)


def _is_array(x: object) -> bool:
    return type(x) is np.ndarray or type(x) is tensors.plain_type()


@lru_cache(maxsize=KEPT)
def _text_of(specs: tuple[Spec, ...]) -> bytes:
    """Return how records show a message with these arrays."""
    return ", ".join(map(str, specs))[:MOST_TEXT].encode()


def _new(spec: Spec) -> Any:
    """Make a new array for a message."""
    return arrays.empty(spec.kind, spec.name, spec.shape, "value").value


def _keep(
    forms: dict[K, MessageForm | None], key: K, form: MessageForm | None
) -> MessageForm | None:
    if len(forms) >= KEPT:
        forms.pop(next(iter(forms)))
    forms[key] = form
    return form
