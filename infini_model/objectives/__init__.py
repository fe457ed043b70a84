"""Training objectives: from windows to inputs, targets and the loss of a batch.

To add an objective, write a class like `infini_model.objectives.causal.CausalLM` in a new file and
return it from `make_objective`.
"""

from infini_model.config import Config
from infini_model.objectives.causal import CausalLM
from infini_model.objectives.objective import Objective


def make_objective(config: Config) -> Objective:  # noqa: ARG001 - there is only one so far
    """Create the objective set in `config`, with its settings and seed."""
    return CausalLM()
