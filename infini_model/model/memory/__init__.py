"""Rules of the compressive memory: how a segment is written to it, and how it is read.

To add a rule, write a class like `infini_model.model.memory.residual.Residual` in a new file, and
add it to `RULES` and to the values of `model.memory`.
"""

from infini_model.model.memory.paper import Delta, Linear
from infini_model.model.memory.residual import Residual
from infini_model.model.memory.rule import SHIFTS, Memory, Rule, RuleState

__all__ = ["MEMORY_PARAMETERS", "RULES", "Memory", "Rule", "RuleState", "file_name"]

RULES: dict[str, type[Rule]] = {"linear": Linear, "delta": Delta, "residual": Residual}

# The last part of the names of all parameters of a memory; all others are Llama's.
MEMORY_PARAMETERS = (
    *dict.fromkeys(name for rule in RULES.values() for name in rule.parameter_names),
    *SHIFTS,
)


def file_name(parameter: str) -> str:
    """The name in files of a model's parameter: those of a memory are its attention's there."""
    return parameter.replace(".self_attn.memory.", ".self_attn.")
