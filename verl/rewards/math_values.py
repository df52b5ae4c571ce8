r"""Values of simple expressions, by which most wrong answers are told from the right one without any algebra.

What is read: numbers, single letters, ``\pi``, signs, products written or not, powers, ``\frac``, ``\sqrt`` and
brackets. Whatever could mean two things (``1/2x``, ``f(x)``, ``2\frac{1}{2}``, ``ab``, ``e``, ``i``) has no value here.
"""

from __future__ import annotations

import math
import re
from decimal import Context, Decimal, DivisionByZero, InvalidOperation, Overflow, localcontext

_TOKEN = re.compile(r"\d+(?:\.\d+)?|\.\d+|\\(?:frac|sqrt|pi|cdot|times)(?![a-zA-Z])|[a-df-hj-zA-Z]|[-+*/^(){}]")
# Neighbours that could mean two things: a number behind what it may multiply, two letters or a function's argument,
# a mixed number.
_UNCLEAR = re.compile(r"(?:[\d)}]|\\pi) [\d.]|(?<!\S)[a-zA-Z] [\d.a-zA-Z(]|\d \\frac")
# With these digits no sum of terms up to the limit is rounding alone.
_EXACT = Context(prec=100, Emax=40, traps=[InvalidOperation, DivisionByZero, Overflow])
LEAST_GAP = 1e-6  # relative, of values that are told apart
_TIMES = ("*", r"\cdot", r"\times")


class _NoValueError(Exception):
    """It is no simple expression."""


def surely_differ(one: str, other: str) -> bool:
    """Whether both are simple expressions, and have unequal values where every letter is a number of its own."""
    left, right = value_at_a_point(one), value_at_a_point(other)
    if left is None or right is None:
        return False
    return abs(left - right) > LEAST_GAP * max(1.0, abs(left), abs(right))


def value_at_a_point(text: str) -> float | None:
    """Of an expression with :func:`value_of` each letter; None: it is not known here, or the text is one letter."""
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != "".join(text.split()) or _UNCLEAR.search(" ".join(tokens)):
        return None
    if len(tokens) == 1 and tokens[0].isalpha():
        return None
    rest = tokens[::-1]
    try:
        with localcontext(_EXACT):
            value = _sum(rest)
    except (_NoValueError, ArithmeticError, IndexError, RecursionError):
        return None
    return None if rest else float(value)


def value_of(letter: str) -> float:
    return 0.5 + math.sqrt(ord(letter))


# Each takes what it reads from the end of ``rest``, the tokens in reverse.


def _sum(rest: list[str]) -> Decimal:
    value = _product(rest)
    while rest and rest[-1] in ("+", "-"):
        value += _product(rest) if rest.pop() == "+" else -_product(rest)
    return value


def _product(rest: list[str]) -> Decimal:
    value, divided = _signed(rest), False
    while rest and rest[-1] not in ("+", "-", ")", "}"):
        sign = rest.pop() if rest[-1] in (*_TIMES, "/") else None
        if divided and sign is None:
            raise _NoValueError
        divided |= sign == "/"
        value = value / _signed(rest) if sign == "/" else value * _signed(rest)
    return value


def _signed(rest: list[str]) -> Decimal:
    sign = 1
    while rest[-1] in ("+", "-"):
        sign = -sign if rest.pop() == "-" else sign
    return sign * _power(rest)


def _power(rest: list[str]) -> Decimal:
    base = _single(rest)
    if not rest or rest[-1] != "^":
        return base
    rest.pop()
    value = base ** _group(rest)
    if rest and rest[-1] == "^":
        raise _NoValueError
    return value


def _single(rest: list[str]) -> Decimal:
    token = rest.pop()
    if token in ("(", "{"):
        value = _sum(rest)
        if rest.pop() != {"(": ")", "{": "}"}[token]:
            raise _NoValueError
        return value
    if token == r"\frac":
        return _group(rest) / _group(rest)
    if token == r"\sqrt":
        return _group(rest).sqrt()
    if token == r"\pi":
        return Decimal(math.pi)
    return Decimal(value_of(token) if token.isalpha() else token)  # an ArithmeticError for what is no number


def _group(rest: list[str]) -> Decimal:
    """In braces, or the one token that TeX would take."""
    token = rest[-1]
    if token != "{" and not token.isalpha() and not (token.isdigit() and len(token) == 1):
        raise _NoValueError
    return _single(rest)
