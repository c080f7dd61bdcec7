"""`Store`: a torch Store that a coordinator of aiodist keeps."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import ParamSpec, TypeVar

from torch._C import _distributed_c10d as c10d

import aiodist
from aiodist.threads.engine import engine
from aiodist_torch.errors import StoreTimeoutError, as_torch
from aiodist_torch.membership import Membership

T = TypeVar("T")
P = ParamSpec("P")

TIMEOUT = timedelta(seconds=300)


class Store(c10d.Store):
    """A torch Store on the store of an aiodist group.

    Use it for anything that meets at a torch Store: any backend's ``init_process_group(…,
    store=…)``, torch's `PrefixStore`, torch's own barriers.

    `address` is the coordinator's (``aiodist coordinator --listen …``, or any
    `aiodist.Coordinator`). `world_size` processes open the store called `name` together, and the
    constructor returns once all have. `rank` is the wanted one, or -1 for any. `timeout` is for
    that meeting, and for `get` and `wait`. The store is gone when the last of these processes has
    closed it or exited. `token` is as for `aiodist.connect`.

    A key has 1 to 1024 characters, and a value at most 1 MiB. There are no queues, and keys can be
    neither listed nor counted.

    Raises what `aiodist.connect` raises.
    """

    timeout: timedelta
    """How long `get` and `wait` wait for keys. torch's class has it, and `set_timeout`."""

    def __init__(
        self,
        address: str,
        world_size: int,
        *,
        rank: int = -1,
        name: str = "torch",
        timeout: timedelta = TIMEOUT,
        token: str | bytes | None = None,
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)  # kept by torch's class, so that a PrefixStore can set it
        seconds = timeout.total_seconds()
        self._engine = engine()

        async def join() -> aiodist.Group:
            return await aiodist.connect(
                address,
                group=f"store:{name}",
                rank=None if rank < 0 else rank,
                size=world_size,
                timeout=seconds,
                op_timeout=seconds,
                token=token,
            )

        self._membership = Membership(self._engine, self._run(join))
        self._store = self._membership.group.store

    def _run(self, call: Callable[P, Awaitable[T]], *args: P.args, **options: P.kwargs) -> T:
        async def run() -> T:
            return await call(*args, **options)

        try:
            return self._engine.wait_for(run())
        except aiodist.CollectiveTimeoutError as error:
            raise as_torch(error, StoreTimeoutError) from None
        except aiodist.AiodistError as error:
            raise as_torch(error) from None

    def close(self) -> None:
        """Leave the store to the others. Idempotent. The exit of the process does it, too."""
        self._membership.leave()

    # -- what torch calls -------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set `key` to `value`."""
        self._run(self._store.set, key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of `key`, and wait for it.

        Raises CollectiveTimeoutError, which is also a `dist.DistStoreError`, after the timeout.
        """
        while (value := self._run(self._store.get, key)) is None:
            self.wait([key])  # again, if it is deleted before it is read
        return value

    def add(self, key: str, value: int) -> int:
        """Add to the number at `key` (0 if there is none), and return the sum."""
        return self._run(self._store.add, key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Add bytes to the end of the value of `key`."""
        while True:
            # Another rank may append between this and the next line. The value has changed then,
            # and we try again.
            old = self._run(self._store.get, key)
            new = (old or b"") + _bytes(value)
            if self._run(self._store.compare_set, key, old, new):
                return

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set `key` if it holds `expected_value`, or if it does not exist and that is empty.

        Returns the value that it has then. If it still does not exist, returns `expected_value`.
        """
        want, give = _bytes(expected_value), _bytes(desired_value)
        # For torch, an empty expected value means an empty value or none at all. The store tells
        # these apart, so both are tried.
        for old in (want, None) if not want else (want,):
            if self._run(self._store.compare_set, key, old, give):
                return give
        found = self._run(self._store.get, key)
        return want if found is None else found

    def check(self, keys: list[str]) -> bool:
        """Whether all of `keys` exist."""
        return all(self._run(self._store.get, key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all of `keys` exist. Raises as `get` does."""
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        self._run(self._store.wait, keys, timeout=seconds if seconds > 0 else math.inf)

    def delete_key(self, key: str) -> bool:
        """Delete `key`. Returns False if there was none."""
        return self._run(self._store.delete, key)

    deleteKey = delete_key  # the name by which a PrefixStore calls it

    def getNumKeys(self) -> int:
        """Raise NotImplementedError: a coordinator does not count the keys of a store."""
        raise NotImplementedError("aiodist_torch.Store cannot count its keys: count them with add")

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of `keys`, and wait for them."""
        self.wait(keys)
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Set each of `keys` to its value. Raises ValueError if there is not one for each."""
        if len(keys) != len(values):
            raise ValueError(
                f"{len(keys)} keys and {len(values)} values: give one value for each key"
            )
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Tell torch that there are `append`, `multi_get` and `multi_set`."""
        return True

    def clone(self) -> Store:
        """Return this store itself, because several threads may use it."""
        return self


def _bytes(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes | bytearray | memoryview):  # of a number, bytes() makes zeros
        raise TypeError(f"a value is a str or bytes, not {value!r}: pass str(value)")
    return bytes(value)
