"""The matching engine of one group: which frame belongs to which operation.

A context is entered synchronously, from calls of its group and from the links of its endpoint. It
holds the operations that are pending, frames of collectives that were not called here yet, and
the verdicts on collectives that others gave up before they were called here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from aiodist import trace
from aiodist.collectives.express import Express, LaneExpress
from aiodist.collectives.lane_setup import LaneSetup
from aiodist.collectives.link_express import LinkExpress
from aiodist.devices.memory import DeviceMemory
from aiodist.engine import deadlines, failures, variants
from aiodist.engine.arrivals import Arrivals
from aiodist.engine.early import Key
from aiodist.engine.executor import Executor
from aiodist.engine.hearsay import Hearsay
from aiodist.engine.operation import Failure, Operation, Program, Start, refused
from aiodist.engine.tags import SETUP_TAG, Sends, TagCounts
from aiodist.engine.verdict_relay import VerdictRelay
from aiodist.errors import (
    AiodistError,
    CollectiveAbortedError,
    MismatchError,
    PeerLostError,
    ProtocolError,
)
from aiodist.links.endpoint import Endpoint
from aiodist.p2p.express import P2PExpress
from aiodist.p2p.point_to_point import PointToPoint
from aiodist.rank import revoking
from aiodist.schedules.plan import Send
from aiodist.schedules.teams import post, spans_hosts
from aiodist.shared_memory.board import ON_DEVICE, digest_of
from aiodist.shared_memory.heap import Heap
from aiodist.shared_memory.lane import Lane, Layout, Sharing
from aiodist.transports.base import Done, Link
from aiodist.wire import kinds
from aiodist.wire.frames import pack_fields
from aiodist.work import Work

MAX_UNSOLICITED = 4 << 20
"""Most bytes that a rank sends another for collectives of which it does not know whether the other
has entered them. Beyond that it knocks first, and waits to be admitted."""


class Context:
    """One group in one epoch, as seen by one of its ranks."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        id: bytes,
        group: str,
        epoch: int,
        ranks: Sequence[int],
        op_timeout: float,
        max_message_bytes: int,
        allow_pickle: bool,
        layout: Layout,
    ) -> None:
        self.endpoint = endpoint  # the links to the peers
        self.loop = endpoint.loop
        self.id = id  # names it in frames
        self.group = group  # the name of the group
        self.epoch = epoch
        self.ranks = tuple(ranks)  # the roots of its members, by rank
        self.rank = self.ranks.index(endpoint.rank)  # this one, among them
        self.size = len(self.ranks)
        self.op_timeout = op_timeout  # seconds for a collective that was given no timeout
        self.max_message_bytes = max_message_bytes  # most of a message as a whole
        self.allow_pickle = allow_pickle  # whether values may be any Python objects
        self.ended: AiodistError | None = None  # why nothing can be called any more
        self.scope = trace.Scope(group, epoch, self.rank, self.size, id)  # names it in records
        self.trace = trace.bound(self.scope)  # hears of each operation; None: nobody listens
        self.recorder = endpoint.recorder  # the flight recorder
        self.device_memory = DeviceMemory(self)  # arrays on devices, and what peers have open
        self.p2p = PointToPoint(self, self.loop, self.trace, self._record, self.device_memory)
        self.p2p_express = P2PExpress(self)  # the fast path of point to point
        self._local = {root: local for local, root in enumerate(self.ranks)}  # the rank of a root
        self.ops: dict[Key, Operation] = {}
        """The collectives that are pending and have a number."""
        self.tags = TagCounts(self.rank, self.size)  # the numbers of collectives
        self._unsolicited = [0] * self.size  # bytes by peer, see MAX_UNSOLICITED
        self.deferred: list[Operation] = []
        """The collectives that wait for a number, in the order of their calls."""
        self.arrivals = Arrivals(self)  # takes what comes for collectives
        self.verdict_relay = VerdictRelay(self)  # tells who gave which up
        self.hearsay = Hearsay(self)  # Works that wait until it is known who is lost
        self._fetching: set[int] = set()
        """The ranks whose current point-to-point frame has come only in part."""
        self.derived: dict[bytes, int] = {}
        """How often a group of which name and ranks was made of this one."""
        self._gone: dict[int, str] = {}  # ranks that are lost or left, and why
        self.lane: Lane | None = None  # where collectives share memory, once that is agreed on
        self.express: Express[Any, Any] | None = None  # the fast path of small all-reduces
        sharing, self.teams = layout  # the ranks of each host
        self.mates = post(self.teams, self.rank).mates  # the other ranks of this host
        # Whether arrays can be had in memory that all ranks see.
        self.shares = sharing is not Sharing.NONE and not spans_hosts(self.teams)
        self.heap = Heap(self)  # those arrays
        # Has a lane made, beside the first collective; None: there will be none.
        self._setup = None if sharing is Sharing.NONE else LaneSetup(self, sharing)
        if self._setup is None:
            self.use_links()
        endpoint.add(self)

    # -- collectives, from the group ------------------------------------------------------------

    def launch(
        self,
        op: str,
        call: str,
        start: Start,
        *,
        tag: object = None,
        timeout: float | None = None,
        nbytes: int = 0,
        place: int = 0,
    ) -> Work[Any]:
        """Start a collective; `call` says, in words, what all ranks must agree on."""
        if tag is None and self._setup is not None:
            self._setup.begin()
        if tag is not None or self.lane is None or spans_hosts(self.teams):
            # If a peer has given it up already, its word may have arrived, behind its contribution.
            self.endpoint.poll()
        self.check_open()
        work: Work[Any] = Work.begin(self.loop, op, tag, None, nbytes)
        operation = Operation(self, work, tag, call.encode(), start, self.size, place)
        self._begun(operation)
        work._on_cancel = partial(self._cancelled, operation)
        seconds = self.op_timeout if timeout is None else timeout
        if self._is_frozen(tag):
            self.deferred.append(operation)
        else:
            self._enter(operation)
            if not operation.done:
                self.endpoint.progress.inline(
                    lambda: operation.done, lambda: self._link_of(operation.waiting_for)
                )
        if not operation.done and seconds != math.inf:
            deadlines.arm(self, operation, seconds)
        return work

    def forgo(self, op: str, tag: object, error: BaseException) -> None:
        """The collective `op` was called with what it cannot take, and the call raises `error`. It
        uses up its number, and the others hear at once that it will not be."""
        if tag is None and self._setup is not None:
            self._setup.begin()
        work: Work[Any] = Work.begin(self.loop, op, tag)
        operation = Operation(self, work, tag, f"{op}(?)".encode(), refused, self.size)
        self._begun(operation)
        operation.close()
        verdict = failures.verdict_of(error, self.rank)
        text = f"the call was refused: {verdict.text}"
        work.fail(self.error(CollectiveAbortedError, text, rank=verdict.rank, reason=verdict.text))
        work.exception()  # seen: the caller has the other
        failures.mark_forgone(error)
        if self._is_frozen(tag):
            self.deferred.append(operation)
        else:
            self._enter(operation)

    # A collective that is begun within its call becomes an operation when what it waits for does
    # not come. Its first steps are done then, and stay done: the executor goes on with the next
    # one. Why that is right in shared memory, `collectives.express` says. Over links it has sent
    # frames then, and has taken some straight from a link. Why the operation can go on there:
    #
    # * The frames are those of the plan, byte for byte, and travel on the same links in the same
    #   order. So a peer cannot tell who sent them, and all that has to be told is how many: a slot
    #   is the number of a frame between two ranks, and `Exchange.catch_up` counts what was sent
    #   and what has come. The next frame of a peer has the slot that is due.
    # * Who was heard has entered (`heard`), and to who was not, what was sent counts as unasked
    #   (`may_send`), until a word of it comes: both as if an operation had done it.
    # * Unlike on a lane, links were read meanwhile, as a frame that is looked for may stand behind
    #   others. What belongs to this number could not be handed to an operation, as there was none:
    #   it was kept like all that comes early, as the number is not taken yet. `_enter` takes the
    #   number and hands over what was kept: a verdict ends the operation, frames are delivered in
    #   their slots. A frame is either taken by the call or kept, never both (`take_early`).
    # * Nothing was pending when it began (`is_idle`), and no call comes in between, so the number
    #   that `_enter` takes is the one that the frames already name.
    # * The executor and its memory are the same as before, with the partial results where the plan
    #   has them at that step: no reduction is done again, and none is left out. Only whom it asks
    #   for frames is another one from here on (`Executor.hand_over`).
    #
    # If the context has ended by what was read, there is no operation: nothing would hear of it.

    def take_over(
        self,
        work: Work[Any],
        call: bytes,
        executor: Executor | None,
        rest: Program,
        seconds: float,
    ) -> None:
        """A collective without a tag that was begun within its call is an operation from here on.
        Its first phase is under way in `executor`, and `rest` is what comes after that; without an
        executor, it is all there is."""
        operation = Operation(self, work, None, call, lambda _: rest, self.size)
        self._begun(operation)
        if self.ended is not None:  # by what came while we looked for a frame
            work.fail(self.ended)
            return
        work._on_cancel = partial(self._cancelled, operation)
        if executor is not None:
            operation.carry_on(executor)
            for step in executor.done:
                if isinstance(step, Send) and step.peer not in operation.heard:
                    self.may_send(operation, step.peer, work.nbytes)  # it has been sent
        self._enter(operation)
        if not operation.done and seconds != math.inf:
            deadlines.arm(self, operation, seconds)

    def _begun(self, op: Operation) -> None:
        if op.tag != SETUP_TAG:
            self.recorder.begin(self.scope, op.work, op.call)
        self.started(op.work)

    def _record(self, work: Work[Any], peer: int | None) -> None:
        self.recorder.begin(self.scope, work, peer=peer)

    def started(self, work: Work[Any]) -> None:
        """`work` begins: let who traces know."""
        if self.trace is not None:
            work.trace = self.trace
            self.trace("start", work, None)

    def _is_frozen(self, tag: object) -> bool:
        if tag is None:
            return self._setup is not None and self._setup.settling
        return tag in self.tags.frozen

    def _enter(self, operation: Operation) -> None:
        """Give `operation` its number, and start it."""
        tag = operation.tag
        operation.seq = operation.work.seq = seq = self.tags.take(tag)
        if self.trace is not None:
            self.trace("entered", operation.work, None)
        key = (tag, seq)
        self.ops[key] = operation
        lane = self.lane
        if lane is not None and tag is None and seq >= lane.first:
            operation.lane = lane
            call = operation.call
            operation.digest = digest_of(
                variants.on_host(call) if operation.place == ON_DEVICE else call
            )
        verdict, early = self.arrivals.take(key)
        if verdict is not None:
            self.end(operation, verdict)
        elif operation.done:  # given up while it waited for its number
            error = operation.work.error
            self._give_up(
                operation,
                failures.cancelled(self.rank)
                if error is None
                else failures.verdict_of(error, self.rank),
                None,
            )
        elif early is None or self.arrivals.replay(operation, early):
            if lane is None or operation.lane is None:
                operation.start()
            else:
                lane.add(operation)
                if lane.is_broken and not operation.done:
                    self.failed(operation, self._why_broken())
            for src, reason in self.lost().items():
                # Without a word of it for this one, it has not entered, and nor will it.
                if not operation.done and (src not in operation.heard or operation.needs(src)):
                    error = PeerLostError(f"rank {src} is lost: {reason}", ranks=[src])
                    self.failed(operation, error)

    def _why_broken(self) -> PeerLostError:
        lost = self.lost()
        text = "; ".join(f"rank {rank} is lost: {reason}" for rank, reason in lost.items())
        return PeerLostError(text, ranks=list(lost))

    def link(self, peer: int) -> Link | None:
        """The link to rank `peer`, if there is one."""
        return self.endpoint.link(self.ranks[peer])

    def _link_of(self, peer: int | None) -> Link | None:
        return None if peer is None else self.link(peer)

    def inline(self, work: Work[Any], peers: Sequence[int]) -> None:
        """Poll for a message of `peers` (none: of anyone) that `work` waits for."""
        links = [
            link
            for peer in peers or range(self.size)
            if peer != self.rank and (link := self.link(peer)) is not None
        ]
        if links:
            self.endpoint.progress.inline(work.done, itertools.cycle(links).__next__)

    # -- what an operation asks for ---------------------------------------------------------------

    def send_message(
        self, op: Operation, peer: int, slot: int, views: Sequence[memoryview]
    ) -> None:
        self.endpoint.send(
            self.ranks[peer],
            pack_fields(kinds.MESSAGE, self.id, op.tag, op.seq, slot, op.call),
            views,
            done=partial(op.sent, peer),
            token=op,
            urgent=op.exchange.urgent,
        )

    def may_send(self, op: Operation, peer: int, nbytes: int) -> bool:
        used = self._unsolicited[peer]
        if used and used + nbytes > MAX_UNSOLICITED:
            self.endpoint.send(
                self.ranks[peer], pack_fields(kinds.KNOCK, self.id, op.tag, op.seq), urgent=True
            )
            return False
        self._unsolicited[peer] = used + nbytes
        op.unsolicited[peer] = op.unsolicited.get(peer, 0) + nbytes
        return True

    def refund(self, op: Operation, peer: int) -> None:
        self._unsolicited[peer] -= op.unsolicited.pop(peer, 0)

    def send_grant(self, op: Operation, peer: int, upto: int) -> None:
        self.endpoint.send(
            self.ranks[peer],
            pack_fields(kinds.GRANT, self.id, op.tag, op.seq, upto, op.call),
            urgent=True,
        )

    def finished(self, op: Operation, result: Any) -> None:
        self._forget(op, failed=False)
        if isinstance(result, Failure):
            op.work.fail(result.error)
        else:
            op.work.finish(result)

    def failed(self, op: Operation, error: BaseException) -> None:
        """`op` failed here: tell the others."""
        if self.ops.get((op.tag, op.seq)) is not op:
            return
        if isinstance(error, AiodistError):
            self.locate(error, op)
        verdict = self.hearsay.own(failures.verdict_of(error, self.rank))
        self._give_up(op, verdict, failures.raised_by(error))

    def blame(self, op: Operation, src: int, error: ProtocolError) -> None:
        """What `src` sent for `op` makes no sense, which only shows now."""
        self.endpoint.blame(self.ranks[src], error)
        self.failed(op, self.why_lost(src) or error)

    def not_entered(self, op: Operation) -> None:
        """A rank has not called `op` yet: who was lost and gave no word of it never completed it,
        and all wait in vain."""
        for src, reason in self.lost().items():
            if not op.done and src not in op.heard:
                self.failed(op, PeerLostError(f"rank {src} is lost: {reason}", ranks=[src]))

    def why_lost(self, peer: int) -> BaseException | None:
        reason = self._gone.get(peer) or self.endpoint.lost.get(self.ranks[peer])
        if reason is None:
            return None
        return PeerLostError(f"rank {peer} is lost: {reason}", ranks=[peer])

    # -- ends of operations -----------------------------------------------------------------------

    def _forget(self, op: Operation, *, failed: bool) -> None:
        if op.unsolicited:
            for peer in list(op.unsolicited):
                self.refund(op, peer)
        if self.ops.pop((op.tag, op.seq), None) is not None:
            self.tags.release(op.tag, failed=failed)
            if op.lane is not None:
                op.lane.leave(op, failed=failed)
        if op.timer is not None:
            op.timer.cancel()
            op.timer = None
        if self.tags.many:
            self._send_about_tags(self.tags.propose())

    def _withdraw(self, op: Operation) -> None:
        """Let go of all buffers of `op`: nothing is read or written for it from here on."""
        self._forget(op, failed=True)
        for src in op.exchange.receiving_from():
            self.endpoint.divert(self.ranks[src], None)
            self.arrivals.cut_off(src)
        op.close()
        for peer in range(self.size):
            if peer != self.rank:
                self.endpoint.discard(self.ranks[peer], op)

    def _give_up(
        self, op: Operation, verdict: failures.Verdict, error: BaseException | None
    ) -> None:
        self._withdraw(op)
        self.verdict_relay.tell((op.tag, op.seq), verdict)
        if error is not None:
            op.work.fail(error)

    def _cancelled(self, op: Operation, work: Work[Any]) -> None:
        if op.seq < 0:
            op.close()  # it waits for its number, under which the others will be told
        else:
            self._give_up(op, failures.cancelled(self.rank), None)

    def end(self, op: Operation, verdict: failures.Verdict) -> None:
        """Another rank gave `op` up."""
        call = variants.shown(op.call)
        self._withdraw(op)
        where = {
            "group": self.group,
            "epoch": self.epoch,
            "op": op.work.op,
            "tag": op.tag,
            "seq": op.seq,
        }
        self.hearsay.fail(op.work, verdict, verdict.error(self.rank, call, where), where)

    def differ(self, op: Operation, others: Mapping[int, bytes]) -> None:
        """`others`, by rank, called something else than `op`."""
        called = {self.rank: op.call, **others}
        calls = {src: variants.shown(call) for src, call in called.items()}
        error = MismatchError(failures.mismatch_text(calls), calls=calls)
        self.failed(op, error)

    def turn(self, op: Operation) -> None:
        """Others have called `op` with arrays of the host: this rank does as they do."""
        self.arrivals.turn(op)

    def locate(self, error: AiodistError, op: Operation) -> None:
        if error.op is None:
            error.group, error.epoch = self.group, self.epoch
            error.op, error.tag, error.seq = op.work.op, op.tag, op.seq

    def error(self, cls: type[AiodistError], message: str, **fields: Any) -> AiodistError:
        """An error that says where it happened."""
        return cls(message, group=self.group, epoch=self.epoch, **fields)

    # -- frames -----------------------------------------------------------------------------------

    def frame(self, root: int, fields: list[Any], nbytes: int) -> memoryview | None:
        """A header of `root` came; where its payload goes."""
        src = self._local.get(root)
        if src is None:
            raise ProtocolError(f"a frame for {self.group!r}, which rank {root} is not part of")
        kind = fields[0]
        # A frame that was skipped, or came for an operation that has ended, had no `payload`.
        self._cut_off(src)
        if kind == kinds.P2P:
            view = self.p2p.frame(src, fields[2:], nbytes)
            if view is not None:
                self._fetching.add(src)
            return view
        if kind == kinds.TAGS:
            self._about_tags(src, fields[2:])
            return None
        if kind in (kinds.REGION, kinds.MAPPED, kinds.UNMAP, kinds.DEVICE):
            (self.device_memory if kind == kinds.DEVICE else self.heap).heard(src, fields)
            return None
        if kind == kinds.REVOKE:
            revoking.heard(self, fields)
            return None
        if kind == kinds.KICK:
            if self.lane is not None:
                self.lane.kicked()
            return None
        return self.arrivals.frame(src, fields, nbytes)

    def _cut_off(self, src: int) -> None:
        self._fetching.discard(src)
        self.arrivals.cut_off(src)

    def payload(self, root: int) -> None:
        """The payload of the last frame of `root` is complete."""
        src = self._local[root]
        if src in self._fetching:
            self._fetching.remove(src)
            self.p2p.payload(src)
        else:
            self.arrivals.payload(src)

    # -- forgetting tags --------------------------------------------------------------------------

    def _send_about_tags(self, sends: Sends) -> None:
        for rank, fields in sends:
            self.endpoint.send(
                self.ranks[rank], pack_fields(kinds.TAGS, self.id, *fields), urgent=True
            )

    def _about_tags(self, src: int, fields: list[Any]) -> None:
        sends, thawed = self.tags.heard(src, fields)
        self._send_about_tags(sends)
        if thawed:
            self._thaw()

    def _thaw(self) -> None:
        """The round is over: do what had to wait for its end."""
        self.arrivals.thaw()
        self.undefer()

    def undefer(self) -> None:
        """Let those in whose tag is free again."""
        deferred, self.deferred = self.deferred, []
        for operation in deferred:
            if self._is_frozen(operation.tag):
                self.deferred.append(operation)
            else:
                self._enter(operation)

    # -- ends -------------------------------------------------------------------------------------

    def rank_lost(self, root: int, reason: str) -> None:
        """`root` is gone, at least from this group: fail what needs it."""
        src = self._local.get(root)
        if src is None or src in self._gone:
            return
        self._gone[src] = reason
        self.p2p_express.rank_lost(src)
        self._cut_off(src)
        self.tags.disband()
        self._thaw()
        if self.lane is not None:
            self.lane.hurry()  # what it has left in shared memory can still be taken
        for op in list(self.ops.values()):
            if not op.done and op.needs(src):
                self.failed(op, PeerLostError(f"rank {src} is lost: {reason}", ranks=[src]))
            elif not op.done and src not in op.heard:
                # It has entered if all others have: then it is done, there or here.
                deadlines.ask_whether_entered(self, op)
        if self.lane is not None:
            self.lane.break_off()
        self.verdict_relay.lose(src)
        self.device_memory.rank_lost(src)
        self.p2p.rank_lost(src, f"rank {src} is lost: {reason}")
        self.hearsay.review()

    def check_open(self) -> None:
        """Raise what ended this context, if anything did."""
        if self.ended is not None:
            raise self.ended

    @property
    def called(self) -> int:
        """How many collectives were called here, but for how ranks agree on shared memory."""
        return self.tags.called - self.tags.upcoming(SETUP_TAG)

    @property
    def pending(self) -> list[Work[Any]]:
        """Works that are not done, but for receives and probes, which may never be, and aiodist's
        own, of which the user knows nothing."""
        sends = [work for work in self.p2p.pending if work.op == "send"]
        operations = [*self.ops.values(), *self.deferred]
        works = [op.work for op in operations if op.tag != SETUP_TAG]
        return works + sends + self.hearsay.held

    def close(self, error: AiodistError, *, abort: bool = False) -> None:
        """Fail all that is pending, and whatever is called later. With `abort` tell the others."""
        if self.ended is not None:
            return
        if self._setup is not None:
            self._setup.cancel()
        self.tags.disband()
        self._thaw()
        for op in list(self.ops.values()):
            if abort:
                verdict = failures.Verdict("aborted", error.message, self.rank)
                self._give_up(op, verdict, error)
            else:
                self._withdraw(op)
                op.work.fail(error)
        self.hearsay.close(error)
        self.device_memory.close()  # it may have a last word
        self.endpoint.called += self.called
        self.ended = error
        self.heap.close()
        if self.lane is not None:
            self.lane.close()
        self.lane = self.express = None
        self.p2p.close(error)
        self.arrivals.clear()
        self.verdict_relay.clear()
        self._fetching.clear()
        if abort:
            self.endpoint.remove(self, error.message)
        else:
            self.endpoint.remove(self)

    # -- shared memory ----------------------------------------------------------------------------

    def kick(self, peer: int) -> None:
        """Wake `peer`, which waits for this rank in shared memory."""
        self.endpoint.send(self.ranks[peer], pack_fields(kinds.KICK, self.id), urgent=True)

    def tell(self, peer: int, kind: int, *fields: Any) -> None:
        """Send `peer` a word that belongs to no operation."""
        self.endpoint.send(self.ranks[peer], pack_fields(kind, self.id, *fields))

    def share_memory(self, lane: Lane) -> None:
        """From number `lane.first` on, collectives without a tag run on `lane`."""
        self.lane = lane
        if not spans_hosts(self.teams):
            self.express = LaneExpress(self, lane)
        if self.lost():
            lane.break_off()

    def use_links(self) -> None:
        """There will be no lane: collectives go over links."""
        self.express = LinkExpress(self)

    def upcoming(self) -> int:
        """The number of the next collective without a tag."""
        return self.tags.upcoming(None)

    @property
    def setting_up(self) -> Operation | None:
        """The collective by which ranks agree on shared memory, if one is pending."""
        return next((op for op in self.ops.values() if op.tag == SETUP_TAG), None)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is pending, nothing was given up early, and nobody is lost."""
        return not (self.ops or self.deferred or self._gone or self.arrivals.verdicts)

    # -- what point to point asks for -------------------------------------------------------------

    def send(
        self,
        dst: int,
        fields: tuple[Any, ...],
        payload: Sequence[memoryview] = (),
        *,
        done: Done | None = None,
        token: object = None,
        urgent: bool = False,
    ) -> None:
        """Send one point-to-point frame to rank `dst`."""
        self.endpoint.send(
            self.ranks[dst],
            pack_fields(kinds.P2P, self.id, *fields),
            payload,
            done=done,
            token=token,
            urgent=urgent,
        )

    def lost(self) -> Mapping[int, str]:
        """The ranks that are lost, and why."""
        lost = self.endpoint.lost
        if not (self._gone or lost):
            return {}
        return {rank: lost[root] for root, rank in self._local.items() if root in lost} | self._gone

    def has_lost(self, peer: int) -> bool:
        """Whether `peer` is lost."""
        return peer in self._gone or self.ranks[peer] in self.endpoint.lost

    def discard(self, dst: int, token: object) -> None:
        self.endpoint.discard(self.ranks[dst], token)

    def settle(self, dst: int, token: object) -> None:
        self.endpoint.settle(self.ranks[dst], token)

    def divert(self, src: int, into: memoryview | None) -> int:
        return self.endpoint.divert(self.ranks[src], into)
