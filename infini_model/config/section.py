"""What the sections of the configuration tree have in common: their base class, and types."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

T = TypeVar("T")

# More than anyone counts, and few enough for 64-bit integers, their products with sizes, and dates.
MOST = 10**9
PositiveInt = Annotated[int, Field(gt=0, le=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonEmpty = Annotated[str, Field(min_length=1)]
NonEmptyList = Annotated[list[T], Field(min_length=1)]


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

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        # Not by `use_attribute_docstrings`, which reads all sources whenever a process starts.
        schema = handler(core_schema)
        fields = handler.resolve_ref_schema(schema)["properties"]
        for section in (base for base in cls.__mro__ if issubclass(base, Section)):
            for name, docstring in _docstrings(section.__module__)[section.__name__].items():
                fields[name].setdefault("description", docstring)
        return schema


@functools.cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """By class the docstrings below its fields, each as one line."""
    found: dict[str, dict[str, str]] = {}
    for section in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(section, ast.ClassDef):
            fields = found.setdefault(section.name, {})
            for field, below in itertools.pairwise(section.body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        fields[name] = " ".join(text.split())
    return found


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
