"""Status of channels of weights, read from the shared store of their participants.

`aiodist.wire.channels` defines what participants write there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from aiodist.membership.group import GroupKey, GroupState
from aiodist.wire import channels


def status(groups: Iterable[GroupState]) -> list[dict[str, Any]]:
    """Describe each channel in plain data.

    "name", "run_id"; "newest", the newest version that any participant knows of (None: there is
    none), and its "nbytes". "participants": in the order in which they came, each with "id",
    "name", "host" and "pid", whether it "publishes", and "said".

    "said" is None if the participant gives no sign of life. Else it has the other fields of
    `channels.Said` and "lag", by how much its version number is lower than the newest (None: it has
    no version).
    """
    found: dict[GroupKey, list[dict[str, Any]]] = {}
    for group in groups:
        known = channels.participant_in(group.name)
        # Any group may have such a name, but a participant is a group of one.
        if known is not None and group.view is not None and len(group.view.members) == 1:
            channel, who = known
            found.setdefault((channel, group.run_id), []).append(_participant(group, who))
    return [_channel(key, participants) for key, participants in found.items()]


def subscribers(groups: Iterable[GroupState]) -> list[GroupState]:
    """The connected participants of a channel that do not publish."""
    return [
        group
        for group in groups
        if group.members
        and (known := channels.participant_in(group.name)) is not None
        and not _publishes(group, known[1], channels.said_in(_at(group, known[1])))
    ]


def _at(group: GroupState, who: str) -> bytes | None:
    return group.store.values.get(channels.at(who))


def _publishes(group: GroupState, who: str, said: channels.Said | None) -> bool:
    # A silent participant has said before whether it publishes.
    publishers = channels.publishers_in(group.store.values.get(channels.PUBLISHER))
    return who in publishers if said is None else said.publishes


def _participant(group: GroupState, who: str) -> dict[str, Any]:
    assert group.view is not None
    [member] = group.view.members
    said = channels.said_in(_at(group, who))
    return {
        **{name: getattr(member, name) for name in ("id", "name", "host", "pid")},
        "publishes": _publishes(group, who, said),
        "said": None
        if said is None
        else {name: value for name, value in asdict(said).items() if name != "publishes"},
    }


def _channel(key: GroupKey, participants: list[dict[str, Any]]) -> dict[str, Any]:
    name, run_id = key
    heard = [one["said"] for one in participants if one["said"] is not None]
    newest = max(
        (said for said in heard if said["newest"] is not None),
        key=lambda said: said["newest"],
        default={"newest": None, "nbytes": 0},
    )
    for said in heard:
        said["lag"] = None
        if said["version"] is not None and newest["newest"] is not None:
            said["lag"] = max(0, newest["newest"] - said["version"])
    return {
        "name": name,
        "run_id": run_id,
        "newest": newest["newest"],
        "nbytes": newest["nbytes"],
        "participants": participants,
    }
