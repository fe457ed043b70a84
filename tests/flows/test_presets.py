"""The presets, alone and combined, and `stable` over any settings."""

from pathlib import Path

import pytest

from flows.presets import configure, is_preset, preset_choices, preset_names, remedy_names
from infini_model.config import Config, dump_config, load_config
from infini_model.runtime.claims import claim_run, resume_config
from infini_model.runtime.errors import ConfigError

WHOLE = sorted(set(preset_names()) - set(remedy_names()))


@pytest.mark.parametrize("preset", preset_choices())
def test_a_preset_survives_a_round_trip_through_yaml(preset: str, tmp_path: Path) -> None:
    config = configure([preset])
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == configure(file=file) == config
    assert config.run.preset == (f"quickstart+{preset}" if preset in remedy_names() else preset)
    assert is_preset(config.run.preset)


def test_the_presets_of_the_guides_are_there() -> None:
    assert {"arxiv", "debug", "production", "quickstart", "shakespeare"} == set(WHOLE)
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
    return (
        config.model.initializer_range < base.model.initializer_range
        and now.learning_rate < before.learning_rate
        and now.gate_learning_rate < before.gate_learning_rate
        and now.max_grad_norm < before.max_grad_norm
        and now.adam_epsilon > before.adam_epsilon
        and (now.precision, config.logging.debug) == ("fp32", True)
    )


@pytest.mark.parametrize("preset", WHOLE)
def test_the_remedy_calms_any_preset_and_leaves_its_model_data_and_length(preset: str) -> None:
    base, config = configure([preset]), configure([preset, "stable"])
    assert calmer(config, base)
    assert (config.data, config.packing) == (base.data, base.packing)
    shape = {"initializer_range": base.model.initializer_range}
    assert config.model.model_copy(update=shape) == base.model
    assert config.training.max_steps == base.training.max_steps
    assert config == configure([f"{preset}+stable"])


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
