"""Averagers: what the page shows of them, as plain data.

Pure, as `aiodist_server.channels`. The coordinator itself keeps the last rounds of each part, so
nothing is kept here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiodist_server.history import MOST_TEXT

MOST_AVERAGERS = 16
MOST_PARTS = 16
"""How many parts of one averager are shown."""
MOST_MEMBERS = 64
"""How many members are shown in each part."""

Plain = Mapping[str, Any]
"""What `aiodist.membership.averagers` says of an averager, or of a part of it."""


def averagers(found: Plain) -> list[dict[str, Any]]:
    """Return what the page shows of an answer of `Coordinator.survey`."""
    return [_shown(one) for one in found["averagers"][:MOST_AVERAGERS]]


def _shown(averager: Plain) -> dict[str, Any]:
    said = [one["said"] for one in averager["members"] if one["said"] is not None]
    parts = averager["parts"]
    return {
        "name": averager["name"],
        "run": averager["run_id"],
        "count": len(averager["members"]),
        "silent": len(averager["members"]) - len(said),
        **{rule: averager[rule] for rule in ("quorum", "grace", "codec", "op")},
        "saved": sum(one["saved"] for one in said),
        "parts": [_part(part, averager) for part in parts[:MOST_PARTS]],
        "left_out": max(0, len(parts) - MOST_PARTS),
    }


def _part(part: Plain, averager: Plain) -> dict[str, Any]:
    """Return a part with a row for each member, which has a cell for each of its last rounds."""
    here = {
        one["name"]: f"pid {one['pid']} on {one['host'] or 'an unknown host'}"
        for one in averager["members"]
        if part["part"] in one["parts"]
    }
    rounds = part["rounds"]
    # Members that are gone are shown for as long as a round that is shown has them.
    once = [name for one in rounds for name in (*one["contributors"], *one["late"])]
    names = [*here, *dict.fromkeys(name for name in once if name not in here)]
    return {
        "part": part["part"][:MOST_TEXT],
        "round": part["round"],
        "grace": part["grace"],
        "state": part["state"],
        "contributed": len(part["contributed"]),
        "missing": [name[:MOST_TEXT] for name in part["missing"][:MOST_MEMBERS]],
        "rounds": [[one["round"], one["seconds"]] for one in rounds],
        "members": [
            {
                "name": name[:MOST_TEXT],
                "where": here.get(name, "gone"),
                "gone": name not in here,
                "cells": [_cell(one, name) for one in rounds],
            }
            for name in names[:MOST_MEMBERS]
        ],
        "left_out": max(0, len(names) - MOST_MEMBERS),
    }


def _cell(one: Plain, name: str) -> list[Any]:
    """Return what a member was in a round, and its weight, or by how many seconds it was late."""
    if name in one["contributors"]:
        return ["in", one["weights"][one["contributors"].index(name)]]
    if name in one["late"]:
        return ["late", one["late"][name]]
    return ["out", None]
