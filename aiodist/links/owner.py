"""The actor to which an endpoint belongs, as the endpoint sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class EndpointOwner:
    """What an endpoint tells and asks the actor that it belongs to. This one does nothing."""

    def link_broke(self, root: int, reason: str, ended: bool) -> None:
        """Hear that the link to a peer is gone, though the peer has not said that it leaves. The
        coordinator rules on it. `ended`: its process has ended."""

    def task_failed(self, error: BaseException) -> None:
        """Hear of an unexpected exception of a background task."""

    def exhausted(self, error: OSError) -> None:
        """Hear that a link cannot be made, because this process has no files left."""

    def expects_ruling(self, *, later: bool = False) -> bool:
        """Tell whether there is a coordinator to rule which rank is lost if a link breaks.

        `later`: one that is away counts, too, because it may come back.
        """
        return False

    async def caught_up(self, seconds: float = 0.0) -> None:
        """Wait until the coordinator, if there is one that answers, has said which ranks are gone.

        Wait at most `seconds` for one that is away.
        """

    def ask(
        self, roots: Sequence[int], tell: Callable[[dict[int, str]], None], seconds: float
    ) -> None:
        """Ask the coordinator, if there is one, what peers are doing. ``tell(texts)`` is called
        with texts by root, within so many seconds."""

    def tells_who_leaves(self, context: bytes) -> bool:
        """Return whether this rank hears from the coordinator which ranks leave this group. The
        coordinator does not know of groups that were made of others."""
        return False
