"""Numbers in model-written text, read exactly or not at all.

A number is an optional sign, an optional dollar sign, digits with or without well-formed thousands separators, an
optional decimal part, or a fraction of two integers. Values are exact fractions; nothing goes through a float, so
0.1 equals 1/10 and 2**-99 does not equal 2**-98.
"""

from __future__ import annotations

import re
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
