"""The memory alone learns to give what plain attention gives (LoLCATs, arXiv 2410.10254, stage 1).

    python -m benchmarks.attention_transfer LLAMA DATASET OUTPUT STEPS SEED

For each layer of a Llama, the attention of the cut model with a residual memory is computed from
the input that the layer has in the uncut model, and the squared difference of the two results is
what the memory's parameters learn from. All others stay as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.memory_forms import FORMS
from infini_model.config import PackingConfig, TrainingConfig
from infini_model.data.loading.loader import Loader
from infini_model.data.loading.windows import open_windows
from infini_model.model.layers import MEMORY_PARAMETERS
from infini_model.model.llama import InfiniLlama
from infini_model.objectives.causal import CausalLM
from infini_model.training.optimizer import make_optimizer, set_learning_rate

SEGMENT, WINDOW, BATCH = 32, 512, 4


def attentions_of(
    model: InfiniLlama, ids: Tensor, reset: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """The input and the output of each layer's attention, [B, T, hidden] each."""
    seen: list[tuple[Tensor, Tensor]] = []

    def see(module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, object]) -> None:  # noqa: ARG001
        seen.append((inputs[0], outputs[0]))

    hooks = [attention.register_forward_hook(see) for attention in model.attentions]
    with torch.no_grad():
        model.hidden(ids, reset=reset)
    for hook in hooks:
        hook.remove()
    return seen


def transfer(llama: Path, dataset: Path, steps: int, seed: int) -> InfiniLlama:
    """The model with a memory that has learned alone."""
    with FORMS["plain"].applied():
        uncut = InfiniLlama.from_pretrained(llama)
    model = InfiniLlama.from_pretrained(llama, memory="residual", segment_length=SEGMENT)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(MEMORY_PARAMETERS))
    config = TrainingConfig(
        max_steps=steps, batch_size=BATCH, gate_learning_rate=3e-2, warmup_steps=20
    )
    optimizer = make_optimizer(model, config)
    packing = PackingConfig(mode="aligned", context_length=WINDOW)
    rope = (model.model.cos, model.model.sin)
    with Loader(
        open_windows(dataset, "train", packing, SEGMENT), batch_size=BATCH, seed=seed
    ) as loader:
        for step in range(1, steps + 1):
            inputs = CausalLM().inputs(next(loader)[0])
            loss = torch.zeros(())
            with FORMS["plain"].applied():
                seen = attentions_of(uncut, inputs.input_ids, inputs.reset)
            for attention, (x, expected) in zip(model.attentions, seen, strict=True):
                out, _ = attention(x, rope, None, inputs.reset)
                loss = loss + (out - expected).square().mean() / expected.square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            set_learning_rate(optimizer, step, config)
            optimizer.step()
            optimizer.zero_grad()
            if step % 25 == 0:
                print(f"step {step}: {loss.item():.4f}", flush=True)
    return model


def main() -> None:
    """Train the memory, and save the model."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention_transfer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in ("llama", "dataset", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("seed", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transfer(options.llama, options.dataset, options.steps, options.seed).save_pretrained(
        options.output
    )


if __name__ == "__main__":
    main()
