"""The task heads on a small real run, beside the model itself."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional
from trained_run import WORLD, evaluated, make_all, make_run, settings

from infini_model.data.loading.validation import sample_windows
from infini_model.data.loading.windows import open_windows
from infini_model.evaluation.statistics import bootstrap
from infini_model.model.inspection.knock_out import knocked_out
from infini_model.model.llama import InfiniLlama
from infini_model.training.checkpoints.background import HostCopy
from infini_model.training.checkpoints.checkpoint import (
    Position,
    newest_checkpoint,
    save_checkpoint,
)

ONLY = {"evaluation.tasks": ["heads"], "evaluation.heads.max_windows": 6}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(root, dataset folder, run folder), not to be modified by tests."""
    return make_all(tmp_path_factory.mktemp("heads"))


def measured(made, **overrides):
    return evaluated(made, **ONLY | overrides)


def test_rises_are_paired_differences_with_a_bootstrap_interval_over_windows(made):
    root, dataset, run_dir = made
    result = measured(made, **{"evaluation.heads.max_heads": None})
    model = InfiniLlama.from_pretrained(newest_checkpoint(run_dir) / "model")
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    windows = open_windows(dataset, "validation", settings(root).packing, 8)
    tokens = windows.gather(sample_windows(len(windows), 6)).tokens[:, 0]
    assert len(windows) > len(tokens) == result.details["windows"]

    def losses():
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits
        each = functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
        return each.sum(1).double().numpy()

    read = losses()
    parts = {"all": (None, None)} | {f"layer-{n}": (n, None) for n in range(layers)}
    parts |= {f"layer-{n}-head-{h}": (n, h) for n in range(layers) for h in range(heads)}
    assert result.details["gains"].keys() == parts.keys()
    for name, part in parts.items():
        with knocked_out(model, *part):
            rises = losses() - read
        (expected,) = bootstrap(rises[:, None], np.full((len(tokens), 1), 32))
        assert result.details["gains"][name] == pytest.approx(list(expected), abs=1e-6)
    gain = result.details["gains"]["all"]
    assert result.metrics["evaluation/heads/gain"] == gain[0]
    assert result.intervals["evaluation/heads/gain"] == tuple(gain[1:])
    assert "evaluation/heads/layer_1/share" in result.metrics


def test_of_many_heads_those_with_the_largest_shares_are_knocked_out(made):
    result = measured(made, **{"evaluation.heads.max_heads": 3})
    shares = np.array(result.details["shares"])
    tried = [name for name in result.details["gains"] if "head" in name]
    assert len(tried) == 3
    of_tried = [shares[int(name.split("-")[1]), int(name.split("-")[3])] for name in tried]
    assert sorted(of_tried) == sorted(shares.flatten())[-3:]
    assert "3 heads were knocked out one by one" in result.section
    without = measured(made, **{"evaluation.heads.max_heads": 0})
    assert "one by one" not in without.section


def test_finished_passes_are_kept_for_these_settings_only(made, monkeypatch):
    first = measured(made)
    passes = []
    monkeypatch.setattr(InfiniLlama, "hidden", lambda *_, **__: passes.append(1))
    assert measured(made) == first
    with pytest.raises(TypeError):
        measured(made, **{"packing.mode": "document", "packing.remainder": "pad"})


def test_layers_that_never_read_and_a_memory_that_hurts_are_named_with_a_remedy(made, tmp_path):
    root, dataset, _ = made
    model = make_run(tmp_path, settings(root))
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.gate.fill_(-12.0 if number else 2.0)
    save(model, tmp_path)
    result = measured((root, dataset, tmp_path))
    layers = len(result.details["gates"])
    silent = [each for each in result.advice if "never read" in each]
    named = ", ".join(map(str, range(1, layers - 1))) + f" and {layers - 1}" if layers > 2 else "1"
    assert silent[0].startswith(f"Layer{'s' if layers > 2 else ''} {named} of {layers}")
    assert min(result.details["shares"][0]) > 0.1
    assert len(result.summary) == 1


def save(model, run_dir):
    """Save the model as the newest checkpoint."""
    position = Position(41, 82, 0, 1, "k" * 64, None, {})
    snapshot = HostCopy(WORLD).take(model, torch.optim.AdamW(model.parameters()))
    save_checkpoint(run_dir, snapshot, position, keep=1)


def test_of_a_single_window_no_interval_is_claimed(made):
    result = measured(made, **{"evaluation.heads.max_windows": 1})
    assert result.intervals == {}
    assert len(result.details["gains"]["all"]) == 1
    json.dumps(result.model_dump(mode="json"), allow_nan=False)
    assert "uncertain" in result.summary[0]


def test_block_diffusion_is_measured_in_the_stream_that_predicts(made, tmp_path):
    root, dataset, _ = made
    blocks = {"training.objective": "block_diffusion", "model.bidirectional": True}
    blocks |= {"model.mask_token_id": 256, "model.vocab_size": 257}
    make_run(tmp_path, settings(root, **blocks))
    result = measured((root, dataset, tmp_path), **blocks)
    assert np.array(result.details["shares"]).min() > 0
    assert result.details["gains"]["all"][0] != 0


def test_what_has_no_memory_to_read_is_said_in_one_line(made, tmp_path):
    root, dataset, run_dir = made
    make_run(tmp_path, settings(root, **{"model.memory": "none"}))
    for where, overrides, expected in (
        (tmp_path, {"model.memory": "none"}, "The model has no memory"),
        (run_dir, {"packing.context_length": 8}, "The window has only one segment"),
        (run_dir, {"packing.context_length": 1 << 20}, "There are no windows to score."),
    ):
        result = measured((root, dataset, where), **overrides)
        assert result.section.startswith(expected)
        assert "\n" not in result.section
        assert result.metrics == {}
        assert result.pictures == result.advice == []
