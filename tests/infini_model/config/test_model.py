"""Settings of the model."""

from pathlib import Path

import pytest

from infini_model.config import ModelConfig, dump_config, load_config, validate
from infini_model.config.model import BESIDE_INITIAL_WEIGHTS
from infini_model.runtime.errors import ConfigError


def test_head_dim_is_derived_unless_it_is_set(tmp_path: Path) -> None:
    """Also when the other fields are overridden in a tree that was dumped before."""
    file = tmp_path / "config.yaml"
    for override, width in (("model.num_attention_heads=4", 64), ("model.head_dim=16", 16)):
        file.write_text(dump_config(load_config(overrides=[override])))
        assert load_config(file=file, overrides=["model.hidden_size=256"]).model.head_dim == width


WEIGHTS = {"initial_weights": "team/llama@main", "segment_length": 64}


@pytest.mark.parametrize(
    "beside", [{}, {"memory": "linear"}, {"memory_key_shift": False, "gate_start": -1.0}]
)
def test_what_was_set_beside_initial_weights_survives_yaml_and_json(
    beside: dict[str, object], tmp_path: Path
) -> None:
    config = validate({"model": WEIGHTS | beside})
    yaml, json = tmp_path / "config.yaml", tmp_path / "config.json"
    yaml.write_text(dump_config(config))
    json.write_text(config.model_dump_json())
    for file in (yaml, json):
        again = load_config(file)
        assert again == config
        assert again.identity == config.identity
        assert again.model.beside_initial_weights == {"segment_length": 64} | beside
    assert config.model_dump(mode="json")["model"] == WEIGHTS | beside


def test_every_field_of_the_shape_is_refused_beside_initial_weights() -> None:
    shape = ModelConfig().model_dump() | {"head_dim": 32}
    for name in shape.keys() - BESIDE_INITIAL_WEIGHTS:
        with pytest.raises(ConfigError) as caught:
            validate({"model": WEIGHTS | {name: shape[name]}})
        message = f"model.{name}: comes from model.initial_weights; leave it out"
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"model": {"initial_weights": "llama"}}, "model.segment_length: missing; "),
        ({"model": WEIGHTS | {"initial_weights": ""}}, "model.initial_weights: got ''"),
        ({"model": WEIGHTS | {"segment_length": 96}}, "packing.context_length 512 is not a"),
        ({"data": {"tokenizer": {"spec": "model"}}}, "data.tokenizer.spec: model is the tokeni"),
    ],
)
def test_a_mistake_with_initial_weights_is_one_line(tree: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match="^" + message.replace(".", r"\.")) as caught:
        validate(tree)
    assert "\n" not in str(caught.value)


def test_initial_weights_replace_the_shape_of_what_they_are_laid_over(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(load_config(overrides=["model.hidden_size=64"])))
    weights = "model.initial_weights=team/llama"
    model = load_config(file, [weights]).model
    assert (model.initial_weights, model.segment_length) == ("team/llama", 128)
    with pytest.raises(ConfigError, match=r"^model\.hidden_size: comes from"):
        load_config(file, [weights, "model.hidden_size=64"])


def test_the_tokenizer_of_the_model_is_that_of_its_weights() -> None:
    config = validate({"model": WEIGHTS, "data": {"tokenizer": {"spec": "model"}}})
    assert config.data_to_tokenize.tokenizer.spec == "team/llama@main"
    assert load_config().data_to_tokenize == load_config().data
