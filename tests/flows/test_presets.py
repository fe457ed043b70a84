"""The presets, alone and combined, and `stable` over any settings."""

from pathlib import Path

import pytest

from flows.presets import (
    configure,
    is_preset,
    preset_choices,
    preset_names,
    remedy_names,
    template,
)
from infini_model.config import Config, dump_config, load_config
from infini_model.config.reading import LEFT_OPEN
from infini_model.runtime.claims import claim_run, resume_config
from infini_model.runtime.errors import ConfigError

WHOLE = sorted(set(preset_names()) - set(remedy_names()))
# They begin from weights that the user names.
PRETRAINED = ("fine-tune", "uptrain")
WEIGHTS = "model.initial_weights=team/llama"


def complete(*presets: str) -> Config:
    """The settings of presets, with what they leave to the user."""
    return configure(presets, overrides=[WEIGHTS] if presets[0].startswith(PRETRAINED) else [])


@pytest.mark.parametrize("preset", preset_choices())
def test_a_preset_survives_a_round_trip_through_yaml(preset: str, tmp_path: Path) -> None:
    config = complete(preset)
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == configure(file=file) == config
    assert config.run.preset == (f"quickstart+{preset}" if preset in remedy_names() else preset)
    assert is_preset(config.run.preset)


def test_the_presets_of_the_guides_are_there() -> None:
    guides = {"arxiv", "debug", "production", "quickstart", "shakespeare"}
    diffusion = {"diffusion-quickstart", "llada-shakespeare"}
    assert guides | diffusion | set(PRETRAINED) == set(WHOLE)
    assert remedy_names() == ("stable",)
    debug, production = configure(["debug"]), configure(["production"])
    assert (debug.model.num_hidden_layers, debug.training.max_steps) == (2, 10)
    assert debug.logging.debug
    shape = production.model
    assert (shape.num_hidden_layers, shape.hidden_size, shape.vocab_size) == (32, 4096, 128256)
    assert production.training.max_steps == 10_000
    arxiv = configure(["arxiv"])
    assert arxiv.packing.context_length == 10 * arxiv.model.segment_length == 5120


def calmer(config: Config, base: Config) -> bool:
    """Whether every setting that the remedy changes is more careful than it was."""
    now, before = config.training, base.training
    pretrained = base.model.initial_weights is not None
    return (
        (pretrained or config.model.initializer_range < base.model.initializer_range)
        and (now.learning_rate < before.learning_rate or before.learning_rate < 1e-4)
        and now.gate_learning_rate < before.gate_learning_rate
        and now.max_grad_norm < before.max_grad_norm
        and now.adam_epsilon > before.adam_epsilon
        and (now.precision, config.logging.debug) == ("fp32", True)
    )


@pytest.mark.parametrize("preset", WHOLE)
def test_the_remedy_calms_any_preset_and_leaves_its_model_data_and_length(preset: str) -> None:
    base, config = complete(preset), complete(preset, "stable")
    assert calmer(config, base)
    assert (config.data, config.packing) == (base.data, base.packing)
    shape = {"initializer_range": base.model.initializer_range}
    assert config.model.model_copy(update=shape) == base.model
    assert config.training.max_steps == base.training.max_steps
    assert config.training.learning_rate <= base.training.learning_rate
    assert config == complete(f"{preset}+stable")


def test_the_remedy_alone_lies_over_the_default_preset() -> None:
    assert configure(["stable"]) == configure(["quickstart", "stable"])


def test_the_remedy_lies_over_a_file_and_overrides_over_both(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("training: {learning_rate: 0.5, max_steps: 9}\nmodel: {hidden_size: 64}")
    config = configure(["stable"], file, ["training.max_grad_norm=0.25"])
    assert calmer(config, load_config(file))
    assert (config.model.hidden_size, config.training.max_steps) == (64, 9)
    assert config.training.max_grad_norm == 0.25
    assert config.run.preset == "stable"
    file.write_text(dump_config(configure(["arxiv"])))
    assert configure(["stable"], file) == configure(["arxiv", "stable"])


def test_the_remedy_lies_over_a_file_with_pretrained_weights_and_raises_no_rate(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "model: {initial_weights: team/llama, segment_length: 128}\n"
        "training: {learning_rate: 1e-5, gate_learning_rate: 5.0e-2}"
    )
    base, config = load_config(file), configure(["stable"], file)
    assert config.model == base.model
    assert config.training.learning_rate == 1e-5
    assert config.training.gate_learning_rate == 1e-3
    assert config.training.max_grad_norm == 0.5


@pytest.mark.parametrize("preset", PRETRAINED)
def test_what_a_preset_leaves_to_the_user_is_asked_for_in_one_line(preset: str) -> None:
    for presets in ([preset], [f"{preset}+stable"], [preset, "debug"]):
        name = "+".join(presets)
        with pytest.raises(ConfigError) as caught:
            configure(presets, overrides=["training.max_steps=3"])
        assert str(caught.value) == (
            f"model.initial_weights: missing; the preset {name} needs a pretrained Llama: "
            "model.initial_weights=FOLDER or meta-llama/Llama-3.2-1B"
        )
        model = configure(presets, overrides=[WEIGHTS]).model
        assert model.initial_weights == "team/llama"
        assert template(name).model == model.model_copy(update={"initial_weights": LEFT_OPEN})


def test_pretrained_weights_begin_at_small_rates_and_the_report_shows_the_memory() -> None:
    uptrain, fine_tune = complete("uptrain"), complete("fine-tune")
    assert 1e-5 <= uptrain.training.learning_rate <= 3e-5
    assert uptrain.training.gate_learning_rate == 1e-2
    assert uptrain.packing.mode == "aligned"
    assert uptrain.packing.context_length >= 4 * uptrain.model.segment_length
    assert "loss_by_position" in uptrain.evaluation.tasks
    assert fine_tune.training.learning_rate == 1e-5
    assert fine_tune.packing.context_length == fine_tune.model.segment_length
    assert fine_tune.model.memory == "none"
    for config in (uptrain, fine_tune):
        assert config.data.tokenizer.spec == "model"
        assert config.training.warmup_steps > 0


def test_later_presets_lie_over_earlier_ones() -> None:
    config = configure(["quickstart", "arxiv"])
    assert config.data.name == "arxiv"
    assert config.data.source == configure(["arxiv"]).data.source  # of another kind
    assert config.training.max_steps == 300
    assert config.training.learning_rate == 2e-3  # the quickstart's; arxiv names none
    assert config.run.preset == "quickstart+arxiv"
    assert configure(["stable", "production"]).training.learning_rate == 3e-4


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    for unknown in ("fast", "arxiv+fast", ""):
        with pytest.raises(ConfigError, match=r"is unknown; available: .*quickstart"):
            configure([unknown])
    file = tmp_path / "mine.yaml"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="--preset or --config, not both: arxiv would replace"):
        configure(["arxiv", "stable"], file)


def test_only_what_configure_records_is_the_name_of_presets() -> None:
    assert not any(map(is_preset, (None, "", "mine", "stable", "arxiv+mine", "arxiv+")))


def test_a_run_folder_named_after_a_preset_and_a_remedy_can_be_resumed(tmp_path: Path) -> None:
    config = configure(["debug", "stable"], overrides=[f"run.output_dir={tmp_path}"])
    with claim_run(config, "key", tmp_path / "dataset") as run_dir:
        assert run_dir.name == "debug-stable-1"
    assert resume_config(run_dir).training == config.training
