"""Training objectives: from windows to inputs, targets and the loss of a batch.

To add an objective, write a class like `infini_model.objectives.causal.CausalLM` in a new file and
return it from `make_objective`.
"""

from infini_model.config import Config
from infini_model.objectives.causal import CausalLM
from infini_model.objectives.masked_diffusion import MaskedDiffusion
from infini_model.objectives.objective import Objective
from infini_model.runtime.errors import ConfigError


def make_objective(config: Config) -> Objective:
    """Create the objective set in `config`, with its settings and seed.

    `config.model` is that of the model itself. Raises `ConfigError` if it has no mask token and the
    objective needs one.
    """
    if config.training.objective == "causal":
        return CausalLM()
    mask = config.model.mask_token_id
    if mask is None:
        raise ConfigError(f"model.mask_token_id: missing; {config.training.objective} needs one")
    in_blocks = config.training.objective == "block_diffusion"
    block_length = config.model.segment_length if in_blocks else None
    return MaskedDiffusion(config.run.seed, mask, block_length)
