r"""Whether two mathematical answers are the same: by their text, as exact numbers, part by part, at last by algebra.

What is decided here, so that everybody can know it (docs/rewards.md has the table): numbers written as digits or
fractions are compared exactly, decimals to a relative 1e-9; a per cent sign and a unit count only where both sides have
one; tuples and intervals are ordered and their brackets count, sets and bare lists are not ordered; ``x = 3`` is 3.

Algebra is math-verify's (sympy), kept from what could take it forever: long answers, towers of powers, huge exponents
and factorials are never given to it. Its own time-outs use signals, which work in a main thread only and turn into
wrong verdicts elsewhere, so they are off; the rule is called where it can be killed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

from verl.errors import RewardError
from verl.rewards.written_numbers import surely_differ, whole_number

LONGEST = 400  # characters of an answer; more is a text
TOLERANCE = Fraction(1, 10**9)  # relative, where a decimal is compared
LONGEST_ALGEBRA = 200
LARGEST_EXPONENT = 999
LARGEST_OF_SUM = 12  # of brackets with variables in them, which may have to be multiplied out

_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_SPACES = re.compile(r"(?<!\\)\\(?:[,;:! ]|quad\b|qquad\b)|~|\s+")
_DROPPED = re.compile(r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|textstyle|limits)(?![a-zA-Z])\s?|\\\$")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\[,!]|,\\!)(?=\d{3}(?!\d))")
_SPELLINGS = (
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*\{([^{}]*)\}\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\d)\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"\\sqrt\s*(\d)"), r"\\sqrt{\1}"),
    (re.compile(r"\\(?:neq|ne)(?![a-z])"), r"\\ne "),
    (re.compile(r"\\(?:leq|le)(?![a-z])"), r"\\le "),
    (re.compile(r"\\(?:geq|ge)(?![a-z])"), r"\\ge "),
    (re.compile(r"\\mathbf|\\mathrm|\\textbf|\\textit|\\textrm|\\mbox|\\operatorname|\\text(?=\{)"), r"\\text"),
    (re.compile(r"\\text\s*\{\s*([^{}]*?)\s*\}"), r"\\text{\1}"),
    (re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree|\u00b0"), r"\\text{degrees}"),
    (re.compile(r"(?<![a-zA-Z\\])pi(?![a-zA-Z])"), r"\\pi "),
    (re.compile(r"(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"_\{(\w)\}"), r"_\1"),
    (re.compile(r"\\%"), "%"),
    (re.compile("\u2212"), "-"),
    (re.compile(r"\u03c0"), r"\\pi "),
    (re.compile(r"\u221e"), r"\\infty "),
    (re.compile(r"\u221a\s*\(?(\d+)\)?"), r"\\sqrt{\1}"),
    (re.compile(r"\u00b1"), r"\\pm "),
    (re.compile(r"\u222a"), r"\\cup "),
)
_SIMPLE_FRACTION = re.compile(r"([-+]?)\s*\\frac\{\s*(-?\d{1,100})\s*\}\{\s*(-?\d{1,100})\s*\}")
_MIXED = re.compile(
    r"([-+]?)\s*(\d{1,50})\s*(?:\\frac\{\s*(\d{1,50})\s*\}\{\s*(\d{1,50})\s*\}|\s(\d{1,50})/(\d{1,50}))"
)
_UNIT = re.compile(
    r"(?P<value>.*[\d})])\s*"
    r"(?:\\text\{(?P<boxed>[^{}]*)\}(?P<power>\^\{?[23]\}?)?|\s(?P<bare>[a-zA-Z][a-zA-Z ]*[a-zA-Z])\.?)"
)
_NO_UNITS = re.compile(r"\b(?:and|or|to|pi|i)\b")
_ASSIGNED = re.compile(
    r"\s*(?:[a-zA-Z]|\\[a-z]+|\\text\{[^{}]*\})(?:_\{?\w+\}?|\([a-z]\))?\s*(?:=|\\in(?![a-z]))\s*(?P<value>[^=]+)"
)
_WORDS = re.compile(r"[a-zA-Z][a-zA-Z' -]*[a-zA-Z]\.?")
_TOO_MUCH = re.compile(r"!\s*!|\d{4,}\s*!|\\binom\{[^{}]*\d{4}|\}\s*!|\)\s*!|\\(?:sum|prod|int|lim)(?![a-z])|\d{101}")
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*[{(]?\s*[-+]?\s*(\d+)")
_TOWER = re.compile(r"\^\s*\{?[^{}]{0,40}\^|\*\*.{0,40}\*\*")
_VARIABLE = re.compile(r"(?<![a-zA-Z\\])[a-df-hj-zA-Z](?![a-zA-Z])")
_OF_SUM = re.compile(r"[)}]\s*(?:\^|\*\*)\s*[{(]?\s*(\d+)")
_BASED = re.compile(r"[\dA-F]+_\d+")
_OPEN, _CLOSE = "([{", ")]}"


def clean(text: str) -> str:
    """One spelling for what looks the same on paper; spaces are single."""
    text = text.strip()
    for opening, closing in _WRAPPERS:
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)]
    text = _THOUSANDS.sub("", _DROPPED.sub("", text))
    text = _SPACES.sub(" ", text)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return text.strip().rstrip(".").strip()


def same(gold: str, answer: str) -> bool:
    """Whether an answer says what the ground truth says. Raises Exception: whatever math-verify raises while it
    compares; that is no verdict."""
    if max(len(gold), len(answer)) > LONGEST:
        return gold.split() == answer.split()
    return _same(clean(gold), clean(answer))


def _same(gold: str, answer: str) -> bool:
    if not answer or not gold:
        return False
    squeezed = [re.sub(r"(?<!\d) | (?!\d)", "", text) for text in (gold, answer)]
    if squeezed[0] == squeezed[1]:
        return True
    if any(map(_BASED.fullmatch, squeezed)):  # 11_2: a number in another base, of which algebra sees the digits alone
        return False
    left, right = number(gold), number(answer)
    if left is not None and right is not None:
        near = "." in gold + answer and abs(left - right) <= TOLERANCE * max(abs(left), abs(right))
        return left == right or near
    for step in (_same_words, _same_without_unit, _same_value, _same_parts):
        verdict = step(gold, answer)
        if verdict is not None:
            return verdict
    if (left is None) != (right is None) and (_WORDS.fullmatch(gold) or _WORDS.fullmatch(answer)):
        return False
    return _same_by_algebra(gold, answer)


def number(text: str) -> Fraction | None:
    r"""The exact value of digits, a decimal, ``a/b``, ``\frac{a}{b}`` or a mixed number; None for anything else."""
    text = text.strip().removesuffix("%").strip()
    if found := _SIMPLE_FRACTION.fullmatch(text):
        sign, top, bottom = found.groups()
        return None if int(bottom) == 0 else Fraction(int(top), int(bottom)) * (-1 if sign == "-" else 1)
    if found := _MIXED.fullmatch(text):
        sign, whole, top, bottom = found[1], found[2], found[3] or found[5], found[4] or found[6]
        if int(bottom) == 0:
            return None
        return (int(whole) + Fraction(int(top), int(bottom))) * (-1 if sign == "-" else 1)
    return whole_number(text)


def _same_words(gold: str, answer: str) -> bool | None:
    """Words are compared as words: letters are no product of variables."""
    plain = [re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text) for text in (gold, answer)]
    plain = [" ".join(re.sub(r"[()\"'`]", " ", text).split()).rstrip(".").casefold() for text in plain]
    if plain[0] == plain[1] and any("\\text" in text or _WORDS.fullmatch(text) for text in (gold, answer)):
        return True
    return False if all(re.fullmatch(r"[a-z][a-z' -]+", text) for text in plain) else None


def _same_without_unit(gold: str, answer: str) -> bool | None:
    """A unit of one side alone does not count; two units must read the same."""
    left, right = _unit(gold), _unit(answer)
    if left is None and right is None:
        return None
    if left is not None and right is not None:
        return left[1] == right[1] and _same(left[0], right[0])
    value = left[0] if left is not None else right[0]  # type: ignore[index]
    return _same(value, answer) if left is not None else _same(gold, value)


def _unit(text: str) -> tuple[str, str] | None:
    found = _UNIT.fullmatch(text)
    if found is None:
        return None
    name = " ".join((found["boxed"] if found["bare"] is None else found["bare"]).split()).casefold()
    if not name or _NO_UNITS.search(name) or (found["bare"] and number(found["value"]) is None):
        return None
    power = (found["power"] or "").strip("^{}")
    return found["value"].strip(), name.rstrip(".").removesuffix("s") + power


def _same_value(gold: str, answer: str) -> bool | None:
    """``x = 3`` is 3, where the other side is no equation or names the same."""
    values = [_ASSIGNED.fullmatch(text) for text in (gold, answer)]
    if any(value is None and "=" in text for value, text in zip(values, (gold, answer), strict=True)):
        return None
    if all(value is None for value in values):
        return None
    if values[0] and values[1]:
        names = [v.string[: v.start("value")].replace(" ", "").rstrip("=") for v in values if v]
        if names[0] != names[1] and not any("\\in" in name for name in names):
            return False
    stripped = [value["value"].strip() if value else text for value, text in zip(values, (gold, answer), strict=True)]
    return _same(stripped[0], stripped[1])


def _same_parts(gold: str, answer: str) -> bool | None:
    """Tuples, intervals, sets, unions, lists and plus-minus, part by part; None where neither side has parts."""
    left, right = _parts(gold), _parts(answer)
    if left is None and right is None:
        return None
    # A single value is a list of one, as {3} and 3 are written for the same set of solutions.
    (kind, own), (other_kind, others) = left or ("", [gold]), right or ("", [answer])
    loose = {"", "{}"}
    if len(own) != len(others) or (kind != other_kind and not {kind, other_kind} <= loose):
        return False
    if kind not in loose and kind != "\\cup":
        return all(map(_same, own, others))
    rest = list(others)
    for part in own:
        at = next((i for i, other in enumerate(rest) if _same(part, other)), None)
        if at is None:
            return False
        del rest[at]
    return True


def _parts(text: str) -> tuple[str, list[str]] | None:
    """The kind (brackets, ``\\cup``, or nothing for a bare list) and the parts; None where there are no parts."""
    if len(united := _split(text, r"\\cup(?![a-z])")) > 1:
        return "\\cup", united
    inner, kind = text, ""
    for opening, closing in ((r"\{", r"\}"), *((o, c) for o in "([" for c in ")]")):
        end = len(text) - len(closing)
        if text.startswith(opening) and text.endswith(closing) and end > len(opening):
            inside = text[len(opening) : end]
            if _depth_holds(inside):
                inner, kind = inside, "{}" if opening == r"\{" else opening + closing
                break
    parts = _split(inner, r",|;|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])|\\text\{\s*,?\s*(?:and|or)\s*\}")
    parts = [one for part in parts for one in _both_signs(part)]
    if len(parts) > 1 or kind == "{}":
        return kind if len(parts) > 1 or kind == "{}" else "", parts
    return None


def _both_signs(part: str) -> list[str]:
    before, found, after = part.partition("\\pm")
    if not found or "\\pm" in after:
        return [part]
    return [f"{before.strip()} {sign} {after.strip()}".strip().removeprefix("+ ") for sign in "+-"]


def _split(text: str, separator: str) -> list[str]:
    """At separators outside of brackets."""
    parts, start = [], 0
    for found in re.finditer(separator, text):
        if _depth_holds(text[start : found.start()]) and found.start() >= start:
            parts.append(text[start : found.start()].strip())
            start = found.end()
    return [part for part in [*parts, text[start:].strip()] if part]


def _depth_holds(text: str) -> bool:
    """Whether every bracket that opens closes, whatever its shape (half-open intervals), and none closes too early."""
    depth = 0
    for char in text.replace(r"\{", "(").replace(r"\}", ")"):
        depth += (char in _OPEN) - (char in _CLOSE)
        if depth < 0:
            return False
    return depth == 0


# --- algebra -------------------------------------------------------------------------------------------------------


def _same_by_algebra(gold: str, answer: str) -> bool:
    if not _bounded(answer) or surely_differ(gold, answer):
        return False
    left, right = _parsed(gold), _parsed(answer)
    if left is None or right is None:
        return False
    from sympy import Expr, nan, zoo

    if left.has(nan, zoo) or right.has(nan, zoo):  # it divides by zero
        return False
    values = [_numeric(side) for side in (left, right)]
    if all(value is not None for value in values):
        # math-verify rounds to decimal places, which makes all tiny numbers one.
        difference, size = abs(values[0] - values[1]), max(abs(values[0]), abs(values[1]))
        return bool(difference <= float(TOLERANCE) * size)
    if isinstance(left, Expr) and isinstance(right, Expr):
        if _differ_at_a_point(left, right):
            return False
        if (left - right).expand() == 0:  # to simplify the difference takes a multiple of the time
            return True
    return bool(_math_verify()[1](left, right))


def _bounded(text: str) -> bool:
    """Whether algebra on it ends in time, as far as its look says."""
    symbolic = _VARIABLE.search(text) is not None
    if len(text) > LONGEST_ALGEBRA or _TOO_MUCH.search(text) or not _depth_holds(text):
        return False
    if (_TOWER.search(text) and not symbolic) or (
        symbolic and max((int(found[:9]) for found in _OF_SUM.findall(text)), default=0) > LARGEST_OF_SUM
    ):
        return False
    depth = deepest = 0
    for char in text:
        depth += (char in _OPEN) - (char in _CLOSE)
        deepest = max(deepest, depth)
    exponents = [int(found[:9]) for found in _EXPONENT.findall(text)]
    return deepest <= 12 and max(exponents, default=0) <= LARGEST_EXPONENT


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Any:
    """What math-verify makes of it: a sympy expression, or None."""
    found = _math_verify()[0](text.replace(r"\text", ""))
    return found[0] if found and not isinstance(found[0], str) else None


def _differ_at_a_point(left: Any, right: Any) -> bool:
    """Whether two expressions have unequal values at one point; that is much faster than to simplify a difference."""
    from sympy import Rational, Symbol

    if isinstance(left, Symbol) or isinstance(right, Symbol):
        return False
    names = sorted(left.free_symbols | right.free_symbols, key=str)
    point = {name: Rational(7 + 4 * i, 5 + 2 * i) for i, name in enumerate(names)}
    try:
        values = [complex(side.subs(point).evalf(15)) for side in (left, right)]
    except (TypeError, ValueError, ArithmeticError):  # no number: a function without a definition, infinity
        return False
    gap, size = abs(values[0] - values[1]), max(1.0, *map(abs, values))
    return bool(gap > 1e-6 * size)  # false for NaN


def _numeric(expression: Any) -> Any:
    """To 30 digits, where it is a number; else None."""
    if getattr(expression, "is_number", False) and not getattr(expression, "is_infinite", False):
        from sympy import UnevaluatedExpr

        value = expression.replace(UnevaluatedExpr, lambda inner: inner).evalf(30)  # what a % is
        return value if abs(value).is_Number else None
    return None


@lru_cache(maxsize=1)
def _math_verify() -> tuple[Callable[[str], list[Any]], Callable[[Any, Any], bool]]:
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise RewardError(
            "The math rule needs math-verify.", str(error), "pip install math-verify[antlr4-13-2]"
        ) from error
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    kinds = [LatexExtractionConfig(), ExprExtractionConfig()]

    def read(text: str) -> list[Any]:
        return parse(f"${text}$", kinds, fallback_mode="no_fallback", parsing_timeout=None)

    def compare(gold: Any, answer: Any) -> bool:
        return verify(gold, answer, float_rounding=12, timeout_seconds=None, raise_on_error=True)

    return read, compare
