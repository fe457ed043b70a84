"""Models of masked and block diffusion: their settings, folders and initial weights."""

import pytest
import torch

from infini_model.config import ModelConfig, dump_config, load_config, validate
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import CheckpointError, ConfigError
from infini_model.runtime.runs import MODEL
from infini_model.training.initial_weights import find_initial_weights, record_initial_weights
from infini_model.training.loop import train

OBJECTIVE = {"objective": "masked_diffusion"}
BLOCKS = {"objective": "block_diffusion"}
# One segment, as long as the window.
SHAPE = {"hidden_size": 32, "segment_length": 64}


@pytest.fixture
def configure(make_config):
    return lambda **training: make_config(model=SHAPE, training=OBJECTIVE | training)


def begin(config, dataset, run_dir, **model):
    """Train as `config`, beginning from the weights that `model` names; returns the result."""
    config = validate(config.model_dump() | {"model": model})
    record_initial_weights(run_dir, find_initial_weights(config))
    train(config, dataset, run_dir)
    return InfiniLlama.from_pretrained(run_dir / MODEL)


def test_a_checkpoint_of_block_diffusion_is_a_model_with_shifted_queries(
    dataset, make_config, tmp_path
):
    config = make_config(training=BLOCKS | {"max_steps": 2})
    assert config.model.memory_query_shift is None
    train(config, dataset, tmp_path / "run")
    model = InfiniLlama.from_pretrained(tmp_path / "run" / MODEL)
    shape = model.config
    assert (shape.bidirectional, shape.memory, shape.memory_query_shift) == (True, "linear", True)
    assert (shape.segment_length, shape.mask_token_id, shape.vocab_size) == (16, 256, 257)
    shifts = model.get_parameter("model.layers.1.self_attn.memory_query_shift")
    assert not torch.equal(shifts, torch.full((2,), 0.5))
    off = make_config(model={"memory_query_shift": False}, training=BLOCKS | {"max_steps": 1})
    train(off, dataset, tmp_path / "off")
    assert not InfiniLlama.from_pretrained(tmp_path / "off" / MODEL).config.memory_query_shift


def test_a_fine_tuning_keeps_the_context_of_its_initial_weights(dataset, configure, tmp_path):
    """Shorter windows train the same weights as in a model of their length."""
    train(configure(max_steps=2), dataset, tmp_path / "first")
    found = []
    for name, length in (("short", 64), ("long", 128)):
        model = InfiniLlama.from_pretrained(tmp_path / "first" / MODEL, segment_length=length)
        model.save_pretrained(tmp_path / name)
        weights = {"initial_weights": str(tmp_path / name)}
        trained = begin(configure(max_steps=3), dataset, tmp_path / f"{name}-run", **weights)
        assert trained.config.segment_length == length
        found.append(trained.state_dict())
    torch.testing.assert_close(*found)


def test_block_diffusion_begins_from_pretrained_weights_with_a_memory(
    dataset, configure, make_config, tmp_path
):
    """Of a LLaDA, whose memory is named, or of block diffusion, whose own is kept."""
    train(configure(max_steps=1), dataset, tmp_path / "llada")
    blocks = make_config(model={"memory": "delta"}, training=BLOCKS | {"max_steps": 1})
    train(blocks, dataset, tmp_path / "blocks")

    def memory_of(name, **model):
        weights = {"initial_weights": str(tmp_path / name / MODEL), "segment_length": 16}
        shape = begin(blocks, dataset, tmp_path / f"{name}-run", **weights | model).config
        assert shape.memory_query_shift
        return shape.memory

    assert memory_of("llada", memory="linear") == "linear"
    assert memory_of("blocks") == "delta"
    with pytest.raises(ConfigError, match=r"^model.memory: missing; .* needs linear or delta$"):
        memory_of("llada")


def test_a_mask_token_outside_the_vocabulary_is_named(dataset, make_config, tmp_path):
    config = make_config(model=SHAPE | {"mask_token_id": 256}, training=OBJECTIVE)
    with pytest.raises(ConfigError, match=r"^model.mask_token_id: 256 is outside .* 256 tokens$"):
        train(config, dataset, tmp_path)


def test_a_mask_token_that_the_initial_weights_lack_is_named_before_any_data_is_made(tmp_path):
    InfiniLlama(ModelConfig(vocab_size=256, hidden_size=32)).save_pretrained(tmp_path / "llama")
    weights = {"initial_weights": str(tmp_path / "llama"), "mask_token_id": 256}
    config = validate({"model": weights, "training": OBJECTIVE})
    with pytest.raises(CheckpointError, match="mask_token_id 256 is outside the vocabulary of 256"):
        find_initial_weights(config)


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        (
            {"training": OBJECTIVE, "model": SHAPE | {"memory": "linear"}},
            "model.memory: linear does not combine",
        ),
        (
            {"training": OBJECTIVE, "model": SHAPE | {"segment_length": 16}},
            "model.segment_length: 16 is less than packing.context_length 64",
        ),
        (
            {"training": BLOCKS, "model": {"memory": "none"}},
            "model.memory: none, but block_diffusion reads",
        ),
        (
            {"training": BLOCKS, "packing": {"context_length": 56}},
            "packing.context_length 56 is not a multiple",
        ),
        ({"model": {"bidirectional": True}}, "model.bidirectional: needs training.objective="),
    ],
    ids=["memory", "segments", "no memory", "length", "bidirectional"],
)
def test_settings_that_do_not_fit_the_objective_are_refused(make_config, sections, error):
    with pytest.raises(ConfigError, match=f"^{error}"):
        make_config(**sections)


@pytest.mark.parametrize("section", [{}, {"model": {"initial_weights": "team/llada"}}])
def test_its_settings_are_read_back_as_written(tmp_path, section):
    tree = {"training": OBJECTIVE, "packing": {"context_length": 96}}
    config = validate(tree | section)
    assert config.model.memory == "none"
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == config
