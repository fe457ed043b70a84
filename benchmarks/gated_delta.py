"""Gated DeltaNet (arXiv 2412.06464), as a rule of the memory: a peer of `benchmarks.memory_gain`.

With L2-normalised keys and queries, a state S of D x D for each head, and for each token

    S       ← α (I − β k kᵀ) S + β k vᵀ                     α, β from the token
    out     = A_local + RMSNorm(Sᵀ q) ⊙ SiLU(W x)

As in the paper queries, keys and values pass through a short causal convolution and SiLU, a token
reads the state that it has just written, and α = exp(−a softplus(W' x + b)). Queries, keys and
values before the convolution are those of the window beside it. The output's gate W has more
parameters than all of a residual memory, which is to the peer's advantage.

It takes whole sequences, and carries no state from one to the next.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from infini_model.config import ModelConfig
from infini_model.model.kernels.memory_ops import memory_dtype
from infini_model.model.memory import Rule, RuleState
from infini_model.model.precision import as_operand
from infini_model.model.window import segmented

# Taps of the convolution.
TAPS = 4
EPSILON = 1e-5


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor | None
) -> Tensor:
    """Sᵀ q of every token, a segment at a time.

    In a segment each token's u = β (v − α Sᵀ k), of which S is the sum of k uᵀ, follows from those
    before it: a triangular system for all tokens at once, linear in the state before the segment.

    Args:
        q: Normalised queries, [B, N, H, L, D].
        k: Normalised keys, of the same shape.
        v: Values, of the same shape.
        decay: log α ≤ 0, [B, N, H, L].
        beta: β, [B, N, H, L].
        starts: [B, N] bool, true where the state is emptied before a segment; None is never.

    Returns:
        [B, N, H, L, D].
    """
    earlier = torch.ones(k.size(3), k.size(3), dtype=torch.bool, device=k.device).tril()
    total = decay @ earlier.mT.to(decay.dtype)
    since = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~earlier, -math.inf).exp()
    left, kept = total.exp().unsqueeze(-1), total[..., -1].exp()[..., None, None]
    system = ((k * beta.unsqueeze(-1)) @ k.mT * since).tril(-1)
    sides = beta.unsqueeze(-1) * torch.cat((v, left * k), -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    written, removed = solved.chunk(2, -1)
    at_end = (k * since[..., -1, :].unsqueeze(-1)).mT
    added, lost = at_end @ written, at_end @ removed
    state, before = torch.zeros_like(added[:, 0]), []
    for segment in range(k.size(1)):
        if starts is not None:
            state = state.masked_fill(starts[:, segment, None, None, None], 0.0)
        before.append(state)
        state = kept[:, segment] * state - lost[:, segment] @ state + added[:, segment]
    states = torch.stack(before, 1)
    return (left * q) @ states + (q @ k.mT * since) @ (written - removed @ states)


class GatedDelta(Rule):
    """The rule of a layer, with as many key-value heads as heads."""

    parameter_names = (
        *("delta_norm", "delta_gate", "delta_token_gates", "delta_taps"),
        *("delta_log_rate", "delta_bias"),
    )
    activations, states_kept = 12, 4

    @staticmethod
    def start(config: ModelConfig) -> dict[str, Tensor]:
        """Rates and biases as in the paper's code: drawn, so that heads forget at many speeds."""
        heads, width = config.num_attention_heads, config.head_dim
        spread = config.initializer_range
        step = torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        return {
            "delta_norm": torch.ones(width),
            "delta_gate": spread * torch.randn(heads * width, config.hidden_size),
            "delta_token_gates": spread * torch.randn(2 * heads, config.hidden_size),
            "delta_taps": torch.empty(3 * TAPS, heads * width).uniform_(-0.5, 0.5),
            "delta_log_rate": torch.empty(heads).uniform_(1.0, 16.0).log(),
            "delta_bias": step.expm1().log(),
        }

    @staticmethod
    def strength(read_weight: Tensor) -> Tensor:
        """The root mean square of the norm's weight, [1]."""
        return read_weight.float().square().mean(0, keepdim=True).sqrt()

    def forward(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        values: Tensor,
        local: Tensor,
        state: RuleState | None,  # noqa: ARG002 - it takes whole sequences
        starts: Tensor | None,
        *,
        keep_state: bool,  # noqa: ARG002
    ) -> tuple[Tensor, None]:
        """As `Rule.forward`, without a state."""
        dtype, length = memory_dtype(x.dtype), local.size(3)
        weights = torch.cat((self.delta_token_gates, self.delta_gate))
        products = functional.linear(x, as_operand(weights, x)).to(dtype)
        count = len(self.delta_bias)
        rate, writing, gate = products.split((count, count, products.size(-1) - 2 * count), -1)
        decay = -self.delta_log_rate.exp() * functional.softplus(rate + self.delta_bias)
        with torch.autocast(x.device.type, enabled=False):
            taps = self.delta_taps.to(dtype).view(3, TAPS, count, 1, -1)
            q, k, v = (
                segmented(self._convolved(y.to(dtype), tap, starts), length)
                for y, tap in zip((q, k, values), taps, strict=True)
            )
            q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
            gates = torch.stack((decay, writing.sigmoid()), -1).transpose(1, 2)
            read = gated_delta(q, k, v, *segmented(gates, length).unbind(-1), starts)
            normed = functional.rms_norm(read, read.shape[-1:], self.delta_norm, EPSILON)
            gate = segmented(gate.unflatten(-1, (count, -1)).transpose(1, 2), length)
            return (local + normed * functional.silu(gate)).to(local.dtype), None

    def _convolved(self, x: Tensor, taps: Tensor, starts: Tensor | None) -> Tensor:
        """The short convolution of `x` [B, H, T, D] inside documents; `taps` [TAPS, H, 1, D]."""
        tokens, out = x.size(2), x * taps[0]
        places = torch.arange(tokens, device=x.device)
        for back in range(1, TAPS):
            before = functional.pad(x, (0, 0, back, 0))[:, :, :tokens]
            if starts is not None:
                first = starts[:, places // self.segment_length]
                first = first & (places % self.segment_length < back)
                before = before.masked_fill(first[:, None, :, None], 0.0)
            out = out + before * taps[back]
        return functional.silu(out)
