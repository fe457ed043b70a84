"""A training of masked or block diffusion: kills, micro-batches and ranks change nothing."""

import json

import pytest
import torch
from curves import curve, repeatable, weights
from stopping import StopAfter
from trainings import on_two_ranks

from infini_model.config import ModelConfig, dump_config, load_config, validate
from infini_model.model.generation.unmasking import unmask
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


@pytest.fixture(params=[pytest.param({}, marks=pytest.mark.story), {"mode": "aligned"}, None])
def configure_any(request, configure, make_config):
    """Masked diffusion, or block diffusion in some packing."""
    if request.param is None:
        return configure
    return lambda **training: make_config(packing=request.param, training=BLOCKS | training)


def test_it_resumes_to_the_same_bits_and_ranks_see_the_same_masks(dataset, configure_any, tmp_path):
    configure = configure_any
    config = configure()
    train(config, dataset, tmp_path / "whole")
    assert train(config, dataset, tmp_path / "parts", [StopAfter(6)]).stopped_by
    train(config, dataset, tmp_path / "parts")
    assert repeatable(tmp_path / "parts") == repeatable(tmp_path / "whole")
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    smaller = configure(batch_size=2, gradient_accumulation_steps=4)
    train(smaller, dataset, tmp_path / "smaller")
    on_two_ranks(train, configure(batch_size=4), dataset, tmp_path / "pair")
    for name in ("train/loss", "validation/loss"):
        whole, *others = (curve(tmp_path / run, name) for run in ("whole", "smaller", "pair"))
        for other in others:
            assert other == pytest.approx(whole, abs=2e-5)


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


def test_its_folder_is_that_of_a_llada_with_one_row_more(dataset, configure, tmp_path):
    train(configure(max_steps=1), dataset, tmp_path / "run")
    folder = tmp_path / "run" / MODEL
    tree = json.loads((folder / "config.json").read_text())
    assert (tree["model_type"], tree["mask_token_id"]) == ("llada", 256)
    model = InfiniLlama.from_pretrained(folder)
    assert model.lm_head.out_features == 257
    tokens = [token for block in unmask(model, [1, 2], max_new_tokens=8) for token in block]
    assert len(tokens) == 8
    # Both directions matter: the first position sees the last.
    ids = torch.arange(64).unsqueeze(0)
    changed = torch.cat((ids[:, :-1], ids[:, :1]), dim=1)
    assert not torch.equal(model(ids).logits[:, 0], model(changed).logits[:, 0])


def test_a_fine_tuning_keeps_the_context_of_its_initial_weights(dataset, configure, tmp_path):
    """Shorter windows train the same weights as in a model of their length."""
    train(configure(max_steps=2), dataset, tmp_path / "first")
    found = []
    for name, length in (("short", 64), ("long", 128)):
        model = InfiniLlama.from_pretrained(tmp_path / "first" / MODEL, segment_length=length)
        model.save_pretrained(tmp_path / name)
        config = validate(
            configure(max_steps=3).model_dump()
            | {"model": {"initial_weights": str(tmp_path / name)}}
        )
        run_dir = tmp_path / f"{name}-run"
        record_initial_weights(run_dir, find_initial_weights(config))
        train(config, dataset, run_dir)
        trained = InfiniLlama.from_pretrained(run_dir / MODEL)
        assert trained.config.segment_length == length
        found.append(trained.state_dict())
    torch.testing.assert_close(*found)


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
    ("model", "key"),
    [
        ({"memory": "linear"}, "model.memory: linear does not combine"),
        ({"segment_length": 16}, "model.segment_length: 16 is less than packing.context_length 64"),
    ],
)
def test_a_model_that_does_not_fit_the_objective_is_refused(make_config, model, key):
    with pytest.raises(ConfigError, match=f"^{key}"):
        make_config(model=SHAPE | model, training=OBJECTIVE)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"model": {"memory": "none"}}, "model.memory: none, but block_diffusion reads"),
        ({"packing": {"context_length": 56}}, "packing.context_length 56 is not a multiple"),
    ],
)
def test_a_setting_that_does_not_fit_block_diffusion_is_refused(make_config, sections, key):
    with pytest.raises(ConfigError, match=f"^{key}"):
        make_config(**sections, training=BLOCKS)


def test_block_diffusion_begins_from_pretrained_weights_with_a_memory(
    dataset, configure, make_config, tmp_path
):
    """Of a LLaDA, whose memory is named, or of block diffusion, whose own is kept."""
    train(configure(max_steps=1), dataset, tmp_path / "llada")
    blocks = make_config(model={"memory": "delta"}, training=BLOCKS | {"max_steps": 1})
    train(blocks, dataset, tmp_path / "blocks")

    def begin(name, **model):
        weights = {"initial_weights": str(tmp_path / name / MODEL), "segment_length": 16}
        return validate(blocks.model_dump() | {"model": weights | model})

    for name, model, memory in (
        ("llada", {"memory": "linear"}, "linear"),
        ("blocks", {}, "delta"),
    ):
        config, run_dir = begin(name, **model), tmp_path / f"{name}-run"
        record_initial_weights(run_dir, find_initial_weights(config))
        train(config, dataset, run_dir)
        shape = InfiniLlama.from_pretrained(run_dir / MODEL).config
        assert (shape.memory, shape.memory_query_shift) == (memory, True)
    with pytest.raises(ConfigError, match=r"^model.memory: missing; .* needs linear or delta$"):
        find_initial_weights(begin("llada"))


@pytest.mark.parametrize("section", [{}, {"model": {"initial_weights": "team/llada"}}])
def test_its_settings_are_read_back_as_written(tmp_path, section):
    tree = {"training": OBJECTIVE, "packing": {"context_length": 96}}
    config = validate(tree | section)
    assert config.model.memory == "none"
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == config


def test_a_causal_model_is_not_bidirectional(make_config):
    with pytest.raises(ConfigError, match=r"^model.bidirectional: needs training.objective="):
        make_config(model={"bidirectional": True})
