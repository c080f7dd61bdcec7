"""Answers of `Coordinator.survey`, as a test wants them."""

from __future__ import annotations

from typing import Any


def doing(**more: Any) -> dict[str, Any]:
    """What a rank says of itself: it works, and waits for nothing."""
    return {
        "busy": 0.0, "age": 0.0, "places": [], "last": "", "waits": [],
        "collectives": 0, "sent": 0, "received": 0, "saved": 0, **more,
    }  # fmt: skip


def wait(seconds: float, **more: Any) -> dict[str, Any]:
    return {"what": "barrier #3", "seconds": seconds, "missing": "rank 2", "lacking": "", **more}


def member(rank: int, **more: Any) -> dict[str, Any]:
    return {
        "rank": rank, "id": f"id{rank}", "name": f"n{rank}", "host": "h", "pid": 100 + rank,
        "joined_at": 0.0, "silent": 0.0, "doing": doing(), **more,
    }  # fmt: skip


def group(*members: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "name": "train", "run_id": "r", "wanted": "size 3", "epoch": 1, "size": len(members),
        "members": list(members), "waiting": [], "lost": {}, "left": [], "absent": [],
        "store": {"keys": 0, "bytes": 0}, "findings": [], "channel": "", **more,
    }  # fmt: skip


def finding(*culprits: int, **more: Any) -> dict[str, Any]:
    held = [{"what": "barrier #3", "ranks": (0, 1), "seconds": 4.0}]
    return {"culprits": culprits, "held": held, "deadlock": False, "lacking": "", **more}


def found(*groups: dict[str, Any]) -> dict[str, Any]:
    return {
        "address": "tcp://127.0.0.1:1",
        "draining": False,
        "groups": list(groups),
        "channels": [],
    }


def participant(number: int, **said: Any) -> dict[str, Any]:
    """A subscriber of a channel that is 2 versions behind, unless something else is said."""
    fields = {
        "version": 5, "newest": 7, "nbytes": 1000, "here": 0, "behind": 3.0, "memory": 0,
        "sent": 0, "received": 0, "saved": 0, "changed": 0.0, "chain": 0, "fallbacks": 0,
        "whole": 0, "lag": 2, **said,
    }  # fmt: skip
    return {
        "id": f"id{number}", "name": "", "host": "h", "pid": 100 + number, "publishes": False,
        "said": fields,
    }  # fmt: skip


def channel(*participants: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "name": "policy", "run_id": "r", "newest": 7, "nbytes": 1000,
        "participants": list(participants), **more,
    }  # fmt: skip
