"""What the page shows, as plain data: what the groups do now, and their last minutes.

All times are seconds ago, because the browser's clock may differ. The size is bounded: of many
groups, those with trouble come first, then the others in the order in which they came. The ranks of
a group are chosen in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from aiodist.membership import words
from aiodist.membership.group import ranks_text
from aiodist_server.history import WINDOW, Event, GroupHistory, History, Row
from aiodist_server.states import SEVERITY, State, states

MOST_GROUPS = 16
"""How many groups are shown. Of the others, only names."""
MOST_NAMES = 100
MOST_RANKS = 64
"""How many ranks of one group are shown."""
MOST_LISTED = 16
"""How many other entries are listed: waiting ranks, lost ranks, culprits of one finding."""


def picture(found: Mapping[str, Any], history: History, now: float) -> dict[str, Any]:
    """Make the picture. `found` is the last answer of `Coordinator.survey`, which `history` has
    taken."""
    plains = {
        (group["name"], group["run_id"]): group
        for group in found["groups"]
        if not group["channel"] and not group.get("averager")
    }
    # Groups with trouble first, then in the order in which they came, then ended ones.
    keys = sorted(
        [*plains, *(key for key in history.groups if key not in plains)],
        key=lambda key: _urgency(plains.get(key)),
    )
    return {
        "address": found["address"],
        "draining": found["draining"],
        "window": WINDOW,
        "count": len(plains),
        "groups": [
            _group(key, plains.get(key), history.groups.get(key), now) for key in keys[:MOST_GROUPS]
        ],
        "others": [name for name, _ in keys[MOST_GROUPS : MOST_GROUPS + MOST_NAMES]],
        "others_left_out": max(0, len(keys) - MOST_GROUPS - MOST_NAMES),
        "events": _events(history.events, now),
    }


def _urgency(plain: Mapping[str, Any] | None) -> int:
    if plain is None:
        return 2
    return 0 if plain["findings"] or plain["lost"] or plain["absent"] else 1


def _group(
    key: tuple[str, str],
    plain: Mapping[str, Any] | None,
    history: GroupHistory | None,
    now: float,
) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "name": key[0],
        "run": key[1],
        "state": _state(plain),
        "ended": plain is None,
        **_rows(plain, history, now),
        "saved": 0,
        "findings": [],
        "notices": [],
        "series": _series(history, now),
        "events": [] if history is None else _events(history.events, now),
    }
    if plain is not None:
        members = {member["rank"]: member for member in plain["members"]}
        shown["findings"] = [_finding(finding, members) for finding in plain["findings"]]
        shown["notices"] = _notices(plain)
        said = [member["doing"] for member in plain["members"] if member["doing"] is not None]
        shown["saved"] = sum(one["saved"] for one in said)
    return shown


def _state(plain: Mapping[str, Any] | None) -> str:
    if plain is None:
        return "ended"
    if plain["epoch"] is None:
        return f"forming ({plain['wanted']}), {len(plain['waiting'])} here"
    return f"epoch {plain['epoch']}, {len(plain['members'])} of {plain['size']} ranks"


def _notices(plain: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return what a reader should know of a group beside its ranks."""

    def notices(kind: str, texts: Iterable[str], count: int) -> list[dict[str, str]]:
        listed = [{"kind": kind, "text": text} for text in islice(texts, MOST_LISTED)]
        more = [{"kind": kind, "text": f"and {count - MOST_LISTED} more"}]
        return listed + (more if count > MOST_LISTED else [])

    lost, waiting = plain["lost"], plain["waiting"]
    losses = (f"rank {rank} is lost: {reason}" for rank, reason in lost.items())
    shown = notices("lost", losses, len(lost))
    if plain["absent"]:
        who = ranks_text(plain["absent"])
        shown.append({"kind": "absent", "text": f"{who} may still come back to the coordinator"})
    return shown + notices("waiting", map(_joiner, waiting), len(waiting))


def _joiner(one: Mapping[str, Any]) -> str:
    asks = "" if one["rank"] is None else f" as rank {one['rank']}"
    return f"{_who(one)} waits to join{asks}"


