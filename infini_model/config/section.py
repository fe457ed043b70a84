"""What every section of the tree has in common."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field


class _DecidesWeights:
    """Marks a field that decides the weights in a section whose other fields do not."""


DECIDES_WEIGHTS = _DecidesWeights()


class Section(BaseModel):
    """A part of the tree: unknown keys are refused, values are finite and do not change.

    YAML reads `launch.gpus=0` as a number; where text is wanted it is taken as text.

    Attributes:
        decides_weights: Whether another value of its fields gives other weights at the end of a
            run; an interrupted run resumes under any change of the others. Every section of
            `Config` says so of itself, and its own sections follow it.
    """

    decides_weights: ClassVar[bool]

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
    )


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
