"""Small faults, one at a time: which of them can be made in a source file, and the file with one.

Pure: text in, text out. A fault replaces one expression or one statement; all other text stays as
it is, so that the line numbers in tracebacks are right."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_FLIPPED: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
_OTHER: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}


@dataclass(frozen=True)
class Mutant:
    """One fault. `start` and `end` are positions in the UTF-8 bytes of the file."""

    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    def apply(self, source: str) -> str:
        data = source.encode()
        return (data[: self.start] + self.after.encode() + data[self.end :]).decode()

    def __str__(self) -> str:
        was, becomes = (" ".join(text.split()) for text in (self.before, self.after))
        return f"line {self.line}, {self.kind}: {was[:70]} -> {becomes[:70]}"


def mutants(source: str) -> list[Mutant]:
    """All that are known here, in the order of the text."""
    return sorted(_Finder(source).found, key=lambda one: (one.start, one.end, one.kind, one.after))


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.data = source.encode()
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Mutant] = []
        self.visit(ast.parse(source))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr):  # Python 3.11 does not say where its parts are
            return
        if isinstance(node, ast.If) and _is_for_types(node.test):
            return
        for kind, after in _faults(node):
            self._add(node, kind, after)
        if isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Constant):
            self._add(node.test, "condition", f"(not {_text(node.test)})")
        for name, child in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
                continue
            for one in child if isinstance(child, list) else [child]:
                if isinstance(one, ast.AST):
                    self.visit(one)

    def _add(self, node: ast.AST, kind: str, after: str) -> None:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        before = self.data[start:end].decode()
        # A fault that took several lines must take as many, or all after it would move.
        after += "\n" * before.count("\n") if isinstance(node, ast.stmt) else ""
        self.found.append(Mutant(node.lineno, kind, start, end, before, after))


def _is_for_types(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def _faults(node: ast.AST) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in _FLIPPED:
            for other in _FLIPPED[type(operator)]:
                yield "comparison", f"({_text(left)} {other} {_text(right)})"
        case ast.Constant(bool() as value):
            yield "constant", str(not value)
        case ast.Constant(int() as value):
            yield "constant", str(value + 1)
        case ast.BoolOp(ast.And(), values):
            yield "and, or", "(" + " or ".join(map(_text, values)) + ")"
        case ast.BoolOp(ast.Or(), values):
            yield "and, or", "(" + " and ".join(map(_text, values)) + ")"
        case ast.BinOp(left, operator, right) if type(operator) in _OTHER:
            if not (isinstance(left, ast.Constant) and isinstance(left.value, str)):
                yield "operator", f"({_text(left)} {_OTHER[type(operator)]} {_text(right)})"
        case ast.UnaryOp(ast.Not(), operand):
            yield "condition", f"({_text(operand)})"
        case ast.IfExp(test, body, otherwise):
            yield "condition", f"({_text(otherwise)} if {_text(test)} else {_text(body)})"
        case ast.Call(function, [first, second, *rest], keywords) if not any(
            isinstance(one, ast.Starred) for one in (first, second)
        ):
            if ast.dump(first) != ast.dump(second):
                swapped = ast.Call(function, [second, first, *rest], keywords)
                yield "arguments", _text(swapped)
        case ast.Expr(ast.Call()) | ast.Expr(ast.Await()) | ast.AugAssign() | ast.Raise():
            yield "statement", "pass"
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield "statement", "pass"
        case ast.Return(value) if value is not None and not _is_none(value):
            yield "statement", "return None"


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _text(node: ast.expr) -> str:
    simple = isinstance(node, ast.Name | ast.Attribute | ast.Constant | ast.Call | ast.Subscript)
    return ast.unparse(node) if simple else f"({ast.unparse(node)})"