def _who(one: Mapping[str, Any]) -> str:
    return one["name"] or f"pid {one['pid']} on {one['host'] or 'an unknown host'}"


def _finding(finding: Mapping[str, Any], members: Mapping[int, Any]) -> dict[str, Any]:
    culprits = [
        {
            "rank": rank,
            "who": _who(members[rank]),
            "doing": words.doing(members[rank]),
            "places": _places(members[rank]),
        }
        for rank in finding["culprits"][:MOST_LISTED]
    ]
    return {
        "text": words.verdict(finding),
        "held": words.held(finding),
        "culprits": culprits,
        "left_out": max(0, len(finding["culprits"]) - MOST_LISTED),
    }


def _places(member: Mapping[str, Any]) -> list[str]:
    return [] if member["doing"] is None else list(member["doing"]["places"])


def _rows(
    plain: Mapping[str, Any] | None, history: GroupHistory | None, now: float
) -> dict[str, Any]:
    """Return the ranks, and former members, each with its last minutes."""
    known = {} if history is None else history.rows
    # Some members may have gone since that survey.
    gone = {one: row for one, row in known.items() if row.gone is not None}
    members = [] if plain is None else [one for one in plain["members"] if one["id"] not in gone]
    there = {} if plain is None else states(plain)
    rows = [
        _row(member["rank"], known.get(member["id"]), member, there.get(member["rank"]), now)
        for member in members
    ]
    rows += [_row(row.rank, row, None, None, now) for row in gone.values()]
    worst = sorted(rows, key=lambda row: (-SEVERITY.index(row["kind"]), row["gone"] is not None))
    shown = sorted(worst[:MOST_RANKS], key=lambda row: (row["rank"], row["gone"] is None))
    return {"rows": shown, "rows_left_out": len(rows) - len(shown)}


def _row(
    rank: int,
    row: Row | None,
    member: Mapping[str, Any] | None,
    state: State | None,
    now: float,
) -> dict[str, Any]:
    """Return one rank. `row` is None without a history, and `member` is None if it is gone."""
    shown = {
        "rank": rank,
        "key": f"n{row.number}" if row is not None else f"r{rank}",
        "kind": "" if state is None else state.kind,
        "gone": None,
        "how": "",
        "came": 0.0,
        "spans": [],
    }
    if member is not None:
        shown |= {name: member[name] for name in ("name", "host", "pid")}
        shown |= {"doing": words.doing(member), "places": _places(member)}
    elif row is not None:
        why = f": {row.reason}" if row.reason else ""
        shown |= {"name": row.name, "host": row.host, "pid": row.pid, "places": []}
        shown |= {"doing": f"{row.how or 'gone'}{why}"}
    if row is not None:
        rate = row.rate if member is not None else None
        shown |= {
            "came": _ago(now, row.came),
            "gone": None if row.gone is None else _ago(now, row.gone),
            "how": row.how,
            "rate": None if rate is None else [_rounded(value) for value in rate],
            "spans": [
                [_ago(now, span.start), _ago(now, span.end), span.kind, span.text]
                for span in row.spans
                if now - span.end < WINDOW
            ],
        }
    return shown


def _series(history: GroupHistory | None, now: float) -> dict[str, list[float | None]]:
    """Return the plots: a list for each field of a `Point`, with "ago" for the time."""
    points = [] if history is None else list(history.points)
    return {
        "ago": [_ago(now, point.when) for point in points],
        **{
            name: [_rounded(getattr(point, name)) for point in points]
            for name in ("slowest", "calls", "fastest", "sent", "received", "wait")
        },
    }


def _events(events: Iterable[Event], now: float) -> list[dict[str, Any]]:
    """Return events, the newest first."""
    shown = [
        {"ago": _ago(now, one.when), "kind": one.kind, "text": one.text}
        for one in events
        if now - one.when < WINDOW
    ]
    return shown[::-1]


def _ago(now: float, when: float) -> float:
    return round(max(0.0, now - when), 1)


def _rounded(value: float | None) -> float | None:
    """Round to the digits that can be seen."""
    return None if value is None else float(f"{value:.4g}")
