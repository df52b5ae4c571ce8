r"""Values of simple expressions, by which most wrong answers are told from the right one without any algebra.

What is read: numbers, single letters, ``\pi``, signs, products written or not, powers, ``\frac``, ``\sqrt`` and
brackets. Whatever could mean two things (``1/2x``, ``f(x)``, ``2\frac{1}{2}``, ``ab``, ``e``, ``i``) has no value here.
"""

from __future__ import annotations

import math
import re

_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+|\\(?:frac|sqrt|pi|cdot|times)(?![a-zA-Z])|[a-df-hj-zA-Z]|[-+*/^(){}])")
MOST_LOST = 1e6  # a sum so much smaller than its terms is rounding
LEAST_GAP = 1e-6  # relative, of values that are told apart
_CLOSING = {"(": ")", "{": "}"}
_TIMES = ("*", r"\cdot", r"\times")


class _NoValueError(Exception):
    """It is no simple expression, or has no real value."""


def surely_differ(one: str, other: str) -> bool:
    """Whether both are simple expressions, and have unequal values where every letter is a number of its own."""
    left, right = value_at_a_point(one), value_at_a_point(other)
    if left is None or right is None:
        return False
    return abs(left - right) > LEAST_GAP * max(1.0, abs(left), abs(right))


def value_at_a_point(text: str) -> float | None:
    """Of an expression with :func:`value_of` each letter; None: it is not known here, or the text is one letter."""
    tokens, at = [], 0
    while text[at:].strip():
        found = _TOKEN.match(text, at)
        if found is None:
            return None
        tokens.append(found[1])
        at = found.end()
    if len(tokens) == 1 and tokens[0].isalpha():
        return None
    reader = _Reader(tokens)
    try:
        value = reader.sum()
    except (_NoValueError, ArithmeticError, ValueError, RecursionError):
        return None
    return value if reader.at_end and isinstance(value, float) and math.isfinite(value) else None


def value_of(letter: str) -> float:
    return 0.5 + math.sqrt(ord(letter))


class _Reader:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at = tokens, 0

    @property
    def at_end(self) -> bool:
        return self._at == len(self._tokens)

    def _peek(self) -> str:
        return "" if self.at_end else self._tokens[self._at]

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1] if self._at <= len(self._tokens) else ""

    def sum(self) -> float:
        terms = [self._product()]
        while self._peek() in ("+", "-"):
            terms.append(self._product() if self._next() == "+" else -self._product())
        value = sum(terms)
        if len(terms) > 1 and max(map(abs, terms)) > MOST_LOST * abs(value):
            raise _NoValueError
        return value

    def _product(self) -> float:
        value, divided, before = self._signed(), False, self._tokens[self._at - 1]
        while (token := self._peek()) and token not in "+-)}":
            if token in _TIMES:
                self._next()
                value *= self._signed()
            elif token == "/":
                self._next()
                value /= self._signed()
                divided = True
            else:
                unclear = (
                    divided or token[0] in ".0123456789" or (before.isalpha() and (token.isalpha() or token == "("))
                )
                if unclear or (before[0] in ".0123456789" and token == r"\frac"):
                    raise _NoValueError
                value *= self._power()
            before = self._tokens[self._at - 1]
        return value

    def _signed(self) -> float:
        sign = 1.0
        while self._peek() in ("+", "-"):
            sign = -sign if self._next() == "-" else sign
        return sign * self._power()

    def _power(self) -> float:
        base = self._single()
        if self._peek() != "^":
            return base
        self._next()
        exponent = self._group()
        if self._peek() == "^":
            raise _NoValueError
        return _real(base**exponent)

    def _single(self) -> float:
        token = self._next()
        if token in _CLOSING:
            value = self.sum()
            if self._next() != _CLOSING[token]:
                raise _NoValueError
            return value
        if token == r"\frac":
            return self._group() / self._group()
        if token == r"\sqrt":
            return math.sqrt(self._group())
        if token == r"\pi":
            return math.pi
        if token.isalpha():
            return value_of(token)
        return float(token)  # a ValueError for what is no number

    def _group(self) -> float:
        """In braces, or the one token that TeX would take."""
        token = self._peek()
        if token != "{" and not token.isalpha() and not (token.isdigit() and len(token) == 1):
            raise _NoValueError
        return self._single()


def _real(value: complex) -> float:
    if isinstance(value, complex):
        raise _NoValueError
    return value
