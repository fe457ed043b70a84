"""Base class of every section of the configuration tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field


class _DecidesWeights:
    """Marks a field that decides the weights in a section that otherwise does not."""


DECIDES_WEIGHTS = _DecidesWeights()


class Section(BaseModel):
    """Part of the tree: immutable, without unknown keys, all numbers finite.

    Numbers are accepted for string fields, since YAML reads `launch.gpus=0` as a number.

    Attributes:
        decides_weights: Whether changing a field of this section changes the final weights of a
            run. Fields that do not may be changed when a run resumes. Every direct section of
            `Config` sets this, and it covers the sections nested in it.
    """

    decides_weights: ClassVar[bool]

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


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
