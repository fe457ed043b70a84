"""Infini-Llama in `transformers`: `import infini_model.hf` registers it with the Auto classes.

    import infini_model.hf
    model = AutoModelForCausalLM.from_pretrained("outputs/runs/quickstart/model")

Logits and generated tokens are those of `InfiniLlama`. The cache is of constant size. Needs the
extra `hf`; `PlainInfiniLlamaForCausalLM` is the same model for those who do not have this package.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, initialization
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from infini_model.hf.modeling_infini_llama import (
    InfiniLlamaCache,
    InfiniLlamaConfig,
    PlainInfiniLlamaForCausalLM,
)
from infini_model.model.hf.config import CONFIG, parse_config
from infini_model.model.layers import Decoder
from infini_model.model.llama import InfiniLlama
from infini_model.model.memory import MEMORY_PARAMETERS, Rule
from infini_model.model.state import State

__all__ = ["InfiniLlamaCache", "InfiniLlamaConfig", "InfiniLlamaForCausalLM"]


class InfiniLlamaForCausalLM(PlainInfiniLlamaForCausalLM):
    """`InfiniLlama` as a model of `transformers`, which computes all segments of a text at once."""

    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012 - as in transformers
    supports_gradient_checkpointing = True
    gradient_checkpointing = False  # set by gradient_checkpointing_enable()
    _whole: InfiniLlama

    def __init__(self, config: InfiniLlamaConfig) -> None:
        """Build the model and initialise its weights.

        Raises `ValueError` if it generates by diffusion.
        """
        PreTrainedModel.__init__(self, config)
        tree = config.to_dict() | {"infini_attention": config.attention}
        self.shape = parse_config(tree, Path(CONFIG), {})
        if self.shape.bidirectional:
            raise ValueError("a model of diffusion: `infini generate` opens it, transformers not")
        whole = InfiniLlama(self.shape)
        self.model, self.lm_head = whole.model, whole.lm_head
        # No submodule of its own: it has the same modules.
        object.__setattr__(self, "_whole", whole)
        self.post_init()

    def read(self, ids: Tensor, counts: Tensor, state: State | None) -> tuple[Tensor, State | None]:
        """Read `counts` [B] of `ids` [B, T]: the inputs of the output layer, and the state after.

        There is no state in training.
        """
        if self.training and state is None:
            layers = len(self._whole.model.layers)
            self._whole.model.recomputed_layers = layers if self.gradient_checkpointing else 0
            return self._whole.hidden(ids), None
        in_place = not torch.is_grad_enabled()
        return self._whole.extend(ids, state, counts=counts.cpu(), in_place=in_place)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise what no file has brought."""
        super()._init_weights(module)
        if isinstance(module, Rule):
            for name, start in type(module)(self.shape).named_parameters():
                initialization.copy_(module.get_parameter(name), start)
        elif isinstance(module, Decoder):
            device = module.cos.device
            module.tabulate_rope(self.shape)
            module.cos, module.sin = module.cos.to(device), module.sin.to(device)


_NAMES = "|".join(MEMORY_PARAMETERS)
# Files name what belongs to the memory as a part of the attention.
_RENAMED = WeightRenaming(rf"\.self_attn\.({_NAMES})", r".self_attn.memory.\1")
register_checkpoint_conversion_mapping("InfiniLlamaForCausalLM", [_RENAMED], overwrite=True)
AutoConfig.register(InfiniLlamaConfig.model_type, InfiniLlamaConfig, exist_ok=True)
AutoModelForCausalLM.register(InfiniLlamaConfig, InfiniLlamaForCausalLM, exist_ok=True)
