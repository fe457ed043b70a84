"""The residual memory, the default: sharp features, no normaliser, and two gates of each token.

The features φ(x) = [softmax(c x), softmax(−c x)] are of width 2 D (Hedgehog, arXiv 2402.04347).
What is read is normed, weighed and added to the local attention:

    out     = A_local + w ⊙ RMSNorm(φ(Q) S)
    S       ← e^g S + β φ(k)ᵀ v                             for each token of the segment

The gates say what is worth keeping: β (`write_share`), how much of its value a token writes, and
g ≤ 0 (`log_keep`), the logarithm of what it keeps of what is older (Gated DeltaNet, arXiv
2412.06464). What is left before a segment is a product over the segments before it, so the memory
is still a sum, each part multiplied by what the later segments keep.

With w = 0, out = A_local exactly: so a pretrained Llama begins as the Llama that it was.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from infini_model.config import ModelConfig
from infini_model.model.kernels.memory_ops import memory_dtype, residual_read, residual_sums
from infini_model.model.kernels.scan import exclusive_scan
from infini_model.model.memory.rule import Memory, Rule
from infini_model.model.precision import as_operand

# Where the gates start, before sigmoid and softplus: a token writes 90% of its value, and lets
# 0.01% fade of what the memory holds. With 0.1%, text is learned as well, and pass keys are lost at
# four times the trained length (`benchmarks.passkey`).
WRITE_START, FORGET_START = 2.2, -9.0


class Residual(Rule):
    """A memory whose read is added to the local attention, by a weight that starts at 0."""

    parameter_names = ("memory_weight", "memory_write_gate", "memory_forget_gate")
    read_weight_dims = 2
    features = 2
    is_gated = True
    pretrained_shift = 0.5
    activations, states_kept = 4, 2
    memory_write_gate: nn.Parameter
    memory_forget_gate: nn.Parameter

    @staticmethod
    def start(config: ModelConfig) -> dict[str, Tensor]:
        """w = 0 and gates that depend on no token."""
        gates = torch.zeros(config.key_value_heads, config.hidden_size)
        return {
            "memory_weight": torch.zeros(config.num_attention_heads, config.head_dim),
            "memory_write_gate": gates,
            "memory_forget_gate": gates.clone(),
        }

    @staticmethod
    def strength(read_weight: Tensor) -> Tensor:
        """The root mean square of w over the width of a head."""
        return read_weight.float().square().mean(1).sqrt()

    def token_gates(self, x: Tensor) -> Tensor:
        """`write_share` sigmoid(W x + 2.2) and `log_keep` −softplus(W' x − 9) of x [B, T, hidden].

        Together they are [B, H_kv, T, 2], float32 (float64 for float64).
        """
        weights = torch.cat((self.memory_write_gate, self.memory_forget_gate))
        product = functional.linear(x, as_operand(weights, x)).to(memory_dtype(x.dtype))
        writing, forgetting = product.transpose(1, 2).chunk(2, dim=1)
        write_share = (writing + WRITE_START).sigmoid()
        log_keep = -functional.softplus(forgetting + FORGET_START)
        return torch.stack((write_share, log_keep), dim=-1)

    @classmethod
    def states(
        cls,
        keys: Tensor,
        values: Tensor,
        gates: Tensor | None,
        first: Memory,
        starts: Tensor | None,
    ) -> Memory:
        """As `Rule.states`; without `gates`, `write_share` is 1 and `log_keep` is 0."""
        if gates is None:
            left, kept = keys.new_ones(keys.shape[:-1], dtype=first.kv.dtype), None
        else:
            write_share, log_keep = gates.unbind(-1)
            # What is left of what a token writes is what the later ones of its segment keep.
            left, kept = write_share * _sums_of_later(log_keep).exp(), log_keep.sum(-1).exp()
        sums = residual_sums(*(x.flatten(0, 1) for x in (keys, values, left)))
        added = sums.view(*keys.shape[:2], *sums.shape[1:])
        return Memory(exclusive_scan(added, first.kv, starts, kept), None)

    @staticmethod
    def read(q: Tensor, local: Tensor, read_weight: Tensor, memory: Memory) -> Tensor:
        """As `Rule.read`; `read_weight` is w, [H, D]."""
        return residual_read(q, local, read_weight, memory.kv)


def _sums_of_later(x: Tensor) -> Tensor:
    """For each number of the last dimension the sum of those after it.

    By products with triangles, as CUDA's `cumsum` is not deterministic: inside about √L blocks of
    about √L, and of these.
    """
    length = x.size(-1)
    width = math.isqrt(length - 1) + 1
    count = math.ceil(length / width)
    blocks = functional.pad(x, (0, -length % width)).reshape(*x.shape[:-1], count, width)
    with torch.autocast(x.device.type, enabled=False):
        inside = blocks @ x.new_ones(width, width).tril(-1)
        beyond = blocks.sum(-1) @ x.new_ones(count, count).tril(-1)
    return (inside + beyond.unsqueeze(-1)).flatten(-2)[..., :length]
