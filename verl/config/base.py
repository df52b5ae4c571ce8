"""What every section of the configuration shares: strictness, and how a bad value is described."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from verl.config.names import did_you_mean


class FieldProblem(ValueError):
    """A value that a field cannot take; raised by validators and reported under the field's dotted name. ``what``: what
    is wrong with the value, to be read after the field's name. ``fix``: what to write instead."""

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
            kind = field.annotation
            # A section is described by its class, unless a place of it has words of its own.
            about = kind.__doc__ if isinstance(kind, type) and issubclass(kind, Section) else None
            field.description = " ".join((field.description or (about or "").partition("\n\n")[0]).split()) or None

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


def field(default: Any, about: str, **more: Any) -> Any:
    """A field with its default, its description, and bounds (``ge=1``) and the like."""
    return Field(default, description=about, **more)


def part(section: type[Section]) -> Any:
    """A field that is a section with its defaults; described by the section's docstring unless it has its own."""
    return Field(default_factory=section)


def in_stage(where: str) -> dict[str, Any]:
    """For ``Field(..., **in_stage(...))``: where a field acts that does not act where its section does."""
    return {"json_schema_extra": {"acts_in": where}}


def check_entries(value: dict[str, Any], schema: type[Section]) -> None:
    """Entries that the user named, in a free mapping, against the section that each of them is. Raises FieldProblem:
    about the first that is wrong."""
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
                fix = did_you_mean(str(first["loc"][0]), schema.model_fields) + fix
                raise FieldProblem(f"{place} is no key", fix) from None
            raise FieldProblem(f"{place}: {first['msg']}", fix) from None


def plain_types(annotation: Any) -> set[Any]:
    """The types that an annotation such as ``int | None`` or ``Annotated[int, ...] | None`` is made of."""
    parts = get_args(annotation)
    return set().union(*map(plain_types, parts)) if parts else {annotation}
