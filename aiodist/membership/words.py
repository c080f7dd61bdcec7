"""What people are told of ranks, of what holds up others, and of events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiodist.membership.group import ranks_text

_MOST_HELD = 8
"""How many operations of one finding are told."""


def duration(seconds: float) -> str:
    """ "12 s", "3 min", "5.2 h"."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def waiting(wait: Mapping[str, Any]) -> str:
    """Describe a pending operation: "all_reduce #57, for rank 2"."""
    return ", ".join(
        [
            wait["what"],
            *([f"for {wait['missing']}"] if wait["missing"] else []),
            *([wait["lacking"]] if wait["lacking"] else []),
        ]
    )


def doing(member: Mapping[str, Any]) -> str:
    """Describe what a member said that it is doing, without the place in its program."""
    said = member["doing"]
    if said is None:
        return f"no answer; last sign of life {duration(member['silent'])} ago"
    if said["busy"]:
        return f"busy for at least {duration(said['busy'])}"
    if not said["waits"]:
        return "in no operation"
    first, *others = said["waits"]
    more = f" (and {len(others)} more)" if others else ""
    return f"{duration(first['seconds'])} in {waiting(first)}{more}"


def verdict(finding: Mapping[str, Any]) -> str:
    """Name the culprits: "rank 2 holds up others"."""
    who = ranks_text(finding["culprits"])
    if finding["lacking"]:
        return str(finding["lacking"])
    if finding["deadlock"]:
        return f"{who} wait for each other"
    return f"{who} {'holds' if len(finding['culprits']) == 1 else 'hold'} up others"


def held(finding: Mapping[str, Any], *, times: bool = True) -> str:
    """Describe what is held up: "ranks 0-1 in all_reduce #57 for 12 s"."""
    ways = [
        f"{ranks_text(one['ranks'])} in {one['what']}"
        + (f" for {duration(one['seconds'])}" if times else "")
        for one in finding["held"][:_MOST_HELD]
    ]
    return "; ".join(ways + ["..."] * (len(finding["held"]) > _MOST_HELD))


def happened(event: str, ranks: str, fields: Mapping[str, Any]) -> str:
    """Describe an event in a sentence. `ranks`: "rank 2", "ranks 0-3"; "" for none."""
    size = fields.get("size")
    members = f"{size} rank{'' if size == 1 else 's'}"
    reason = f": {fields['reason']}" if fields.get("reason") else ""
    who = fields.get("who", "")
    match event:
        case "formed":
            return f"epoch {fields['epoch']} begins with {members}"
        case "went on":
            return f"epoch {fields['epoch']} goes on with {members}"
        case "restored":
            return f"epoch {fields['epoch']} of {members} is known again"
        case "waiting":
            return f"{ranks or 'a process'} asked to join" + (f": {who}" if who else "")
        case "withdrawn":
            return f"{who} does not wait any more{reason}"
        case "lost":
            return f"{ranks} lost{reason}"
        case "back":
            return f"{ranks} came back to the coordinator"
        case "silent":
            return f"nothing is heard of any member ({fields['ranks']} ranks)"
        case "stalled":
            missing = f" for {fields['missing']}" if fields.get("missing") else ""
            why = f": {fields['why']}" if fields.get("why") else ""
            waits = f"{fields['what']} has waited for {duration(fields['seconds'])}"
            return f"a stall begins: {waits}{missing}, says {ranks or 'a process'}{why}"
        case "stall over":
            return f"the stall is over, after {duration(fields['seconds'])}"
        case "deleted":
            return "the group has ended"
        case "join refused":
            return f"{who} may not join: {fields.get('kind', '')}"
        case "return refused":
            return f"{who} may not come back{reason}"
        case _:
            return f"{ranks} {event}{reason}".strip()
