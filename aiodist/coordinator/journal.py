"""Effects of the membership machine in their order, each once what has to be kept is on disk.

What comes while a write is under way is written together, by the next one: the disk is asked once
for all that waits (group commit), and the event loop never waits for it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from aiodist.coordinator.state_file import NoFilesError, StateFile
from aiodist.membership.effects import Effect, Keep
from aiodist.membership.records import Record

log = logging.getLogger("aiodist.coordinator")


class Journal:
    """`records()` gives all that is known, for snapshots; `carry_out` gets effects whose records,
    and those of all effects before, are on disk; `failed` is called, once, when nothing can be
    written any more: then no further effect is carried out."""

    def __init__(
        self,
        file: StateFile,
        coordinator: str,
        incarnation: int,
        *,
        records: Callable[[], Iterable[Record]],
        carry_out: Callable[[list[Effect]], None],
        failed: Callable[[OSError], None],
    ) -> None:
        """Writes the first snapshot. Raises OSError, also where there can be no thread."""
        self._file = file
        self._who = coordinator, incarnation  # each snapshot says whose it is
        self._records = records
        self._carry_out = carry_out
        self._failed = failed
        self._loop = asyncio.get_running_loop()  # on which effects are carried out
        self._waiting: list[Effect] = []  # submitted, and not in a write
        # The write under way; None: there is none.
        self._writing: asyncio.Future[None] | None = None
        self._idle = asyncio.Event()  # nothing is under way, and nothing waits
        self._idle.set()
        self._broken = False  # no effect is carried out any more
        self.written_at = self._loop.time()  # when the file was written last
        self.failures = 0  # how often it could not be made shorter
        self._thread = _started_thread()  # the one that writes
        try:
            file.write_snapshot(*self._who, records())
        except BaseException:
            self._thread.shutdown()
            raise

    def submit(self, effects: list[Effect]) -> None:
        """Carry out `effects` in time: at once, if nothing of them or before them is to be kept."""
        if self._broken:
            return
        # Also what needs no disk waits while a write is under way: effects are carried out in the
        # order in which they were decided. An answer could otherwise overtake one that it rests on.
        self._waiting += effects
        if self._writing is None:
            self._next()

    async def idle(self) -> None:
        """Wait until all is on disk and carried out."""
        await self._idle.wait()

    async def close(self) -> None:
        """Wait until all is on disk and carried out, then let go of the file."""
        await self._idle.wait()
        self._thread.shutdown()
        self._file.close()

    def close_after_fork(self) -> None:
        """In a forked child: give up its copy of the file, and of the lock."""
        self._broken = True
        self._file.close()

    def _next(self) -> None:
        """Carry out what waits, and begin the next write if there is one."""
        # One write is under way at a time, and the next one takes all that has come by then::
        #
        #     steps    a  b  c  d  e                   f
        #     disk     ├── a ────────┤ ├── b c d e ───┤ ├── f ──
        #     told                    a                b c d e
        #
        # So an answer is delayed by two writes at most, however many there are; and the loop serves
        # all others meanwhile.
        effects, self._waiting = self._waiting, []
        kept = [effect.record for effect in effects if isinstance(effect, Keep)]
        if not kept:
            if effects:
                self._carry_out(effects)
            self._idle.set()
            return
        self._idle.clear()
        if self._file.is_due:
            # It holds what is to be kept now, and what waits for it is what is carried out.
            snapshot = list(self._records())
            self._writing = self._loop.run_in_executor(
                self._thread, self._write_anew, snapshot, kept
            )
        else:
            self._writing = self._loop.run_in_executor(self._thread, self._file.append, kept)
        rest: list[Effect] = [effect for effect in effects if not isinstance(effect, Keep)]
        self._writing.add_done_callback(lambda writing: self._written(writing, rest))

    def _write_anew(self, snapshot: list[Record], kept: list[Record]) -> None:
        """In the thread: make the file shorter, or, where no file can be opened for that now, make
        it longer by what is to be kept, and try again later."""
        try:
            self._file.write_snapshot(*self._who, snapshot)
        except NoFilesError as error:
            self.failures += 1
            log.warning("the state file is not made shorter for now: %s", error)
            self._file.append(kept)

    def _written(self, writing: asyncio.Future[None], effects: list[Effect]) -> None:
        self._writing = None
        error = writing.exception()
        if error is not None:
            self._broken = True
            # What waits was decided on top of what could not be written. Told now, it would be a
            # promise that no later coordinator knows of.
            self._waiting.clear()
            self._idle.set()
            self._failed(error if isinstance(error, OSError) else OSError(errno.EIO, repr(error)))
            return
        self.written_at = self._loop.time()
        # To carry out what waited may bring new effects, and begin the next write by itself.
        self._carry_out(effects)
        if self._writing is None:
            self._next()


def _started_thread() -> ThreadPoolExecutor:
    """An executor whose only thread runs already: a later write must not be the first to find that
    there can be none. Raises OSError."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="aiodist-state")
    try:
        executor.submit(int).result()
    except RuntimeError as error:
        raise OSError(
            errno.EAGAIN, f"no thread for writing the state file can be started: {error}"
        ) from None
    return executor
