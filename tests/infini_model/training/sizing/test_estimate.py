"""The memory estimate beside what real models hold and what real steps allocate."""

import itertools
from typing import Any

import pytest
import torch

from benchmarks.memory_estimate import BF16, CASES, SMALL, TOLERANCE, complete, settings
from benchmarks.memory_peak import peak_of_step, world_of
from infini_model.config import LoraConfig, ModelConfig, merge, validate
from infini_model.model import loss
from infini_model.model.kernels.local_attention import resolve_backend
from infini_model.model.llama import InfiniLlama
from infini_model.model.precision import resolve_precision
from infini_model.training.parallel.distributed import World
from infini_model.training.sizing import estimate as module
from infini_model.training.sizing.estimate import checkpoint_copy, estimate_memory, workload

CPU = torch.device("cpu")
TINY = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 70}


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"num_key_value_heads": 2, "head_dim": 10, "num_hidden_layers": 3},
        {"tie_word_embeddings": True, "memory_query_shift": True},
        {"memory": "none"},
        {"memory": "delta", "memory_key_shift": False},
    ],
)
@pytest.mark.parametrize(
    "lora",
    [
        None,
        {"r": 3},
        {"r": 5, "target_modules": ["down_proj"], "modules_to_save": ["norm", "embed_tokens"]},
    ],
)
def test_weights_and_moments_are_those_of_the_model(
    model: dict[str, Any], lora: dict[str, Any] | None
) -> None:
    shape = ModelConfig.model_validate(TINY | model)
    adapters = None if lora is None else LoraConfig.model_validate(lora)
    with torch.device("meta"):
        parameters = [*InfiniLlama(shape, lora=adapters).parameters()]
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    config = complete(merge(SMALL, {"model": shape.model_dump(), "training": {"lora": lora}}))
    found = estimate_memory(config, 1, "cpu")
    assert found.weights == sum(p.numel() * p.element_size() for p in parameters)
    assert found.moments == 2 * 4 * trained
    assert checkpoint_copy(config, "cpu") == 3 * 4 * trained
    assert checkpoint_copy(config, "cuda") >= 3 * 4 * trained


def test_what_the_estimate_knows_of_the_model_is_what_the_model_does() -> None:
    assert loss.LOGITS_AT_ONCE == module.LOGITS_AT_ONCE
    assert loss.PRODUCTS_AT_ONCE == module.PRODUCTS_AT_ONCE
    grid = itertools.product(
        ("auto", "bf16", "fp16", "fp32"), ("auto", "tiled", "math"), (128, 256), (True, False)
    )
    for precision, backend, length, causal in grid:
        objective = "causal" if causal else "masked_diffusion"
        memory = {} if causal else {"memory": "none"}
        config = validate(
            {
                "packing": {"context_length": length},
                "model": {"segment_length": length, **memory},
                "training": {"precision": precision, "objective": objective},
                "launch": {"attention_backend": backend},
            }
        )
        for device in ("cpu", "cuda"):
            products = resolve_precision(precision, torch.device(device)).products or torch.float32
            work = workload(config, device)
            assert work.product_bytes == products.itemsize
            if device == "cpu" and not (backend == "tiled" and products != torch.float32):
                kernel = resolve_backend(backend, CPU, products, 32, length, causal=causal)
                assert (work.kernel == "tiled") == (kernel == "tiled")


# A third of each window as in `benchmarks.memory_estimate`, which measures all cases in full.
SHORT = {"packing": {"context_length": 256}, "training": {"batch_size": 2}}
MEASURED = {
    "causal": {},
    "16 bits": BF16,
    "weights": {"model": {"hidden_size": 512, "intermediate_size": 1536}},
    "recomputed": {"launch": {"gradient_checkpointing": True}},
    "vocabulary": {"model": {"vocab_size": 20_000}},
    "accumulated": {"training": {"gradient_accumulation_steps": 2}},
    "no memory": {"model": {"memory": "none"}},
    "blocks": {"training": {"objective": "block_diffusion"}},
    "LoRA": {"training": {"lora": {"target_modules": ["q_proj", "down_proj"]}}},
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_estimate_is_the_measured_peak_of_a_step(name: str) -> None:
    config = complete(merge(merge(SMALL, SHORT), MEASURED[name]))
    measured = peak_of_step(config, World(0, 1, CPU))
    assert estimate_memory(config, 1, "cpu").total == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.story
@pytest.mark.parametrize("name", ["FSDP", "FSDP, accumulated", "FSDP, recomputed in 16 bits"])
def test_under_fsdp_a_process_holds_its_shards_and_never_all_gradients(name: str) -> None:
    config, processes = complete(settings(name)), CASES[name][1]
    with world_of(config, processes) as world:
        measured = peak_of_step(config, world)
    found = estimate_memory(config, processes, "cpu").total
    assert found == pytest.approx(measured, rel=TOLERANCE)
