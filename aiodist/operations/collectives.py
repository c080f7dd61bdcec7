"""The collectives of a group."""

from __future__ import annotations

from typing import Any, Never, TypeVar

from aiodist import timeouts
from aiodist.codecs.base import Codec
from aiodist.collectives import coded, resharding, values
from aiodist.device_programs import loans
from aiodist.device_programs import reductions as device_reductions
from aiodist.operations.starts import OperationStarts
from aiodist.p2p.point_to_point import as_tag
from aiodist.phases import base
from aiodist.signatures import Signatures, typed
from aiodist.transports.surroundings import running_loop
from aiodist.types import SUM, Op, Tag
from aiodist.work import UnseenWork, Work

T = TypeVar("T")


class CollectiveOperations(OperationStarts):
    """What all ranks of a group do together. Each call starts at once, and returns a `Work`."""

    @typed(Signatures.all_reduce)
    def all_reduce(
        self,
        x: Any,
        op: Op = SUM,
        *,
        out: Any = None,
        codec: Codec | None = None,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Work[Any]:
        """Reduce `x` of all ranks, element by element. Every rank gets the result.

        Args:
            x: an array, a number, or a flat list of arrays that are reduced together. All ranks
                need the same dtypes and shapes.
            op: a `ReduceOp`, or a function of two arrays.
            out: the place for the result, with the form, dtypes and shapes of `x`. None: the result
                replaces `x`. A number is returned instead.
            codec: sends arrays of float32, float16 or bfloat16 in fewer bytes between hosts, for
                SUM and AVG (`aiodist.codecs`). Nothing is lost within a host, and all ranks get the
                same bits. A codec with error feedback needs a `tag`, because what one call loses is
                added to the next call of that tag. Await each such call before the next one.

        Raises:
            TypeError: the operator has no meaning for the dtype, such as AVG for integer arrays;
                `x` is neither array nor number; or `out` has another dtype.
            ValueError: `out` has another shape, or arrays of the result share memory.

        For example::

            x = np.ones(3)
            await group.all_reduce(x)  # x has the sum of all ranks
            loss = await group.all_reduce(0.5, aiodist.ReduceOp.AVG)
        """
        if unknown:
            raise self._refused("all_reduce", tag, unknown)
        if codec is not None:
            make, args = coded.all_reduce, (x, op, codec, tag, out)
            return self._start("all_reduce", tag, timeout, make, *args, prepared=False)
        if running_loop() is not self._loop:
            self._enter()
        context = self._context
        express = context.express if tag is None else context.tagged_express
        if out is None and express is not None:
            # There is an express way, so the group has not ended.
            seconds = context.op_timeout if timeout is None else timeout
            if timeout is None or timeouts.is_timeout(timeout):
                tag = tag if tag is None else as_tag(tag)
                try:
                    work = express.all_reduce(x, op, seconds, tag)
                except BaseException as error:
                    self._broken_off(error, may_be=True)
                    raise
                if work is not None:
                    if type(work) is not UnseenWork:
                        work.of_prepared_call(context.records.unseen)
                    return work
        return self._start("all_reduce", tag, timeout, device_reductions.all_reduce, x, op, out)

    @typed(Signatures.reduce)
    def reduce(
        self,
        x: Any,
        dst: int = 0,
        op: Op = SUM,
        *,
        out: Any = None,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Work[Any]:
        """Reduce `x` of all ranks, element by element. Rank `dst` gets the result, the others None.

        At `dst` the result replaces `x`, or goes to `out`. On other ranks `x` is never changed.

        Raises as `all_reduce` does, and ValueError for an `out` on another rank than `dst`.

        For example::

            total = await group.reduce(group.rank, dst=0)  # None at the other ranks
        """
        if unknown:
            raise self._refused("reduce", tag, unknown)
        return self._start("reduce", tag, timeout, device_reductions.reduce, x, dst, op, out)

    @typed(Signatures.broadcast)
    def broadcast(
        self,
        x: Any = None,
        src: int = 0,
        *,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Work[Any]:
        """Give every rank the value `x` of rank `src`.

        On other ranks, `x` may be an array or a tree of arrays that receives the value in place. It
        must have the dtypes and shapes of the value. Numbers in `x` are replaced. If `x` does not
        fit on one rank, all ranks get a `MismatchError`, and no array is written. If `x` is None,
        the Work returns a new value.

        For example::

            name = await group.broadcast("a" if group.rank == 0 else None)
        """
        if unknown:
            raise self._refused("broadcast", tag, unknown)
        return self._start("broadcast", tag, timeout, values.broadcast, x, src)

    @typed(Signatures.all_gather)
    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Work[Any]:
        """Give every rank the list of all ranks' `x`. Types and shapes may differ between ranks.

        `out` receives the values in place. It is a list with an array for each rank, or one array
        in which the values follow each other along the first dimension. If it does not fit on one
        rank, all ranks get a `MismatchError`. `x` may be a part of `out`. If it is in its own place
        there, it is not copied.

        Returns `out`. If `out` is a list with slots that are None or hold numbers, returns a new
        list, because those values have no place in `out`.

        Raises ValueError if arrays of `out` share memory.

        For example::

            ranks = await group.all_gather(group.rank)  # [0, 1, …]
        """
        if unknown:
            raise self._refused("all_gather", tag, unknown)
        return self._start("all_gather", tag, timeout, values.all_gather, x, out)

    @typed(Signatures.gather)
    def gather(
        self,
        x: Any,
        dst: int = 0,
        *,
        out: Any = None,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Work[Any]:
        """Give rank `dst` the list of all ranks' `x`. The others get None.

        `out` is as in `all_gather`, at `dst` only: another rank raises ValueError.

        For example::

            x = np.arange(group.rank + 1)  # lengths may differ
            xs = await group.gather(x, dst=0)
        """
        if unknown:
            raise self._refused("gather", tag, unknown)
        return self._start("gather", tag, timeout, values.gather, x, dst, out)

    @typed(Signatures.scatter)
    def scatter(
        self,
        xs: Any = None,
        src: int = 0,
        *,
        out: Any = None,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Work[Any]:
        """Give each rank its item of a list of rank `src`: ``xs[rank]``.

        At `src`, `xs` is a list with one value for each rank. On other ranks it is None.

        `out` receives the value in place, and may be a part of `xs`. If it does not fit on one
        rank, all ranks get a `MismatchError`.

        For example::

            xs = [n * n for n in range(group.size)] if group.rank == 0 else None
            x = await group.scatter(xs)
        """
        if unknown:
            raise self._refused("scatter", tag, unknown)
        return self._start("scatter", tag, timeout, values.scatter, xs, src, out)

    @typed(Signatures.reduce_scatter)
    def reduce_scatter(
        self,
        xs: Any,
        op: Op = SUM,
        *,
        out: Any = None,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Work[Any]:
        """Reduce slot by slot over all ranks. Each rank gets the result of its own slot.

        `xs` is a list with an array or a number for each rank, or one array that is split along its
        first dimension, as `numpy.array_split` does. It is never changed. The result is a new array
        or number, or goes to `out`.

        Raises as `all_reduce` does.

        For example::

            x = np.ones(4 * group.size)
            part = await group.reduce_scatter(x)  # four elements, each of them group.size
        """
        if unknown:
            raise self._refused("reduce_scatter", tag, unknown)
        return self._start(
            "reduce_scatter", tag, timeout, device_reductions.reduce_scatter, xs, op, out
        )

    @typed(Signatures.all_to_all)
    def all_to_all(
        self,
        xs: Any,
        *,
        out: Any = None,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Work[Any]:
        """Send ``xs[i]`` to each rank i. Every rank gets the list of what was sent to it, by rank.

        `xs` is a list with one value for each rank. Types and shapes may differ. `out` is as in
        `all_gather`, and may be `xs`.

        For example::

            xs = [f"from {group.rank} to {rank}" for rank in range(group.size)]
            ys = await group.all_to_all(xs)  # ys[0] is from rank 0
        """
        if unknown:
            raise self._refused("all_to_all", tag, unknown)
        return self._start("all_to_all", tag, timeout, values.all_to_all, xs, out)

    def reshard(
        self, /, x: Any, out: T, *, tag: Tag = None, timeout: float | None = None, **unknown: Never
    ) -> Work[T]:
        """Move parts of arrays from the ranks that hold them to the ranks that want other parts of
        them.

        `x` is what this rank holds, or None. `out` is what it wants, or None. The result is `out`,
        filled. Both are trees of dicts, lists and tuples. A leaf is an `aiodist.Shard`, a DTensor,
        or an array, which is the whole of itself. Leaves with the same place in both trees belong
        to the same array.

        Each byte that a rank wants and does not hold comes once, and no other byte comes. If
        several ranks hold the same part, they share the sending.

        All ranks must agree on the dtype and the whole shape of each array, and every part that a
        rank wants must be held by a rank. Otherwise all ranks get a `MismatchError`, and nothing is
        written.

        Raises:
            TypeError: a leaf is of another type, or is on a device. Only arrays of the host can be
                moved.
            ValueError: `out` shares memory with `x`, or arrays of `out` share a part of theirs.

        For example::

            row = np.full((1, group.size), group.rank)  # row `rank` of a square
            shape = (group.size, group.size)
            held = aiodist.Shard(row, (slice(group.rank, group.rank + 1), slice(None)), shape)
            whole = await group.reshard(held, np.empty(shape, row.dtype))
        """
        if unknown:
            raise self._refused("reshard", tag, unknown)
        return self._start("reshard", tag, timeout, resharding.reshard, x, out)

    @typed(Signatures.scan)
    def scan(
        self,
        x: Any,
        op: Op = SUM,
        *,
        out: Any = None,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Work[Any]:
        """Reduce `x` of ranks 0 to `rank`, element by element. The result replaces `x`, or goes to
        `out`.

        LAND, LOR and LXOR give 0 or 1, on rank 0, too. Raises as `all_reduce` does. AVG is a
        TypeError: use SUM, and divide.

        For example::

            before_me_and_mine = await group.scan(len("abc"))
        """
        if unknown:
            raise self._refused("scan", tag, unknown)
        return self._start("scan", tag, timeout, device_reductions.scan, x, op, out)

    @typed(Signatures.scan)
    def exscan(
        self,
        x: Any,
        op: Op = SUM,
        *,
        out: Any = None,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Work[Any]:
        """Reduce `x` of ranks 0 to `rank` - 1. The result replaces `x`, or goes to `out`.

        Rank 0 has no rank before it, so its result is `x` unchanged. Raises as `scan` does.

        For example::

            sizes_before = await group.exscan(10)  # rank 0 keeps its 10
        """
        if unknown:
            raise self._refused("exscan", tag, unknown)
        return self._start("exscan", tag, timeout, device_reductions.exscan, x, op, out)

    def barrier(
        self, /, *, tag: Tag = None, timeout: float | None = None, **unknown: Never
    ) -> Work[None]:
        """Wait until all ranks have called this.

        For example::

            await group.barrier(timeout=30)
        """
        if unknown:
            raise self._refused("barrier", tag, unknown)
        return self._start("barrier", tag, timeout, base.barrier)

    @typed(Signatures.share)
    def share(
        self,
        x: Any = None,
        src: int = 0,
        *,
        tag: Tag = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> Work[Any]:
        """Let all ranks use the same memory: that of `x` of rank `src`. A collective.

        `x` is a CUDA tensor, a numpy array, a tensor of the host, or a tree of these. On other
        ranks it is None. Numbers and strings in a tree are copied, as in `broadcast`.

        * **CUDA tensors** must be contiguous. They stay in their place, and `src` gets `x` back.
        * **Arrays of the host** are copied once, into memory that all ranks map. All ranks get an
          array in that memory, `src` too. `x` is left alone.

        A write to the result changes the memory of all ranks, so the ranks have to agree on when to
        write. The memory exists until the last view of it is gone, even if `src` drops its own view
        or leaves the group.

        The Work fails with OSError on all ranks if a rank cannot map the memory, for example
        because it is on another host.

        Raises:
            TypeError: `x` has no array, or has arrays of the host and of a device.
            ValueError: a CUDA tensor is not contiguous, or a rank other than `src` gives `x`.

        For example::

            table = await group.share(np.arange(1000) if group.rank == 0 else None)
        """
        if unknown:
            raise self._refused("share", tag, unknown)
        return self._start("share", tag, timeout, loans.loan, x, src)
