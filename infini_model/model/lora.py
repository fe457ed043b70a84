"""LoRA (Hu et al., arXiv 2106.09685): frozen matrices, and trained low-rank products beside some.

A frozen matrix is kept in bfloat16 and cast where it is used; everything trained is float32. The
memory's own parameters are always trained. Parameters have the names that `peft` gives them in its
files, less a prefix.

`peft` itself wraps each module that it changes, so that every name changes and a module to save is
held twice, takes no activations wider than the weights, and imports `transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from infini_model.config import LoraConfig
from infini_model.model.memory import MEMORY_PARAMETERS
from infini_model.model.precision import as_operand
from infini_model.runtime.errors import ConfigError

FROZEN = torch.bfloat16
_MAGNITUDE = "lora_magnitude_vector"
_ADAPTERS = ("lora_A.weight", "lora_B.weight", _MAGNITUDE)


class CastLinear(nn.Linear):
    """A linear layer that multiplies in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], in the dtype of `x` or of autocast."""
        bias = None if self.bias is None else as_operand(self.bias, x)
        return functional.linear(x, as_operand(self.weight, x), bias)


class LoraLinear(CastLinear):
    """x·Wᵀ + b + scaling · d(x)·Aᵀ·Bᵀ, with A [r, in_features] and B [out_features, r].

    d is dropout. With `use_dora` it is x·Wᵀ + b + d(x)·(s(W + scaling · BA) − W)ᵀ instead, with s =
    m / ‖W + scaling · BA‖ by row and m [out_features] trained; s has no gradient but by m (arXiv
    2402.09353, section 4.3).
    """

    def __init__(self, in_features: int, out_features: int, lora: LoraConfig) -> None:
        """`add_lora` gives it weight and bias, and `initial_adapters` draws A and B."""
        super().__init__(in_features, out_features, bias=False, device="meta")
        self.scaling = lora.lora_alpha / (math.sqrt(lora.r) if lora.use_rslora else lora.r)
        self.lora_A = nn.Linear(in_features, lora.r, bias=False, device="meta")
        self.lora_B = nn.Linear(lora.r, out_features, bias=False, device="meta")
        self.lora_dropout = nn.Dropout(lora.lora_dropout) if lora.lora_dropout else nn.Identity()
        magnitude = torch.empty(out_features, device="meta") if lora.use_dora else None
        self.lora_magnitude_vector = None if magnitude is None else nn.Parameter(magnitude)

    def forward(self, x: Tensor) -> Tensor:
        """As `CastLinear.forward`."""
        dropped: Tensor = self.lora_dropout(x)
        product: Tensor = self.lora_B(self.lora_A(dropped)) * self.scaling
        whole = super().forward(x)
        if self.lora_magnitude_vector is None:
            return whole + product
        scale: Tensor = self.lora_magnitude_vector / self._sum().norm(dim=1)
        base = functional.linear(dropped, as_operand(self.weight, x))
        return whole + ((scale - 1) * base + scale * product).to(whole.dtype)

    @torch.no_grad()
    def _sum(self) -> Tensor:
        """W + scaling · BA, float32."""
        product: Tensor = self.lora_B.weight @ self.lora_A.weight
        return self.weight.float() + self.scaling * product

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The weight of a plain linear layer that computes the same, float32."""
        total = self._sum()
        if self.lora_magnitude_vector is not None:
            total *= (self.lora_magnitude_vector / total.norm(dim=1))[:, None]
        return total


def add_lora(model: nn.Module, lora: LoraConfig) -> None:
    """Freeze `model` but for what `lora` trains, and put adapters, still on `meta`, beside it.

    Vectors stay in float32 when frozen: `RMSNorm` is slow where dtypes are mixed, and they are few.
    Raises `ConfigError` if the model lacks a module that is to be saved.
    """
    for name, module in [*model.named_modules()]:
        if not isinstance(module, nn.Linear):
            continue
        shape = module.in_features, module.out_features
        if name.rpartition(".")[2] in lora.target_modules:
            new: CastLinear = LoraLinear(*shape, lora)
        else:
            new = CastLinear(*shape, bias=False, device="meta")
        new.weight, new.bias = module.weight, module.bias
        model.set_submodule(name, new)
    for name in lora.modules_to_save:
        if not any(each.endswith(name) for each, _ in model.named_modules()):
            raise ConfigError(f"training.lora.modules_to_save: the model has no module {name}")
    trained = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module_name, _, last = name.rpartition(".")
        # As in peft, a module is saved if its name ends so: norm stands for input_layernorm too.
        is_saved = module_name.endswith(tuple(lora.modules_to_save))
        if is_saved or is_adapter(name) or last in MEMORY_PARAMETERS:
            trained.add(parameter)
    for parameter in set(model.parameters()) - trained:
        parameter.requires_grad_(False)
        if parameter.ndim > 1:
            parameter.data = parameter.data.to(FROZEN)


def is_adapter(name: str) -> bool:
    """Return True if a parameter of this name is one of an adapter."""
    return name.endswith(_ADAPTERS)


def initial_adapters(model: nn.Module, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A drawn from torch's global generator as `peft` does, B zero, and m the norms of the rows.

    By name, float32. With them the model computes what it does without, with the tensors of `base`.
    They are drawn on the CPU, so that the seed decides them on any device.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            tensors[name] = torch.zeros(parameter.shape, device="cpu")
        if name.endswith(_ADAPTERS[0]):
            nn.init.kaiming_uniform_(tensors[name], a=math.sqrt(5))
        if name.endswith(_MAGNITUDE):
            tensors[name] = base[name.replace(_MAGNITUDE, "weight")].float().norm(dim=1)
    return tensors


def merged_tensors(model: nn.Module) -> Mapping[str, Tensor]:
    """The parameters of the plain model that computes the same, by name.

    Llama's are bfloat16, rounded once after the sum; the memory's stay as they are.
    """
    tensors = {n: p.detach() for n, p in model.named_parameters() if not is_adapter(n)}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            tensors[f"{name}.weight"] = module.merged()
    return {
        name: tensor if name.endswith(MEMORY_PARAMETERS) else tensor.to(FROZEN)
        for name, tensor in tensors.items()
    }
