"""Carries out effects of the membership machine in order, each after its records are on disk.

Records that come during a write are written together by the next one (group commit). So the disk is
asked once for all of them, and the event loop never waits for it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from aiodist.coordinator.state_file import SnapshotError, StateFile
from aiodist.membership.effects import Effect, Keep
from aiodist.membership.records import Record

log = logging.getLogger("aiodist.coordinator")


class Journal:
    """`records()` returns all records, for snapshots.

    `carry_out` gets effects after their records, and those of all earlier effects, are on disk.
    `failed` is called once if nothing can be written any more; no effect is carried out after that.
    """

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
        """Write the first snapshot. Raises OSError, also if no thread can be started."""
        self._file = file
        self._who = coordinator, incarnation  # each snapshot names its coordinator
        self._records = records
        self._carry_out = carry_out
        self._failed = failed
        self._loop = asyncio.get_running_loop()  # the loop on which effects are carried out
        self._waiting: list[Effect] = []  # submitted, and not in a write
        # The write in flight, if any.
        self._writing: asyncio.Future[None] | None = None
        self._idle = asyncio.Event()  # no write in flight, and no effect waits
        self._idle.set()
        self._broken = False  # no effect is carried out any more
        self.written_at = self._loop.time()  # the time of the last write
        self.failures = 0  # how often the file could not be made shorter
        self._thread = _started_thread()  # the thread that writes
        try:
            file.write_snapshot(*self._who, records())
        except BaseException:
            self._thread.shutdown()
            raise

    def submit(self, effects: list[Effect]) -> None:
        """Carry out `effects`: at once, if no record of them or of earlier ones has to be
        written."""
        if self._broken:
            return
        # Effects without records wait for a write, too, because effects keep their order. Else an
        # answer could overtake another one that it depends on.
        self._waiting += effects
        if self._writing is None:
            self._next()

    async def idle(self) -> None:
        """Wait until everything is on disk and carried out."""
        await self._idle.wait()

    async def close(self) -> None:
        """Wait until everything is on disk and carried out, then close the file."""
        await self._idle.wait()
        self._thread.shutdown()
        self._file.close()

    def close_after_fork(self) -> None:
        """In a forked child, close its copy of the file and of the lock."""
        self._broken = True
        self._file.close()

    def _next(self) -> None:
        """Carry out what waits, and begin the next write if there is one."""
        # There is one write at a time, and the next one takes all that has come by then::
        #
        #     steps    a  b  c  d  e                   f
        #     disk     ├── a ────────┤ ├── b c d e ───┤ ├── f ──
        #     told                    a                b c d e
        #
        # So an answer is delayed by two writes at most, however many there are, and the loop serves
        # others meanwhile.
        effects, self._waiting = self._waiting, []
        kept = [effect.record for effect in effects if isinstance(effect, Keep)]
        if not kept:
            if effects:
                self._carry_out(effects)
            self._idle.set()
            return
        self._idle.clear()
        if self._file.is_due:
            # The snapshot contains the new records, so only the other effects remain.
            snapshot = list(self._records())
            self._writing = self._loop.run_in_executor(
                self._thread, self._write_anew, snapshot, kept
            )
        else:
            self._writing = self._loop.run_in_executor(self._thread, self._file.append, kept)
        rest: list[Effect] = [effect for effect in effects if not isinstance(effect, Keep)]
        self._writing.add_done_callback(lambda writing: self._written(writing, rest))

    def _write_anew(self, snapshot: list[Record], kept: list[Record]) -> None:
        """In the thread, make the file shorter.

        If that is impossible now, for example because the disk has no room for a second file,
        append the records to the old one, and try again later.
        """
        try:
            self._file.write_snapshot(*self._who, snapshot)
        except SnapshotError as error:
            self.failures += 1
            log.warning("the state file is not made shorter for now: %s", error)
            self._file.append(kept)

    def _written(self, writing: asyncio.Future[None], effects: list[Effect]) -> None:
        self._writing = None
        error = writing.exception()
        if error is not None:
            self._broken = True
            # Waiting effects were decided on top of records that could not be written. Telling them
            # would be a promise that no later coordinator knows of.
            self._waiting.clear()
            self._idle.set()
            self._failed(error if isinstance(error, OSError) else OSError(errno.EIO, repr(error)))
            return
        self.written_at = self._loop.time()
        # This may bring new effects and begin the next write by itself.
        self._carry_out(effects)
        if self._writing is None:
            self._next()


def _started_thread() -> ThreadPoolExecutor:
    """Return an executor whose only thread runs already, so that no later write fails to start it.

    Raises OSError.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="aiodist-state")
    try:
        executor.submit(int).result()
    except RuntimeError as error:
        raise OSError(
            errno.EAGAIN, f"no thread for writing the state file can be started: {error}"
        ) from None
    return executor
