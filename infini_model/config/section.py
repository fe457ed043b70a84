"""What the sections of the configuration tree have in common: their base class, and types."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

T = TypeVar("T")

# More than anyone counts, and few enough for 64-bit integers, their products with sizes, and dates.
MOST = 10**9
PositiveInt = Annotated[int, Field(gt=0, le=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonEmpty = Annotated[str, Field(min_length=1)]
NonEmptyList = Annotated[list[T], Field(min_length=1)]


def _in_order(schedule: dict[float, int]) -> dict[float, int]:
    fractions = sorted(schedule)
    if not fractions or fractions[0] != 0.0 or fractions[-1] == 1.0:
        raise ValueError("the first fraction must be 0, and all below 1")
    return {fraction: schedule[fraction] for fraction in fractions}


# What holds from a fraction of a training's steps on, in their order.
Schedule = Annotated[dict[Fraction, PositiveInt], AfterValidator(_in_order)]


class Section(BaseModel):
    """Part of the tree: immutable, without unknown keys, all numbers finite.

    The docstring below a field is its description in the list of all settings and in the form.
    Numbers are accepted for string fields, since YAML reads `launch.gpus=0` as a number.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        use_attribute_docstrings=True,
    )

    def updated(self, **changes: Any) -> Self:
        """A copy with these values, unvalidated; a mapping updates the section that it is for.

        `config.updated(data={"folder": folder})` keeps the rest of `data`.
        """
        update = {}
        for name, change in changes.items():
            below = getattr(self, name)
            nested = isinstance(below, Section) and isinstance(change, Mapping)
            update[name] = below.updated(**change) if nested else change
        return self.model_copy(update=update)

    def conflicts(self) -> Iterator[str]:
        """What is wrong with values that are each right by themselves; the first is reported."""
        yield from ()

    @model_validator(mode="after")
    def _has_no_conflicts(self) -> Self:
        if conflict := next(self.conflicts(), None):
            raise ValueError(conflict)
        return self


def takes(
    what: str,
    is_taken: Callable[[Any], Any],
    when: type[AfterValidator | BeforeValidator] = AfterValidator,
) -> AfterValidator | BeforeValidator:
    """Refuses values that `is_taken` is false of; the error says "takes " and `what`.

    It looks at the value as it was given if `when` is `BeforeValidator`.
    """

    def check(value: Any) -> Any:
        if not is_taken(value):
            raise ValueError(f"takes {what}")
        return value

    return when(check)


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
Name = Annotated[str, takes("letters and digits, after the first one also . _ -", NAME.fullmatch)]
