"""Tests made of ``assert`` statements, taken apart so that expected values never reach the program under test.

Of ``assert f(3) == [1, 2]`` only ``f(3)`` goes to the sandbox; its value comes back as data and is compared here, so
that a program passes only by giving the right value. What cannot be taken apart (a loop over asserts, two calls
compared with each other) runs in the program's own interpreter, which a program that means to can deceive.
"""

from __future__ import annotations

import ast
import copy
import math
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from verl.errors import RewardError
from verl.rewards.sandbox import hashable

# What is done here, with values of the program's, beside comparing: nothing whose cost is not about that of reading
# them (no products, powers, or formatting).
_HERE: dict[str, Callable[..., Any]] = {
    "abs": abs, "round": round, "len": len, "sorted": sorted, "list": list, "tuple": tuple, "min": min, "max": max,
    "sum": lambda values: sum(values), "set": lambda values=(): set(hashable(values)),
    "frozenset": lambda values=(): frozenset(hashable(values)), "isinstance": isinstance, "isclose": math.isclose,
}  # fmt: skip
_OF_CONSTANTS: dict[str, Callable[..., Any]] = {"range": range, "float": float, "str": str, "Counter": Counter}
_TYPES = {kind.__name__: kind for kind in (int, float, str, dict, bytes, complex, bool, list, tuple, set, frozenset)}
_PLAIN = (
    ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop, ast.Load,
)  # fmt: skip
_MOST = 1000  # of the exponent of a constant

Check = Callable[[Any], bool]


def assert_tests(text: str) -> Iterator[tuple[str, tuple[Check, ...]]]:
    """What runs in one process, and a check for each assert in it, of what it sends.

    One process has the asserts at the top level, one each those of ``check(f)`` where ``check`` is a function of the
    test's, and one each those of every ``test_*()``. Raises RewardError: it is no Python, has no assert, or needs what
    the sandbox does not have.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RewardError("The test in the ground truth is no Python.", error, f"it begins: {text[:60]!r}") from None
    _refuse_foreign(tree)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    top, before, found = _Script(), _Script(), False
    for statement in tree.body:
        called = _called(statement, functions)
        if called is not None:
            inner = before.copy()
            for name, value in zip(_parameters(called), statement.value.args, strict=True):  # type: ignore[attr-defined]
                inner.add(ast.Assign([ast.Name(name, ast.Store())], value))
            inner.add_all(called.body)
            found = True
            yield inner.finished()
            continue
        top.add(statement)
        if not _has_assert(statement) or isinstance(statement, ast.FunctionDef | ast.ClassDef):
            before.add(statement)
    for name, function in functions.items():  # as a test runner does: after the whole file
        if name.startswith("test") and not _parameters(function) and _has_assert(function):
            inner = before.copy()
            inner.add_all(function.body)
            found = True
            yield inner.finished()
    if top.checks:
        yield top.finished()
    elif not found:
        raise RewardError("The test in the ground truth has no assert that is run.", text[:200])


@dataclass
class _Script:
    """Statements for the sandbox in which each assert has become a call that sends values; ``literals``: names that
    have a literal value at this point."""

    body: list[ast.stmt] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    literals: dict[str, ast.expr] = field(default_factory=dict)

    def copy(self) -> _Script:
        return _Script(list(self.body), list(self.checks), dict(self.literals))

    def finished(self) -> tuple[str, tuple[Check, ...]]:
        kept = ast.Module(_without_unused(self.body), [])
        return ast.unparse(ast.fix_missing_locations(kept)), tuple(self.checks)

    def add_all(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.add(statement)

    def add(self, statement: ast.stmt) -> None:
        definition = isinstance(statement, ast.FunctionDef | ast.ClassDef)
        if isinstance(statement, ast.Assert) and self._compared_here(statement.test):
            return
        if _has_assert(statement) and not definition:
            self._run_inside(statement)
        else:
            self.body.append(statement)
        for name in _touched(statement):
            self.literals.pop(name, None)
        if isinstance(statement, ast.Assign) and _is_constant(statement.value):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    self.literals[target.id] = statement.value

    def _run_inside(self, statement: ast.stmt) -> None:
        token = secrets.token_hex(16)  # it must be found before it can be told
        send = ast.parse(f"__send__(lambda: {token!r})").body
        # What is raised ends this test only.
        handler = ast.ExceptHandler(ast.Name("BaseException", ast.Load()), "__e__", ast.parse(_RAISE).body)
        self.body.append(ast.Try([statement, *send], [handler], [], []))
        self.checks.append(lambda value: bool(value == token))

    def _compared_here(self, test: ast.expr) -> bool:
        """Add an assert whose condition can be taken apart; False if it cannot."""
        for pure in (True, False):  # `assert sum([1]) == 1` has no call of the program's, unless sum is the program's
            apart = _Apart(self.literals, pure)
            condition = apart.visit(copy.deepcopy(test))
            if apart.holes:
                break
        if not apart.holes or _is_ambiguous(condition, True):
            return False
        lambdas: list[ast.expr] = [ast.Lambda(_NO_PARAMETERS, hole) for hole in apart.holes]
        self.body.append(ast.Expr(ast.Call(ast.Name("__send__", ast.Load()), lambdas, [])))
        names = [f"__{i}__" for i in range(len(lambdas))]
        code = compile(ast.fix_missing_locations(ast.Expression(condition)), "assert", "eval")
        space: dict[str, Any] = {"__builtins__": {}, **_TYPES, **_HERE, **_OF_CONSTANTS, "math": math}

        def check(value: Any) -> bool:
            values = [value] if len(names) == 1 else value
            return bool(eval(code, {**space, **dict(zip(names, values, strict=True))}))

        self.checks.append(check)
        return True


_RAISE = "def __raise__(e=__e__):\n    raise e\n__send__(__raise__)"
_NO_PARAMETERS = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])


class _Apart(ast.NodeTransformer):
    """Takes a condition apart: what needs the program becomes a hole, the rest is evaluated here; ``pure``: whether the
    functions of ``_HERE`` are Python's own."""

    def __init__(self, literals: dict[str, ast.expr], pure: bool) -> None:
        self._literals, self._pure = literals, pure
        self.holes: list[ast.expr] = []

    def visit(self, node: ast.AST) -> Any:
        if not isinstance(node, ast.expr) or _is_constant(node):
            return node
        if isinstance(node, ast.Name) and node.id in self._literals:
            return self._literals[node.id]
        if isinstance(node, ast.Call) and self._is_pure(node):
            types = isinstance(node.func, ast.Name) and node.func.id == "isinstance"
            node.args = [self.visit(node.args[0]), *node.args[1:]] if types else [self.visit(arg) for arg in node.args]
            return node
        if isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Tuple | ast.List) or (
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)
        ):
            return self.generic_visit(node)
        self.holes.append(node)
        return ast.Name(f"__{len(self.holes) - 1}__", ast.Load())

    def _is_pure(self, node: ast.Call) -> bool:
        name = ast.unparse(node.func).removeprefix("math.")
        simple = not any(isinstance(arg, ast.Starred) for arg in node.args)
        simple = simple and all(keyword.arg and _is_constant(keyword.value) for keyword in node.keywords)
        if name == "isinstance":
            simple = simple and len(node.args) == 2 and _names(node.args[1]) <= set(_TYPES)
        known = name in _HERE or (name in _OF_CONSTANTS and all(map(_is_constant, node.args)))
        return self._pure and known and simple


