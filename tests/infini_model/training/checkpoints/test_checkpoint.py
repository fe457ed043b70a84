import json
import logging
from pathlib import Path

import pytest
import torch

from infini_model.config import ModelConfig, TrainingConfig
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import CheckpointError
from infini_model.runtime.metrics_file import MetricsFile
from infini_model.training.checkpoints.background import HostCopy
from infini_model.training.checkpoints.checkpoint import (
    Position,
    clear_for_resume,
    load_generators,
    load_optimizer,
    newest_checkpoint,
    prune_checkpoints,
    read_position,
    save_checkpoint,
)
from infini_model.training.checkpoints.export import opens_in_transformers
from infini_model.training.checkpoints.folders import verify_checkpoint
from infini_model.training.optimizer import make_optimizer
from infini_model.training.parallel.distributed import World

WORLD = World(0, 1, torch.device("cpu"))
MODEL = ModelConfig(vocab_size=11, hidden_size=16, num_attention_heads=2, segment_length=4)


def position(step):
    return Position(step, step * 8, 3, 1, "key", None, {"model": MODEL.model_dump()})


@pytest.fixture(params=[{}, {"bidirectional": True, "memory": "none"}], ids=["infini", "llada"])
def trained(request):
    torch.manual_seed(0)
    model = InfiniLlama(MODEL.model_copy(update=request.param))
    optimizer = make_optimizer(model, TrainingConfig())
    for _ in range(2):
        ids = torch.randint(0, 11, (2, 8))
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return model, optimizer


def save(run_dir, trained, *steps, keep=9):
    snapshot = HostCopy(WORLD).take(*trained)
    return [save_checkpoint(run_dir, snapshot, position(step), keep) for step in steps]


def test_weights_moments_and_position_are_restored_bit_for_bit(tmp_path, trained):
    model, optimizer = trained
    (path,) = save(tmp_path, trained, 7)
    assert newest_checkpoint(tmp_path) == path
    assert read_position(path) == position(7)
    again = InfiniLlama.from_pretrained(path / "model")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
    fresh = make_optimizer(again, TrainingConfig())
    load_optimizer(path, again, fresh, WORLD)
    before, after = optimizer.state_dict()["state"], fresh.state_dict()["state"]
    assert before.keys() == after.keys()
    for index, state in before.items():
        for key, value in state.items():
            assert torch.equal(value, after[index][key])
    json.loads((path / "state.json").read_text())["versions"]["torch"]
    assert torch.equal(load_generators(path, WORLD)["cpu"][0], torch.get_rng_state())


@pytest.mark.parametrize(
    ("changes", "opens"),
    [({}, False), ({"memory": "none"}, True), ({"memory": "none", "bidirectional": True}, False)],
)
def test_only_a_plain_llama_opens_in_transformers(tmp_path, changes, opens):
    InfiniLlama(MODEL.model_copy(update=changes)).save_pretrained(tmp_path / "m")
    assert opens_in_transformers(tmp_path / "m") is opens


def test_a_checkpoint_contains_no_pickle(tmp_path, trained):
    (path,) = save(tmp_path, trained, 1)
    suffixes = {file.suffix for file in path.rglob("*") if file.is_file()}
    assert suffixes == {".json", ".safetensors"}


def test_only_the_newest_checkpoints_are_kept(tmp_path, trained):
    save(tmp_path, trained, 2, 10, 9, keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-10", "step-9"]


def test_the_best_checkpoint_is_kept_besides_the_newest(tmp_path, trained):
    metrics = MetricsFile(tmp_path, None)
    losses = {1: 4.0, 2: 2.0, 3: 3.0, 4: 2.5, 5: 1.0}
    kept = {1: [1], 2: [1, 2], 3: [2, 3], 4: [2, 4], 5: [2, 5]}
    for step, loss in losses.items():
        save(tmp_path, trained, step, keep=1)
        names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
        assert names == [f"step-{number}" for number in kept[step]]
        # The validation loss of this step is recorded only later.
        metrics.append(step, {"train/loss": loss, "validation/loss": loss})
    prune_checkpoints(tmp_path, 1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-5"]


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        flip_a_bit,
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        lambda path: path.write_bytes(b""),
    ],
    ids=["removed", "one bit", "truncated", "empty"],
)
@pytest.mark.parametrize(
    "name", ["manifest.json", "state.json", "optimizer.safetensors", "model/model.safetensors"]
)
def test_a_damaged_file_is_named_and_the_previous_checkpoint_is_used(
    tmp_path, trained, name, damage, caplog
):
    older, newer = save(tmp_path, trained, 4, 8)
    damage(newer / name)
    # A bit of the manifest may be one of another file's checksum.
    named = newer / ("" if name == "manifest.json" else name)
    with pytest.raises(CheckpointError, match=f"{named}.*: is "):
        verify_checkpoint(newer)
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) == older
    assert str(named) in caplog.text
    clear_for_resume(tmp_path, older)
    assert sorted(p.name for p in older.parent.iterdir()) == ["damaged-step-8", "step-4"]


@pytest.mark.parametrize(
    "half", ["checkpoints/.tmp-step-8-abc", ".tmp-model-abc", "debug/step-4/.tmp-rank-0-abc"]
)
def test_leftovers_of_a_killed_writer_are_removed_and_never_read(tmp_path, trained, half):
    (path,) = save(tmp_path, trained, 4)
    (tmp_path / half).mkdir(parents=True)
    (tmp_path / half / "state.json").write_text("{")
    assert newest_checkpoint(tmp_path) == path
    clear_for_resume(tmp_path, path)
    assert not (tmp_path / half).exists()
    assert [p.name for p in path.parent.iterdir()] == ["step-4"]


def test_partially_written_files_are_removed(tmp_path, trained):
    (path,) = save(tmp_path, trained, 4)
    halves = [tmp_path / ".tmp-metrics.jsonl-abc", tmp_path / "logs" / ".tmp-mlflow.json-abc"]
    for half in halves:
        half.parent.mkdir(exist_ok=True)
        half.write_text("{")
    clear_for_resume(tmp_path, path)
    assert not any(half.exists() for half in halves)


def test_an_optimizer_of_another_model_is_refused(tmp_path, trained):
    (path,) = save(tmp_path, trained, 4)
    smaller = InfiniLlama(MODEL.model_copy(update={"num_hidden_layers": 1}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\."):
        load_optimizer(path, smaller, make_optimizer(smaller, TrainingConfig()), WORLD)
