"""What every section of the configuration shares: strictness, and how a bad value is described."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from verl.config.names import did_you_mean


class FieldProblem(ValueError):
    """A value that a field cannot take; raised by validators and reported under the field's dotted name.

    Args:
        what: what is wrong with the value, to be read after the field's name.
        fix: what to write instead.
    """

    def __init__(self, what: str, fix: str) -> None:
        self.what, self.fix = what, fix
        super().__init__(f"{what} ({fix})")


class Section(BaseModel):
    """A frozen group of fields that refuses unknown names, NaN, infinities, and booleans where numbers belong.

    Every section says in ``acts_in`` where its fields act (stage, and role or part); a field that acts elsewhere has
    ``**in_stage("...")``. Every number has a unit in its type, such as ``Prompts`` or ``Number``. What a
    field means is its ``description``, or the docstring below it where that is too long for its line.
    """

    acts_in: ClassVar[str]

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        defer_build=True,
        use_attribute_docstrings=True,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join(field.description.split()) if field.description else None

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would read true as 1: `rollout.n: yes` must not silently become n=1.
        if isinstance(value, bool) and info.field_name is not None:
            kinds = plain_types(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and bool not in kinds:
                raise FieldProblem("must be a number, not true or false", "give a number")
        return value


@dataclass(frozen=True)
class Unit:
    """What a number counts: ``Annotated[int, Unit("tokens")]``."""

    name: str


@dataclass(frozen=True)
class Takes:
    """The values that a field takes, in words, where its type does not say them."""

    words: str


def also(**spellings: Any) -> BeforeValidator:
    """Other values that a field takes for one of its own: ``also(cuda="gpu")``, several of them as a tuple."""

    def read(value: Any) -> Any:
        for own, others in spellings.items():
            for other in others if isinstance(others, tuple) else (others,):
                # By identity, but for text: True is no 1, as bare words of YAML 1.1 are read (on, off, false).
                if value is other or (isinstance(value, str) and value == other):
                    return own
        return value

    return BeforeValidator(read)


def in_stage(where: str) -> dict[str, Any]:
    """For ``Field(..., **in_stage(...))``: where a field acts that does not act where its section does."""
    return {"json_schema_extra": {"acts_in": where}}


def check_entries(value: dict[str, Any], schema: type[Section]) -> None:
    """Entries that the user named, in a free mapping, against the section that each of them is.

    Raises:
        FieldProblem: about the first that is wrong.
    """
    for name, entry in value.items():
        try:
            schema.model_validate({} if entry is None else entry)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, (name, *first["loc"])))
            own = first.get("ctx", {}).get("error")
            if isinstance(own, FieldProblem):
                raise FieldProblem(f"{place} {own.what}", own.fix) from None
            fix = f"an entry is a mapping with {', '.join(schema.model_fields)}"
            if first["type"] == "extra_forbidden":
                raise FieldProblem(
                    f"{place} is no key", did_you_mean(str(first["loc"][0]), schema.model_fields) + fix
                ) from None
            raise FieldProblem(f"{place}: {first['msg']}", fix) from None


def plain_types(annotation: Any) -> set[Any]:
    """The types that an annotation such as ``int | None`` or ``Annotated[int, ...] | None`` is made of."""
    parts = get_args(annotation)
    return set().union(*map(plain_types, parts)) if parts else {annotation}


def _never_or_positive(value: int) -> int:
    if value != -1 and value < 1:
        raise FieldProblem("must be -1 or at least 1", "use -1 for never (or no limit), or a whole number from 1 up")
    return value


def _one_or_many(value: Any) -> Any:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _top_k(value: Any) -> Any:
    # -1, 0 and null are all spellings of "off" in the field; one of them reaches the engine.
    return -1 if value is None or (isinstance(value, int) and not isinstance(value, bool) and value == 0) else value


def _top_k_range(value: int) -> int:
    if value == 0:
        return -1
    if value < -1:
        raise FieldProblem("must be -1 (off) or at least 1", "use -1 to keep every token, or the number of tokens kept")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if not all(isinstance(name, str) for name in value):
            raise FieldProblem("every name in the mapping must be text", "put quotes around names that are numbers")
        for item in value.values():
            _plain(item)
    elif isinstance(value, list):
        for item in value:
            _plain(item)
    elif not isinstance(value, str | int | float | None) or (isinstance(value, float) and not isfinite(value)):
        raise FieldProblem(
            f"holds {value!r}, which cannot be written to JSON", "use text, finite numbers, true, false and null"
        )
    return value


FreeDict = Annotated[dict[str, Any], AfterValidator(_plain)]
StringList = Annotated[list[str], BeforeValidator(_one_or_many), Takes("text or list of texts")]

Prompts = Annotated[int, Unit("prompts")]
Responses = Annotated[int, Unit("responses")]
Tokens = Annotated[int, Unit("tokens")]
Steps = Annotated[int, Unit("training steps")]
Passes = Annotated[int, Unit("passes over the data")]
Seconds = Annotated[float, Unit("seconds")]
Seed = Annotated[int, Unit("seed")]
Number = Annotated[float, Unit("plain number")]
Share = Annotated[float, Unit("share, 0 to 1")]

_NEVER_OR_POSITIVE = Takes("-1, or a whole number from 1 up")
RowLimit = Annotated[int, AfterValidator(_never_or_positive), _NEVER_OR_POSITIVE, Unit("prompts")]
Every = Annotated[int, AfterValidator(_never_or_positive), _NEVER_OR_POSITIVE, Unit("training steps")]
TopK = Annotated[
    int,
    BeforeValidator(_top_k),
    AfterValidator(_top_k_range),
    Takes("-1 (or 0, or null), or a whole number from 1 up"),
    Unit("tokens"),
]
