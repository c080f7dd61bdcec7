"""An averager as the coordinator tells of it."""

from __future__ import annotations

from typing import Any


def averager(**more: Any) -> dict[str, Any]:
    """With one part, which had a round that m2 was late for, and waits for m1."""
    last = {"round": 7, "seconds": 1.5, "contributors": ["m0", "m1"], "weights": [1.0, 2.0]}
    part = {
        "part": "encoder",
        "round": 7,
        "grace": 0.5,
        "state": "open",
        "contributed": ["m0"],
        "missing": ["m1"],
        "late": {"m2": (7, 3.0)},
        "rounds": [last | {"late": {"m2": 3.0}}],
    }
    members = [
        {
            "id": f"id{one}", "name": f"m{one}", "host": "h", "pid": one, "parts": ["encoder"],
            "said": {"sent": 100, "received": 50, "saved": 1000 * one},
        }
        for one in range(3)
    ]  # fmt: skip
    rules = {"quorum": 2, "grace": None, "codec": "int8(block=256)", "op": "AVG"}
    return {"name": "outer", "run_id": "", **rules, "members": members, "parts": [part], **more}