def _is_ambiguous(condition: ast.AST, top: bool) -> bool:
    """Whether two values of the program's are compared with each other, or which are needed depends on one of them."""
    parts: list[ast.expr] = []
    if isinstance(condition, ast.Compare):
        parts = [condition.left, *condition.comparators]
    elif isinstance(condition, ast.BoolOp) and not (top and isinstance(condition.op, ast.And)):
        parts = condition.values
    if sum(any(name.startswith("__") for name in _names(part)) for part in parts) > 1:
        return True
    top = top and isinstance(condition, ast.BoolOp)
    return any(_is_ambiguous(child, top) for child in ast.iter_child_nodes(condition))


def _is_constant(node: ast.expr) -> bool:
    """Whether it is made of numbers and texts only."""
    for inner in ast.walk(node):
        if not isinstance(inner, _PLAIN):
            return False
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Pow | ast.LShift | ast.Mult):
            right = inner.right
            small = isinstance(right, ast.Constant) and isinstance(right.value, int) and right.value <= _MOST
            if not small and not isinstance(inner.op, ast.Mult):
                return False
    return True


def _called(statement: ast.stmt, functions: dict[str, ast.FunctionDef]) -> ast.FunctionDef | None:
    """The function of the test's own with asserts in it that this statement calls: ``check(f)``."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return None
    call = statement.value
    function = functions.get(call.func.id) if isinstance(call.func, ast.Name) else None
    if function is None or not _has_assert(function) or call.keywords or len(call.args) != len(_parameters(function)):
        return None
    leaves = any(isinstance(node, ast.Return | ast.Yield | ast.Global | ast.Nonlocal) for node in ast.walk(function))
    return None if leaves else function


def _parameters(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args]


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _touched(statement: ast.stmt) -> set[str]:
    """Names whose value a statement may give or change: of anything but an assignment, all that stand in it."""
    if _names_constant(statement):
        assert isinstance(statement, ast.Assign)
        return set().union(*map(_names, statement.targets))
    return _names(statement)


def _without_unused(body: list[ast.stmt]) -> list[ast.stmt]:
    """Without what only names a constant (an expected value) or defines a function (of asserts) that nothing reads."""
    kept = [s for s in body if not isinstance(s, ast.FunctionDef) and not _names_constant(s)]
    while True:
        used = set().union(*map(_names, kept))
        more = [
            s for s in body if s in kept or used & (_touched(s) if _names_constant(s) else {getattr(s, "name", "")})
        ]
        if len(more) == len(kept):
            return more
        kept = more


def _names_constant(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and _is_constant(statement.value)


def _has_assert(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def _refuse_foreign(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name.partition(".")[0] not in {"solution", *sys.stdlib_module_names}:
                fix = "the sandbox has Python's standard library only; leave such rows out"
                raise RewardError("The test in the ground truth imports a package.", name, fix)
        if isinstance(node, ast.ClassDef) and any("TestCase" in ast.unparse(base) for base in node.bases):
            raise RewardError("The test in the ground truth is a unittest class.", node.name, "write asserts instead")
