"""Numbers in model-written text, read exactly or not at all.

A number is an optional sign, an optional dollar sign, digits with or without well-formed thousands separators, an
optional decimal part, or a fraction of two integers. Values are exact fractions; nothing goes through a float, so
0.1 equals 1/10 and 2**-99 does not equal 2**-98.
"""

from __future__ import annotations

import math
import re
from decimal import Context, Decimal, DivisionByZero, InvalidOperation, Overflow, localcontext
from fractions import Fraction

MAX_DIGITS = 100  # longer ones are noise, and exact arithmetic on millions of digits is slow

# Possessive quantifiers (++): a failed match must not be retried on ever shorter digits of a million-digit text.
_DIGITS = r"(?:(?>[0-9]{1,3}(?:,[0-9]{3})++(?![0-9]))|[0-9]++)"
_MAGNITUDE = rf"(?:{_DIGITS}(?:\.[0-9]++)?+|\.[0-9]++)"
_SIGN = r"[-+\u2212]"
_NUMBER = rf"(?:{_SIGN}\s?\$?|\$\s?{_SIGN}?|)(?P<magnitude>{_MAGNITUDE})(?:\s?/\s?(?P<denominator>[0-9]++))?+"

_LEADING = re.compile(rf"\s*+(?P<number>{_NUMBER})")
_WHOLE = re.compile(rf"\s*+(?P<number>{_NUMBER})\s*+")
# In running text a sign must touch its number, and a hyphen after a word, digit or bracket is no sign: "3-5" ends in 5.
_INSIDE = re.compile(
    rf"(?<![\w.])(?:(?<![\w)\]}}.])(?P<sign>{_SIGN}))?\$?(?:(?<=\$)(?P<sign2>{_SIGN}))?"
    rf"(?P<magnitude>{_MAGNITUDE})(?:/(?P<denominator>[0-9]++))?+"
)
# What may not follow a leading number: more of a word or number, or an operation that makes it only a part of a value.
_CONTINUES = re.compile(r"[\w(\\^]|[.,:/][0-9]|\s*+[-+*/^=\u00d7\u00f7\u2212]\s*+[\w($.\\]")


def leading_number(text: str) -> Fraction | None:
    """The number that ``text`` starts with; None if it starts with something else or the number is part of more."""
    match = _LEADING.match(text)
    if match is None or _CONTINUES.match(text, match.end()):
        return None
    return _value(match["number"], match["magnitude"], match["denominator"])


def whole_number(text: str) -> Fraction | None:
    """The number that ``text`` is, white space apart; None if it is anything else."""
    match = _WHOLE.fullmatch(text)
    return _value(match["number"], match["magnitude"], match["denominator"]) if match else None


def last_number(text: str) -> Fraction | None:
    """The last number mentioned in running text. A hyphen between two values is no sign."""
    last = None
    for match in _INSIDE.finditer(text):
        last = match
    if last is None:
        return None
    sign = (last["sign"] or "") + (last["sign2"] or "")
    return _value(sign, last["magnitude"], last["denominator"])


def _value(signed: str, magnitude: str, denominator: str | None) -> Fraction | None:
    digits = magnitude.replace(",", "")
    if len(digits) > MAX_DIGITS or len(denominator or "") > MAX_DIGITS:
        return None
    value = Fraction(int(digits) if digits.isdigit() else digits)  # it reads whole numbers slowly
    if denominator is not None:
        if not int(denominator):
            return None
        value /= int(denominator)
    return -value if "-" in signed or "\u2212" in signed else value


# --- values of simple expressions, by which most wrong answers are told from the right one without any algebra --------
#
# What is read: numbers, single letters, \pi, signs, products written or not, powers, \frac, \sqrt and brackets. What
# could mean two things (1/2x, f(x), 2\frac{1}{2}, ab, e, i) has no value here.

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
