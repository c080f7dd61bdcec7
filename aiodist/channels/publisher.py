"""`aiodist.publisher`: publishes versions of weights."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import numpy as np

from aiodist import timeouts
from aiodist.buffers.encoding import encode
from aiodist.channels import directory, receipts, serving
from aiodist.channels.changes import LASTS, Encoding
from aiodist.channels.differences import IS_FAST
from aiodist.channels.directory import MOST_RELEASES, MOST_SHARES, Release, Seat
from aiodist.channels.holding import Holding, in_thread
from aiodist.channels.hosting import has_device, on_host
from aiodist.channels.manifest import Writing
from aiodist.channels.memory import VersionMemory
from aiodist.channels.participant import PATIENCE, ChannelRole, Participant, check_options
from aiodist.channels.ration import Ration
from aiodist.channels.store import BEAT, GONE, SIGNS
from aiodist.channels.trees import unwrapped
from aiodist.errors import AiodistError, CollectiveTimeoutError, JoinError
from aiodist.transports.surroundings import chooser_on
from aiodist.types import ChannelOptions


def publisher(
    channel: str,
    *,
    address: str | None = None,
    keep: int = 2,
    part: tuple[int, int] = (0, 1),
    restart: bool = False,
    patience: float = PATIENCE,
    deltas: bool | None = None,
    **options: Unpack[ChannelOptions],
) -> Publisher:
    """Publish versions of weights to all subscribers of a channel.

    Use it as ``async with aiodist.publisher("policy", address=…) as out: await out.publish(params,
    version=7)``.

    Args:
        channel: its name. Publishers and subscribers give the same.
        address: that of a coordinator, as for `aiodist.connect` (None: from the environment).
        keep: how many versions are kept for subscribers.
        part: which one of how many publishers this is, if several processes publish, each its share
            of a version: ``part=(group.rank, group.size)``. Each may have other arrays, or parts of
            arrays (`aiodist.Shard`, DTensors). A version is there when all have published theirs.
        restart: let version numbers begin anew. Without it they only grow, even if publishers
            restart or the channel is empty, because subscribers never go back.
        patience: seconds that a chunk may take before a receiver gives up on its sender.
        deltas: whether a version is also sent as its difference to the one before. None: if the
            extra `weights` is installed, once a subscriber asks for differences, because its line
            is slower than encoding and decoding.
        options: options of `aiodist.connect`, such as `token`, `ssl` and `transports`.

    Entering raises what `connect` does. It raises JoinError if another publisher of the channel is
    alive, of this part or of another number of parts, or if you give `restart` while subscribers
    live.

    For example::

        address = group.address  # of any coordinator
        if group.rank == 0:
            async with aiodist.publisher("policy", address=address) as out:
                await out.publish({"w": np.ones(3)}, version=1)
                await group.barrier()  # they have it
        else:
            async with aiodist.subscriber("policy", address=address) as weights:
                version, tree = await weights.latest()
                await group.barrier()
    """
    if isinstance(keep, bool) or not isinstance(keep, int | np.integer):
        raise TypeError(f"keep is a number of versions, an int, not {keep!r}")
    if not 1 <= keep <= MOST_RELEASES:
        raise ValueError(f"keep is 1 to {MOST_RELEASES} versions, not {keep!r}")
    if not isinstance(restart, bool | np.bool_):
        raise TypeError(f"restart is True or False, not {restart!r}")
    if not isinstance(deltas, bool | np.bool_ | None):
        raise TypeError(f"deltas is True, False or None, not {deltas!r}")
    check_options("publisher", options)
    share, shares = _checked(part)
    participant = Participant(channel, address, patience, options)
    return Publisher(participant, keep, (share, shares), restart=restart, deltas=deltas)


def _checked(part: Any) -> tuple[int, int]:
    match part:
        case (int(share), int(shares)) if 0 <= share < shares <= MOST_SHARES:
            return share, shares
    raise ValueError(f"part is (rank, how many), of at most {MOST_SHARES}, not {part!r}")


class Publisher:
    """Publishes versions. Made by `aiodist.publisher`, for use by ``async with``."""

    def __init__(
        self,
        participant: Participant,
        keep: int,
        part: tuple[int, int],
        *,
        restart: bool,
        deltas: bool | None = None,
    ) -> None:
        self._participant = participant
        self._keep = keep
        self._share, self._shares = part
        self._restart = restart
        self._has_deltas = IS_FAST if deltas is None else deltas
        self._always = deltas is True
        self._encoding = Encoding(participant.stock.differences, self._is_encoded)
        self._kept = -math.inf  # the time of the last sign of life that kept the place
        self._before: list[Release] = []  # what was published before this publisher came
        self._knows_before = False  # so far; another one may have had the place
        self._publishing = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None
        self._lent: list[Holding] = []  # what is lent, and may still have readers
        participant.role = ChannelRole(
            met=partial(serving.meet, participant),
            own=self._own,
            version=lambda: max(participant.stock.holdings, default=None),
            publishes=True,
        )

    async def __aenter__(self) -> Publisher:
        await self._participant.open()
        try:
            await self._participant.store.entering(self._enter)
        except BaseException:
            await self._participant.close()
            raise
        self._participant.role.stay = self._keep_place
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._participant.is_inherited:
            return
        # A cancelled task must leave, too, because its place would stay taken.
        self._closing = asyncio.create_task(self._close(), name="aiodist publisher close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._encoding.close()
        await self._participant.close()

    def _is_encoded(self) -> bool:
        """Whether versions are to be encoded now."""
        clock = asyncio.get_running_loop().time
        return self._always or clock() < self._participant.stock.differences.asked + LASTS

    async def _enter(self) -> None:
        await self._take_place(enters=True)
        if self._restart:
            await self._begin_anew()
        await self._look_back()

    async def _look_back(self) -> None:
        """Learn which versions were complete, and remove what earlier publishers of this share have
        only begun. They may publish these versions again, with other bytes."""
        participant, me = self._participant, self._seat()
        before = directory.published(await participant.store.get(directory.PUBLISHED))

        def rest(known: Sequence[Release]) -> list[Release] | None:
            return directory.without_begun(known, before, me, self._own())

        if rest(participant.releases) is not None:
            await participant.store.change(directory.RELEASES, Release, rest)
            await self._until_known(lambda known: rest(known) is None)
        whole = directory.newest(before)
        self._before = [one for one in before if one.version == whole]
        self._knows_before = True

    async def _until_known(self, is_known: Callable[[Sequence[Release]], bool]) -> None:
        """Wait until a change of the releases is known here, too."""
        participant = self._participant
        while not is_known(participant.releases):
            participant.tasks.check()
            await participant.changed.wait()

    async def _begin_anew(self) -> None:
        """Forget what was published. Raises JoinError while subscribers live."""
        participant = self._participant
        try:
            await self._forget_published()
        except JoinError as error:
            raise JoinError(
                f"the numbers of the channel {participant.channel!r} cannot begin anew: {error}."
                " End the subscribers first, or publish to a channel of another name"
            ) from error
        old = await participant.store.look()
        await participant.store.delete(directory.RELEASES)
        await self._until_known({*old}.isdisjoint)
        await self._forget_lines({one.version for one in old})

    async def _forget_published(self) -> None:
        try:
            await self._participant.store.delete(directory.PUBLISHED)
        except JoinError:
            # Publishers of other parts that are just entering have not yet said that they publish.
            with self._participant.store.awaiting(
                f"others are in the channel, and only after {GONE:g} s it is sure that they are"
                " subscribers: end them first, publish to a channel of another name, or give a"
                " longer timeout"
            ):
                await asyncio.sleep(GONE)
            await self._participant.store.delete(directory.PUBLISHED)

    @property
    def newest(self) -> int | None:
        """The highest version that was ever published in the channel; None: there was none.

        This includes versions of earlier publishers, and versions that no participant has any more.
        """
        return directory.newest([*self._before, *self._participant.releases])

    @property
    def bytes_sent(self) -> int:
        """Bytes of versions that this process has sent to others so far, without mapped memory."""
        return self._participant.meetings.bytes_moved[0]

    async def publish(
        self, params: Any, *, version: int, lend: bool = False, timeout: float | None = None
    ) -> None:
        """Publish a tree of arrays as a version.

        Returns as soon as you may change `params` again, because they are copied, from devices,
        too. It does not wait for subscribers. While the coordinator is away, it waits until that is
        back.

        Args:
            params: the tree of arrays.
            version: a number higher than all before it. To retry, give the same number and the same
                bytes again.
            lend: do not copy arrays of the host. Do not write, resize or free them until
                `take_back` has returned, or this publisher is closed. If you write to them before,
                other participants detect the damage and drop the version.
            timeout: seconds; None: no limit.

        Raises:
            ValueError: the version is not higher, or above 2**62; or there are parts of arrays, and
                no other publisher.
            TypeError: a leaf cannot be sent, or the version is no int.
            JoinError: another publisher has taken this one's place.
            CoordinatorLostError: the coordinator is gone for good.
            MemoryError: there is no memory.
            CollectiveTimeoutError: `timeout` is over (a TimeoutError). Publish the same again to be
                sure.

        After any other error than the last, nothing is published.
        """
        version = directory.as_version(version)
        timeouts.check_wait(timeout)
        doing = ["another version was still being published"]
        try:
            async with asyncio.timeout(timeout):
                await self._publish(params, version, doing, lend=lend)
        except TimeoutError as error:
            if isinstance(error, AiodistError):
                raise
            raise CollectiveTimeoutError(
                f"version {version} of the channel {self._participant.channel!r} was not published"
                f" within {timeout:g} s: {self._participant.store.absence or doing[-1]}. Publish"
                " the same again"
            ) from None

    async def _publish(self, params: Any, version: int, doing: list[str], *, lend: bool) -> None:
        """Adds what it does to `doing`, for an error."""
        participant = self._participant
        participant.tasks.check()
        async with self._publishing:
            doing.append("its arrays were still being copied")
            known = [*self._before, *participant.releases]
            if not directory.may_be_again(known, version, self._share):
                directory.check_higher(known, version, self._share)
            # In threads, because this copies arrays that are not contiguous.
            tree, extents = await in_thread(lambda: unwrapped(params, shares=self._shares))
            if await in_thread(lambda: has_device(tree)):
                tree = await on_host(tree)
            share = self._share, self._shares
            writing = await in_thread(
                lambda: Writing(encode(tree, allow_pickle=None), version, extents, share)
            )
            if lend:
                release, arrays = await in_thread(writing.lend)
                memory = VersionMemory.lent(arrays)
            else:
                nbytes, is_shared = writing.release.nbytes, bool(participant.store.host)
                memory = VersionMemory(nbytes, shared=is_shared, spare=participant.stock.spare)
                release = writing.release  # without its check, which comes with the bytes
            try:
                if not lend:
                    release = await in_thread(lambda: writing.write(memory.view))
                doing.append("nothing came from the coordinator")
                holding = await self._held(release, memory)
            except BaseException:
                memory.close()
                raise
            if holding is not None:
                await self._announce(holding)

    async def acknowledged(self, version: int, content: str = "") -> AsyncGenerator[int, None]:
        """``async for hosts in out.acknowledged(7)``: the number of hosts that have acknowledged a
        version with that `content`, each time that there are more. It never ends by itself.

        For example, to serve a version until 8 hosts have it::

            async for hosts in out.acknowledged(7):
                if hosts >= 8:
                    break

        Waits for a coordinator that is away. Raises CoordinatorLostError, GroupClosedError, and
        TypeError or ValueError for what `Subscriber.acknowledge` refuses.
        """
        version = directory.as_version(version)
        receipts.check_content(content)
        participant, known = self._participant, set[str]()
        more = partial(
            receipts.more,
            version=version,
            content=content,
            known=known,
            patience=participant.patience,
        )
        while True:
            known |= await participant.store.until_done(lambda: participant.store.ask(more))
            yield len(known)

    async def take_back(self, version: int) -> None:
        """Wait until the arrays that were lent as `version` have no reader any more.

        This returns at once if the version is not lent. A receiver that stands still delays it by
        up to `patience` and a second. A slow one delays it for longer, because what is in flight to
        it has to arrive.

        The version is given to no participant from here any more. One that lacks some of it takes
        it from other subscribers, if they have it, or else takes another version.

        Raises TypeError or ValueError for a version that is no number of one.
        """
        version = directory.as_version(version)
        # More than one if a version was lent again after a call that was cancelled.
        lent = [one for one in self._lent if one.version == version]
        for one in lent:
            self._participant.stock.drop(one)
            one.recall()
        for one in lent:
            await one.gone.wait()
        self._lent = [one for one in self._lent if not one.gone.is_set()]

    async def _held(self, release: Release, memory: VersionMemory) -> Holding | None:
        """The version as others may read it, which closes `memory` in the end.

        None: the version is published already.
        """
        participant = self._participant
        # No publisher can take the place of one that gives signs of life. So we do not ask within
        # this time, because that would be a round trip before each version.
        if asyncio.get_running_loop().time() > self._kept + GONE / 2:
            await participant.store.until_done(self._take_place)
        if not self._knows_before:
            await participant.store.until_done(self._look_back)
        if (words := memory.words()) is not None:
            release = replace(release, host=participant.store.host, offer=words[0], key=words[1])
        held = participant.stock.holdings.get(release.version)
        if held is not None and held.release == release:
            memory.close()
            return None
        if held is not None:
            directory.check_higher([held.release], release.version, self._share)
        if self._has_deltas and not release.lent:
            number = chooser_on(asyncio.get_running_loop()).getrandbits(128)
            release = replace(release, id=number.to_bytes(16), always=self._always)
        holding = Holding(release)
        holding.take(memory, release.parts)
        return holding

    async def _announce(self, holding: Holding) -> None:
        participant, release = self._participant, holding.release
        # Shares are encoded when slices of them are asked for.
        is_encoded = bool(release.id) and self._shares == 1
        holding.is_begun = not is_encoded  # else it is not yet known whether it will be encoded
        clock = asyncio.get_running_loop().time
        participant.stock.rations[holding] = Ration(release.nbytes, clock, 2 * BEAT)
        participant.stock.holdings[release.version] = holding
        self._lent = [one for one in self._lent if not one.gone.is_set()]
        if release.lent:
            self._lent.append(holding)
        is_again = directory.may_be_again(participant.releases, release.version, self._share)
        adding = partial(directory.with_release, new=release, keep=self._keep, before=self._before)
        try:
            known = await participant.store.until_done(
                lambda: participant.store.change(
                    directory.RELEASES, Release, adding, participant.releases
                )
            )
        except BaseException:
            # It is unknown whether the coordinator has it, so make sure that it is not found here.
            # It may be gone from here already, if it was taken back or this publisher is closed.
            participant.stock.drop(holding)
            holding.retire()
            await self.take_back(release.version)
            raise
        if is_again:
            participant.say()  # it may have said that it does not have the version
        if is_encoded:
            self._encoding.published(holding)
        kept = {one.version for one in known}
        for old in [one for one in participant.stock.holdings if one not in kept]:
            participant.stock.holdings.pop(old).retire()
        dropped = {one.version for one in participant.releases if one.version not in kept}
        participant.releases = known
        # It is published, so the caller must not wait for this.
        participant.tasks.adopt(asyncio.ensure_future(self._forget_lines(dropped)))

    async def _forget_lines(self, dropped: set[int]) -> None:
        for version in dropped:
            # A line that is left takes only a few bytes.
            with suppress(AiodistError):
                await self._participant.store.delete(directory.line(version))

    async def _take_place(self, *, enters: bool = False) -> None:
        """Become the publisher, maybe after another one has died."""
        participant = self._participant
        while True:
            seats, me = await participant.store.seats(), self._seat()
            rivals = directory.rivals(seats, me)
            if enters and not rivals and participant.store.is_restarted:
                enters = False
                with participant.store.awaiting(
                    "the coordinator was restarted, and a publisher from before may come back"
                    f" within {GONE:g} s: give a longer timeout"
                ):
                    await asyncio.sleep(GONE)
                continue
            if not rivals and me in seats:
                return
            heard = await participant.heard_of(one.place for one in rivals)
            alive = [one for one in rivals if one.id in heard]
            if not alive:
                if await self._sit(rivals):
                    return
                continue
            with participant.store.awaiting(
                "a publisher may be alive, and it takes about"
                f" {SIGNS * BEAT:g} s to hear whether it is: end it first, use another name, or"
                " give a longer timeout"
            ):
                if self._own() or await participant.store.lives(alive[0].id):
                    raise JoinError(self._taken(alive[0]))

    def _seat(self) -> Seat:
        place = self._participant.store.place
        return Seat(place.id, place.host, self._share, self._shares)

    def _taken(self, other: Seat) -> str:
        what = f"the channel {self._participant.channel!r} has a publisher already"
        if other.shares != self._shares:
            what += f", of part {other.share} of {other.shares}; this is one of {self._shares}"
        elif self._shares > 1:
            what += f", of part {self._share} of {self._shares}"
        return f"{what}: end it first, or use another name"

    async def _keep_place(self) -> None:
        """List this publisher again, because a restarted coordinator has forgotten it."""
        beaten = self._participant.beaten
        if await self._sit([]):
            self._kept = beaten

    async def _sit(self, gone: list[Seat]) -> bool:
        """Take the place of these publishers, unless another one has it."""
        me = self._seat()

        def taking(seats: Sequence[Seat]) -> list[Seat] | None:
            if me not in seats:
                self._knows_before = False
            return directory.seated(seats, me, gone)

        return me in await self._participant.store.change(directory.PUBLISHER, Seat, taking)

    def _own(self) -> list[Release]:
        return sorted(
            (one.release for one in self._participant.stock.holdings.values()),
            key=lambda release: release.version,
        )
