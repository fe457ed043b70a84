"""What a training needs, beside what a step allocates; what cannot fit is refused, with advice."""

import logging
import re
from dataclasses import replace

import pytest

from benchmarks.memory_estimate import TOLERANCE, configured, peak_of_step
from flows.presets import configure
from infini_model.config import Config, LoraConfig, load_config
from infini_model.runtime.errors import ConfigError
from infini_model.training.memory_estimate import (
    GIB,
    KEPT,
    Machine,
    Need,
    advice,
    check_memory,
    estimate_memory,
)
from infini_model.training.model_shape import UnknownShapeError, known_shape

# As NVML counts it.
H100 = int(79.6 * GIB)
EIGHT = Machine("cuda", 8, 8, True, H100, 512 * GIB)
ONE = replace(EIGHT, processes=1, local=1)
DESKTOP = Machine("cpu", 1, 1, True, 0, 16 * GIB)


@pytest.mark.parametrize("case", ["activations", "muon", "OLMo 2's norms in 16 bits"])
def test_the_estimate_is_the_counted_peak_of_a_step(case: str) -> None:
    config = configured(case)
    found = estimate_memory(config, 1, "cpu").total
    assert found == pytest.approx(peak_of_step(config), rel=TOLERANCE)


def known(preset: str, *overrides: str) -> Config:
    return known_shape(configure([preset], overrides=overrides))


def applied(config: Config, words: str) -> Config:
    """The settings that an advice names, as a user types them."""
    return load_config(overrides=[config.model_dump(mode="json"), *words.split()])


def test_the_presets_fit_the_machines_that_their_first_lines_name() -> None:
    config = known("one-gpu")
    assert round(estimate_memory(config, 1, "cuda").total / GIB) == 18
    # Some of the 24 GiB are the CUDA context's.
    assert not Need.of(config, replace(ONE, gpu_bytes=23 * GIB)).shortage(KEPT)
    need = Need.of(known("production"), EIGHT)
    assert not need.shortage(KEPT)
    # In main memory 8 billion weights with two moments.
    assert 12 * 8e9 < need.main < 128 * GIB


def test_what_is_certain_not_to_fit_is_refused_with_settings_that_would() -> None:
    config = known("production")
    with pytest.raises(ConfigError, match=r"needs at least 120 GiB .*; a smaller model or"):
        check_memory(config, ONE)
    unsharded = known("production", "launch.strategy=ddp")
    remedy = r"; launch.strategy=fsdp would need 46 GiB a process;.*launch\.force=true"
    with pytest.raises(ConfigError, match=remedy):
        check_memory(unsharded, EIGHT)
    check_memory(applied(unsharded, "launch.force=true"), EIGHT)
    small = replace(DESKTOP, main_bytes=GIB // 4)
    with pytest.raises(
        ConfigError, match=r"main memory, .* and 0\.25 GiB are available; a smaller model"
    ):
        check_memory(known("quickstart"), small)


@pytest.mark.parametrize("batch", [10**9, 999_999_937])
def test_a_batch_of_many_times_the_memory_is_refused_with_one_that_fits(batch: int) -> None:
    config = known("quickstart", f"training.batch_size={batch}")
    with pytest.raises(ConfigError, match="not enough memory: the training needs about") as caught:
        check_memory(config, DESKTOP)
    (words,) = re.findall(r"available; (.*) would need", str(caught.value))
    assert not Need.of(applied(config, words), DESKTOP).shortage()
    check_memory(applied(config, "launch.force=true"), DESKTOP)


def test_what_may_not_fit_is_a_warning_and_its_advice_keeps_the_global_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shape = ("model.hidden_size=768", "model.intermediate_size=3072", "model.num_hidden_layers=20")
    for overrides, machine in (
        (["training.batch_size=6", "launch.processes=2"], replace(DESKTOP, processes=2, local=2)),
        (["training.batch_size=6", "model.num_hidden_layers=30"], DESKTOP),
    ):
        config = known("arxiv", *shape, *overrides, "launch.gradient_checkpointing=false")
        caplog.clear()
        with caplog.at_level(logging.WARNING, "infini_model"):
            check_memory(config, machine)
        assert "the memory may not suffice: the training needs about" in caplog.text
        words, _, rest = advice(config, machine).partition(" would need ")
        assert rest.endswith(" GiB a process")
        assert words in caplog.text
        better = applied(config, words)
        assert not Need.of(better, machine).shortage()
        then, now = (
            each.training.batch_size * each.training.gradient_accumulation_steps
            for each in (config, better)
        )
        assert now == then


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_as_few_layers_are_recomputed_as_fit(share: float) -> None:
    def need(setting: object) -> Need:
        machine = replace(ONE, gpu_bytes=int(share * whole.total))
        return Need.of(config.updated(launch={"gradient_checkpointing": setting}), machine)

    config = known("one-gpu", "model.num_hidden_layers=24", "training.batch_size=16")
    whole = estimate_memory(config, 1, "cuda")
    found = need("auto")
    assert 0 < found.recomputed <= 24
    assert need(found.recomputed) == found
    assert not found.shortage(KEPT)
    assert need(found.recomputed - 1).shortage(KEPT)
    assert Need.of(config, ONE).recomputed == need(False).recomputed == 0
    assert need(True).recomputed == need(99).recomputed == 24


def test_each_process_copies_its_shard_for_a_checkpoint() -> None:
    config = known("production", "launch.gradient_checkpointing=true")
    copies = {
        (strategy, is_first): Need.of(
            config.updated(launch={"strategy": strategy}),
            replace(EIGHT, processes=32, is_first=is_first),
        ).copy
        for strategy in ("ddp", "fsdp", "hsdp")
        for is_first in (True, False)
    }
    whole = 12 * 8e9
    assert copies["ddp", False] == copies["hsdp", False] == 0
    assert whole < copies["ddp", True] < 1.2 * whole
    assert whole < copies["hsdp", True] < 1.2 * whole
    assert whole / 4 < copies["fsdp", False] < 1.2 * whole / 4
    # Rank 0 draws the weights.
    assert copies["fsdp", True] == pytest.approx(whole / 3, rel=0.02)


def test_lora_is_named_where_pretrained_weights_are_trained_whole() -> None:
    config = known("production")
    hint = "; training.lora={} needs less, and freezes the pretrained weights"
    assert advice(config, ONE, is_pretrained=True) == advice(config, ONE) + hint
    adapted = config.updated(training={"lora": LoraConfig()})
    assert estimate_memory(adapted, 1, "cuda").total < estimate_memory(config, 1, "cuda").total / 2
    assert hint not in advice(adapted, replace(ONE, gpu_bytes=GIB), is_pretrained=True)


def test_a_shape_that_only_weights_or_a_tokenizer_know_is_not_guessed() -> None:
    for preset, name in (("llada-shakespeare", "weights GSAI-ML/LLaDA-8B-Base"), ("arxiv", "tok")):
        config = configure([preset], overrides=["data.tokenizer.spec=team/tokenizer"])
        with pytest.raises(UnknownShapeError, match=f"not known before the {name}"):
            known_shape(config)
    assert known("shakespeare").model.vocab_size == 256
    assert known("quickstart", "data.tokenizer.vocab_size=5000").model.vocab_size == 5000
    assert known("diffusion-quickstart").model.vocab_size == 257
