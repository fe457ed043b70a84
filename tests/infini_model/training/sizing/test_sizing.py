"""The memory estimate beside what real steps allocate; what cannot fit is refused, with advice."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.memory_estimate import (
    BF16,
    FSDP,
    SMALL,
    TOLERANCE,
    complete,
    peak_of_step,
    world_of,
)
from flows.presets import configure
from infini_model.config import Config, LoraConfig, ModelConfig, load_config, merge, validate
from infini_model.model import loss
from infini_model.model.kernels.attention import resolve_backend
from infini_model.model.llama import InfiniLlama
from infini_model.model.precision import resolve_precision
from infini_model.runtime import machine as this_machine
from infini_model.runtime.errors import ConfigError
from infini_model.runtime.machine import available_memory
from infini_model.training.sizing import estimate as module
from infini_model.training.sizing.estimate import GIB, checkpoint_copy, estimate_memory, workload
from infini_model.training.sizing.fitting import (
    MARGIN,
    Machine,
    Need,
    changed,
    check_memory,
    remedy,
)
from infini_model.training.sizing.parameters import layer_parameters, root_parameters
from infini_model.training.sizing.shape import UnknownShapeError, known_shape

CPU = torch.device("cpu")
TINY = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 70}


@pytest.mark.parametrize(
    ("model", "lora"),
    [
        ({"num_key_value_heads": 2, "head_dim": 10, "num_hidden_layers": 3}, None),
        ({"tie_word_embeddings": True, "memory_query_shift": True}, None),
        ({"memory": "residual", "num_key_value_heads": 2, "head_dim": 10}, None),
        ({"memory": "delta", "memory_key_shift": False}, {"r": 3}),
        (
            {"memory": "none", "tie_word_embeddings": True},
            {"r": 5, "target_modules": ["down_proj"], "modules_to_save": ["norm", "embed_tokens"]},
        ),
    ],
    ids=["grouped heads", "tied", "residual", "LoRA", "LoRA and whole modules"],
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


@pytest.mark.parametrize("precision", ["auto", "bf16", "fp16", "fp32"])
def test_what_the_estimate_knows_of_the_model_is_what_the_model_does(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert loss.LOGITS_AT_ONCE == module.LOGITS_AT_ONCE
    assert loss.PRODUCTS_AT_ONCE == module.PRODUCTS_AT_ONCE
    config = validate({"model": {"segment_length": 256}, "training": {"precision": precision}})
    for device in ("cpu", "cuda"):
        products = resolve_precision(precision, torch.device(device)).products or torch.float32
        assert workload(config, device).product_bytes == products.itemsize
    products = resolve_precision(precision, CPU).products or torch.float32
    kernel = resolve_backend("auto", CPU, products, 32, 256, causal=True)
    assert (workload(config, "cpu").kernel == "tiled") == (kernel == "tiled")


# A third of each window as in `benchmarks.memory_estimate`, which measures all cases in full.
SHORT = {"packing": {"context_length": 256}, "training": {"batch_size": 2}}
WIDE: dict[str, Any] = {
    "model": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2}
}
RECOMPUTED: dict[str, Any] = {"launch": {"gradient_checkpointing": True}}
MEASURED: dict[str, tuple[dict[str, Any], int]] = {
    "causal": ({}, 1),
    "recomputed": (RECOMPUTED, 1),
    "residual": ({"model": {"memory": "residual"}}, 1),
    "vocabulary": ({"model": {"vocab_size": 20_000}}, 1),
    "blocks": ({"training": {"objective": "block_diffusion"}}, 1),
    "LoRA": ({"training": {"lora": {"target_modules": ["q_proj", "down_proj"]}}}, 1),
    # A process holds its shards, and never all gradients.
    "FSDP": (merge(merge(WIDE, FSDP), {"training": {"gradient_accumulation_steps": 2}}), 2),
    "FSDP in 16 bits": (merge(merge(FSDP, BF16), {"model": {"num_hidden_layers": 2}}), 2),
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_estimate_is_the_measured_peak_of_a_step(name: str) -> None:
    changes, processes = MEASURED[name]
    config = complete(merge(merge(SMALL, SHORT), changes))
    with world_of(config, processes) as world:
        measured = peak_of_step(config, world)
    found = estimate_memory(config, processes, "cpu").total
    assert found == pytest.approx(measured, rel=TOLERANCE)


# As NVML counts it.
H100 = int(79.6 * GIB)
EIGHT = Machine("cuda", 8, 8, True, H100, 512 * GIB)
DESKTOP = Machine("cpu", 1, 1, True, 0, 16 * GIB)


def known(preset: str, *overrides: str) -> Config:
    return known_shape(configure([preset], overrides=overrides))


def applied(config: Config, words: str) -> Config:
    """The settings that a remedy names, as a user types them."""
    return load_config(overrides=[config.model_dump(mode="json"), *words.split()])


def test_one_gpu_takes_what_its_first_lines_say_and_fits_a_gpu_of_24_gigabytes() -> None:
    config = known("one-gpu")
    assert round(estimate_memory(config, 1, "cuda").total / GIB) == 17
    # Some of the 24 GiB are the CUDA context's.
    need = check_memory(config, Machine("cuda", 1, 1, True, 23 * GIB, 64 * GIB))
    assert not need.exceeds(Machine("cuda", 1, 1, True, 23 * GIB, 16 * GIB), MARGIN)
    assert sum(p.size for p in root_parameters(config.model, None)) + 12 * sum(
        p.size for p in layer_parameters(config.model, None)
    ) == pytest.approx(124e6, rel=0.01)


def test_production_fits_the_machine_that_its_first_line_names_and_not_a_single_gpu() -> None:
    config = known("production")
    need = check_memory(config, EIGHT)
    assert not need.exceeds(EIGHT, MARGIN)
    # In main memory 8 billion weights with two moments.
    assert need.main > 12 * 8e9
    assert not need.exceeds(replace(EIGHT, main_bytes=128 * GIB))
    with pytest.raises(ConfigError, match=r"needs 1\d\d GiB \(weights 30, .*on \d+ such GPUs wou"):
        check_memory(config, replace(EIGHT, processes=1, local=1))
    unsharded = known("production", "launch.strategy=ddp")
    with pytest.raises(ConfigError, match=r"; launch.strategy=fsdp would fit;.*launch\.force=true"):
        check_memory(unsharded, EIGHT)
    forced = applied(unsharded, "launch.force=true")
    assert check_memory(forced, EIGHT).exceeds(EIGHT)


@pytest.mark.parametrize(
    ("overrides", "machine"),
    [
        (["training.batch_size=48", "launch.processes=2"], replace(DESKTOP, processes=2, local=2)),
        (["training.batch_size=6", "model.num_hidden_layers=30"], DESKTOP),
    ],
)
def test_the_settings_that_would_fit_do_and_keep_the_global_batch(
    overrides: list[str], machine: Machine
) -> None:
    shape = ("model.hidden_size=768", "model.intermediate_size=3072", "model.num_hidden_layers=20")
    config = known("arxiv", *shape, *overrides)
    assert Need.of(config, machine).exceeds(machine)
    words, _, rest = remedy(config, machine).partition(" would fit")
    assert rest == ""
    better = applied(config, words)
    assert not Need.of(better, machine).exceeds(machine)
    for each in (better.training, config.training):
        windows = each.batch_size * each.gradient_accumulation_steps
        assert windows == config.training.batch_size * config.training.gradient_accumulation_steps


def test_the_cheapest_settings_are_named_first() -> None:
    config = known("quickstart", "training.batch_size=8")
    lean = changed(config, {"launch.gradient_checkpointing": True})
    enough = Need.of(lean, DESKTOP).main / (1 - MARGIN) + 1
    tight = replace(DESKTOP, main_bytes=int(enough))
    assert remedy(config, tight) == "launch.gradient_checkpointing=true would fit"
    none = replace(DESKTOP, main_bytes=GIB // 4)
    assert remedy(config, none).startswith("no setting makes it fit; a smaller model")


def test_lora_is_named_where_pretrained_weights_are_trained_whole_and_do_not_fit() -> None:
    config, one = known("production"), replace(EIGHT, processes=1, local=1)
    plain = remedy(config, one)
    assert plain.endswith(" such GPUs would fit")
    with pytest.raises(ConfigError) as error:
        check_memory(config, one, is_pretrained=True)
    _, _, lora = str(error.value).partition(f"{plain}, or here ")
    words, _, _ = lora.partition(", which freezes the pretrained weights")
    adapters, *rest = words.split()
    assert adapters == "training.lora={}"
    adapted = changed(applied(config, " ".join(rest)), {"training.lora": LoraConfig()})
    assert not Need.of(adapted, one).exceeds(one)
    assert remedy(adapted, replace(one, gpu_bytes=GIB), is_pretrained=True).endswith("needs less")


def test_a_shape_that_only_weights_or_a_tokenizer_know_is_not_guessed() -> None:
    for preset, name in (("llada-shakespeare", "weights GSAI-ML/LLaDA-8B-Base"), ("arxiv", "tok")):
        config = configure([preset], overrides=["data.tokenizer.spec=team/tokenizer"])
        with pytest.raises(UnknownShapeError, match=f"not known before the {name}"):
            known_shape(config)
    assert known("shakespeare").model.vocab_size == 256
    assert known("quickstart", "data.tokenizer.vocab_size=5000").model.vocab_size == 5000
    assert known("diffusion-quickstart").model.vocab_size == 257


def test_a_container_has_what_its_limit_leaves(tmp_path, monkeypatch) -> None:
    free = available_memory()
    assert free > 0
    monkeypatch.setattr(this_machine, "CGROUP", tmp_path)
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 150000\n")
    for limit, left in (("1000000\n", 450_000), ("100\n", 0)):
        (tmp_path / "memory.max").write_text(limit)
        assert available_memory() == left
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > 1_000_000
