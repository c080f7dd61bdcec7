"""The state that a member of an averager gives to new ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from aiodist.buffers import arrays
from aiodist.buffers.encoding import encode
from aiodist.wire.averaging import Reached


class AveragerState(NamedTuple):
    """What a new member begins with: the `tree` that another member has published, and the `rounds`
    of its parts at that time.

    For example::

        async with aiodist.averager("outer", address=group.address) as avg:
            await avg.publish_state({"w": np.ones(3)})
            found = await avg.state()
            assert found.tree["w"].sum() == 3 and found.rounds == avg.rounds
            await group.barrier()  # the member that has the state stays until all have it
    """

    tree: Any
    rounds: dict[str, int]


@dataclass(frozen=True, slots=True)
class Kept:
    """A tree of the member's own, or a function that returns one. `reached`: by part, the last
    result of which it is. `is_own`: whether this member has published it."""

    tree: Any
    reached: dict[str, Reached]
    is_own: bool = True

    @property
    def rounds(self) -> dict[str, int]:
        """The rounds of the parts that have had one."""
        return {part: one.round for part, one in self.reached.items() if one.round}

    def copied(self) -> Any:
        """A tree that the program does not change. Raises what its function raises."""
        return copy_of(self.tree() if callable(self.tree) else self.tree)

    def packed(self) -> tuple[Any, dict[str, tuple[int, bytes]]]:
        """The state as it travels. Raises what the function of the program raises, and TypeError if
        its tree does not travel."""
        reached = {part: (one.round, one.digest) for part, one in self.reached.items()}
        if not callable(self.tree):
            return self.tree, reached  # it never changes, and it was checked
        tree = self.tree()
        check_travels(tree)
        return copy_of(tree), reached


def unpacked(found: tuple[Any, dict[str, tuple[int, bytes]]]) -> Kept:
    """What `packed` gave on another member."""
    tree, reached = found
    return Kept(tree, {part: Reached(*one) for part, one in reached.items()}, is_own=False)


def check_travels(tree: Any) -> None:
    """Raise TypeError if a tree cannot be given to other members."""
    try:
        encode(tree)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"a state has to travel to new members, and averagers take no pickles: {error}"
        ) from None


def copy_of(tree: Any) -> Any:
    """A tree with copies of its arrays. Anything else, which cannot change, stays as it is."""
    return mapped(tree, _copy)


def mapped(tree: Any, work: Callable[[Any], Any]) -> Any:
    """A tree with `work` done to its leaves."""
    if isinstance(tree, dict):
        return {key: mapped(one, work) for key, one in tree.items()}
    if isinstance(tree, list):
        return [mapped(one, work) for one in tree]
    if isinstance(tree, tuple):
        found = [mapped(one, work) for one in tree]
        return type(tree)(*found) if hasattr(tree, "_fields") else tuple(found)
    return work(tree)


def _copy(leaf: Any) -> Any:
    array = arrays.view(leaf, "value")
    if array is None or array.kind == "scalar":
        return leaf
    made = arrays.empty(array.kind, array.name, array.shape, "value")
    flat, staged = made.stage()
    flat[:] = array.read()
    made.commit(staged)
    return made.value
