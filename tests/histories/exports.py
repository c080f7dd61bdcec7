"""Histories in the formats of checkers that others wrote. Pure: a history in, text out.

`edn` is the format of Jepsen's Knossos (``knossos.model/cas-register``). `promela` is a model for
Spin: its states are the calls that have taken effect, and the value that is there. Spin looks for a
way through all of them. There is one if and only if the history is linearizable.
"""

from __future__ import annotations

from collections.abc import Sequence

from recording import Op


def edn(ops: Sequence[Op]) -> str:
    """Return a history for Knossos: one event a line, in the order of time.

    A call whose answer never came has an ``:info``, at the end.
    """
    events: list[tuple[float, int, str]] = []
    for op in ops:
        events.append((op.begun, 1, _event(op, "invoke")))
        if op.ended is None:
            events.append((float("inf"), 2, _event(op, "info")))
        else:
            events.append((op.ended, 0, _event(op, "ok" if _is_done(op) else "fail")))
    return "[" + "\n ".join(text for _, _, text in sorted(events, key=lambda one: one[:2])) + "]\n"


def _is_done(op: Op) -> bool:
    return op.kind != "cas" or bool(op.result)


def _event(op: Op, kind: str) -> str:
    if op.kind == "read":
        value = "nil" if kind != "ok" or not op.result else str(op.result)
    elif op.kind == "write":
        value = str(op.arguments[0])
    else:
        value = f"[{op.arguments[0]} {op.arguments[1]}]"
    return f"{{:process {op.client}, :type :{kind}, :f :{op.kind}, :value {value}}}"


def promela(ops: Sequence[Op]) -> str:
    """Return a model for Spin. It finds an error (an assertion) if the history is linearizable."""
    # A call takes effect once, between its begin and its end. So it may take effect as soon as all
    # calls that had ended before it began have done so. What it does has to fit what it returned.
    lines = ["byte value = 0;"]
    lines += [f"bool done{at};" for at in range(len(ops))]
    lines += ["active proctype linearize() {", "  do"]
    for at, op in enumerate(ops):
        before = [
            f"done{other}"
            for other, one in enumerate(ops)
            if one.ended is not None and one.ended < op.begun
        ]
        guard = " && ".join([f"!done{at}", *before])
        for fits, effect in _steps(op):
            lines.append(f"  :: atomic {{ {guard} && {fits} -> {effect}done{at} = true }}")
    answered = " && ".join(f"done{at}" for at, op in enumerate(ops) if op.ended is not None)
    lines += [f"  :: {answered or 'true'} -> assert(false)", "  :: else -> break", "  od", "}"]
    return "\n".join(lines) + "\n"


def _steps(op: Op) -> list[tuple[str, str]]:
    """Return the ways in which a call may take effect: a condition, and an assignment."""
    known = op.ended is not None
    if op.kind == "read":
        return [(f"value == {op.result}" if known else "true", "")]
    if op.kind == "write":
        return [("true", f"value = {op.arguments[0]}; ")]
    old, new = op.arguments
    done = (f"value == {old}", f"value = {new}; ")
    not_done = (f"value != {old}", "")
    if not known:
        return [done, not_done]
    return [done if op.result else not_done]
