"""Infini-Llama in `transformers`: `import infini_model.hf` registers it with the Auto classes.

    import infini_model.hf
    model = AutoModelForCausalLM.from_pretrained("outputs/runs/quickstart/model")

Logits and generated tokens are those of `InfiniLlama`. The cache is of constant size. Needs the
extra `hf`; `PlainInfiniLlamaForCausalLM` is the same model for those who do not have this package.
"""

from __future__ import annotations

import re
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
        config.infini_attention = config.attention
        config.__dict__.pop("auto_map", None)  # its file is not written
        PreTrainedModel.__init__(self, config)
        self.shape = parse_config(config.to_dict(), Path(CONFIG), {})
        if self.shape.bidirectional:
            raise ValueError("transformers does not generate by diffusion; infini generate does")
        whole = InfiniLlama(self.shape)
        self.model, self.lm_head = whole.model, whole.lm_head
        # No submodule of its own: it has the same modules.
        object.__setattr__(self, "_whole", whole)
        self.register_load_state_dict_pre_hook(_rename)
        self.post_init()

    def read(
        self, ids: Tensor, counts: Tensor, state: State | None, is_kept: bool
    ) -> tuple[Tensor, State | None]:
        """Read `counts` [B] of `ids` [B, T]: the inputs of the output layer, and the state after.

        There is no state where none is given or kept, as in training.
        """
        if state is None and not is_kept:
            layers = len(self._whole.model.layers)
            self._whole.model.recomputed_layers = layers if self.gradient_checkpointing else 0
            return self._whole.hidden(ids), None
        in_place = not torch.is_grad_enabled()
        return self._whole.extend(ids, state, counts=counts.cpu(), in_place=in_place)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise what no file has brought."""
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if isinstance(module, Rule):
            for name, start in type(module)(self.shape).named_parameters():
                initialization.copy_(module.get_parameter(name), start)
        elif isinstance(module, Decoder):
            device = module.cos.device
            module.tabulate_rope(self.shape)
            module.cos, module.sin = module.cos.to(device), module.sin.to(device)


# Files name what belongs to the memory as a part of the attention.
_IN_FILES = rf"\.self_attn\.({'|'.join(MEMORY_PARAMETERS)})"
_IN_MODEL = r".self_attn.memory.\1"


def _rename(_module: nn.Module, tensors: dict[str, Tensor], *_: object) -> None:
    """Rename the tensors of a file, which `load_state_dict` is given by a trainer that resumes."""
    for name in [*tensors]:
        tensors[re.sub(_IN_FILES, _IN_MODEL, name)] = tensors.pop(name)


register_checkpoint_conversion_mapping(
    "InfiniLlamaForCausalLM", [WeightRenaming(_IN_FILES, _IN_MODEL)], overwrite=True
)
AutoConfig.register(InfiniLlamaConfig.model_type, InfiniLlamaConfig, exist_ok=True)
AutoModelForCausalLM.register(InfiniLlamaConfig, InfiniLlamaForCausalLM, exist_ok=True)
