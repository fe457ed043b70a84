"""One training, whatever happens to it: whole, resumed, or on two ranks.

Stopped and killed at any moment, on one rank and on two: `test_strikes.py`. On a GPU:
`test_training_on_a_gpu.py`.
"""

import functools
import json
import os
import shutil
from typing import Any, NamedTuple

import pytest
import torch
from curves import curve, repeatable, weights
from llamas import from_weights, recorded, write_llama
from trainings import cut_off, on_ranks, on_two_ranks, train_traced

from infini_model.config import merge
from infini_model.runtime.runs import newest_checkpoint
from infini_model.training import parallel
from infini_model.training.checkpoint import read_state
from infini_model.training.train import train

SHORT = {
    "training": {"max_steps": 6},
    "logging": {"logging_steps": 1, "eval_steps": 3},
    # An odd number, so that one of two ranks has more to validate and to probe.
    "evaluation": {"max_windows": 9},
    "checkpoint": {"save_steps": 2, "save_total_limit": 3},
}
RECOMPUTED = {"launch": {"gradient_checkpointing": True}}
ONE_SEGMENT = {"packing": {"context_length": 16}}
PAIRS = {"packing": {"mode": "document", "remainder": "pad"}}
LORA = {
    "r": 4,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "modules_to_save": ["embed_tokens", "norm"],
}
ADAPTERS = {"adapters": LORA, "dropout": LORA | {"use_dora": True, "lora_dropout": 0.3}}


class Kind(NamedTuple):
    """What is trained, on which data, from which weights, and how two ranks divide it.

    Their losses and gradients differ from those of one process by no more than `rounding`.
    """

    strategy: str | None
    sections: dict[str, Any]
    data: str = "dataset"
    weights: str | None = None
    rounding: float = 5e-5


# Parts of bases other than Llama.
HEADS = {"qkv_bias": True, "qk_norm": "head", "no_rope_layer_interval": 2}
OLMO2 = {"qk_norm": "projection", "post_norm": True}
KINDS = {
    # The memory's parameters get no gradient.
    "one segment": Kind("ddp", ONE_SEGMENT | RECOMPUTED),
    "one segment, tied": Kind("fsdp", ONE_SEGMENT | {"model": {"tie_word_embeddings": True}}),
    "documents, as Qwen and SmolLM3": Kind(
        "ddp", {"packing": {"mode": "document"}, "model": HEADS}
    ),
    # Its products in bfloat16 round a difference up.
    "Muon": Kind("ddp", {"training": {"optimizer": "muon"}}, rounding=1e-3),
    # With rows that two ranks cannot divide evenly.
    "Muon of shards": Kind(
        "fsdp",
        {
            "training": {"optimizer": "muon"},
            "model": {"intermediate_size": 33, "attention_bias": True, **OLMO2},
        },
        rounding=1e-3,
    ),
    "fp16, as OLMo 2": Kind(
        "fsdp",
        {"training": {"precision": "fp16"}, "model": OLMO2} | RECOMPUTED,
        rounding=2e-3,
    ),
    "masked diffusion of answers": Kind(
        "fsdp",
        PAIRS | {"training": {"objective": "masked_diffusion"}, "model": {"segment_length": 64}},
        data="pairs",
    ),
    "block diffusion": Kind(
        "ddp",
        {
            "training": {"objective": "block_diffusion"},
            "packing": {"mode": "aligned"},
            "model": {"memory": "delta"},
        },
    ),
    "a residual memory, growing windows of two sources and batches": Kind(
        "fsdp",
        {
            "training": {"batch_schedule": {0: 1, 0.6: 2}},
            "model": {"memory": "residual"},
            # It resumes within the second phase.
            "packing": {
                "context_schedule": {0: 1, 0.5: 2, 0.75: 4},
                "weights": {"chats": [1, 2, 5], "texts": [3, 2, 1]},
            },
        },
        data="mixture",
    ),
    "a Llama": Kind(None, {}, weights="llama"),
    "LoRA": Kind("fsdp", RECOMPUTED, weights="adapters"),
}


@pytest.fixture
def begin(make_config, tmp_path):
    """A run folder that holds what the run needs to begin, and its settings."""

    def make(kind, batch_size, name="run"):
        strategy = {"launch": {"strategy": kind.strategy or "ddp"}}
        changes = strategy | {"training": {"batch_size": batch_size}}
        config = make_config(**merge(merge(SHORT, kind.sections), changes))
        run_dir = tmp_path / name
        if kind.weights is None:
            return config, run_dir
        llama = tmp_path / "llama"
        if not llama.exists():
            write_llama(llama)
        config = from_weights(config, llama, ADAPTERS.get(kind.weights))
        return config, recorded(config, run_dir)

    return make


def expect_same_curves(run_dir, whole, rounding):
    ours, theirs = repeatable(run_dir), repeatable(whole)
    assert [line.keys() for line in ours] == [line.keys() for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for name, value in other.items():
            # AdamW hardly minds a gradient of another length.
            relative = 0.0 if name.endswith("loss") else 100 * rounding
            assert mine[name] == pytest.approx(value, rel=relative, abs=rounding), name


def expect_same_bits(run_dir, whole):
    assert repeatable(run_dir) == repeatable(whole)
    assert weights(run_dir) == weights(whole)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_training_is_the_same_whole_resumed_or_on_two_ranks(
    kind, begin, dataset, tmp_path, request
):
    data = request.getfixturevalue(kind.data)
    config, whole = begin(kind, 4, "whole")
    train(config, data, whole)
    losses = curve(whole, "validation/loss")
    assert losses[6] < losses[0]

    if kind.weights == "llama":
        shutil.rmtree(tmp_path / "llama")
    parts = cut_off(whole, 4, tmp_path / "parts")
    train(config, data, parts)
    expect_same_bits(parts, whole)

    if kind.strategy is not None:
        divided, pair = begin(kind, 2, "pair")
        on_two_ranks(train, divided, data, pair)
        expect_same_curves(pair, whole, kind.rounding)
        assert read_state(newest_checkpoint(pair)).world_size == 2
    if kind.weights == "adapters":
        again = cut_off(pair, 4, tmp_path / "again")
        on_two_ranks(train, divided, data, again)
        expect_same_bits(again, pair)


def test_dropout_draws_the_same_numbers_in_a_run_that_is_resumed(begin, dataset, tmp_path):
    def trained(name, batch_size, *, recomputed=True, weights="dropout"):
        kind = Kind("ddp", {"launch": {"gradient_checkpointing": recomputed}}, weights=weights)
        config, run_dir = begin(kind, batch_size, name)
        (train if batch_size == 4 else functools.partial(on_two_ranks, train))(
            config, dataset, run_dir
        )
        return config, run_dir

    config, whole = trained("whole", 4)
    expect_same_bits(trained("stored", 4, recomputed=False)[1], whole)
    parts = cut_off(whole, 4, tmp_path / "parts")
    train(config, dataset, parts)
    expect_same_bits(parts, whole)
    config, pair = trained("pair", 2)
    again = cut_off(pair, 4, tmp_path / "again")
    on_two_ranks(train, config, dataset, again)
    expect_same_bits(again, pair)
    without = trained("without", 4, weights="adapters")[1]
    assert curve(without, "train/loss") != curve(whole, "train/loss")


@pytest.mark.story
def test_a_run_goes_on_with_another_strategy_or_number_of_ranks(begin, dataset, tmp_path):
    def config(strategy, batch_size):
        accumulated = {"training": {"gradient_accumulation_steps": 2}}
        return begin(Kind(strategy, accumulated), batch_size)[0]

    whole = tmp_path / "whole"
    train(config("ddp", 4), dataset, whole)
    sharded = cut_off(whole, 2, tmp_path / "sharded")
    on_two_ranks(train, config("fsdp", 2), dataset, sharded)
    copied = cut_off(sharded, 4, tmp_path / "copied")
    # As Ray resumes with a gang of another size: the settings stay, the batches are divided anew.
    on_two_ranks(train, config("ddp", 4), dataset, copied)
    alone = cut_off(sharded, 4, tmp_path / "alone")
    train(config("fsdp", 4), dataset, alone)
    for run_dir in (sharded, copied, alone):
        position = read_state(newest_checkpoint(run_dir))
        assert (position.step, position.windows_read, position.global_batch) == (6, 48, 8)
        expect_same_curves(run_dir, whole, 5e-5)


@pytest.mark.story
def test_compiled_layers_train_as_plain_ones_and_resume_to_the_same_bits(begin, dataset, tmp_path):
    """With generated code: `test_training_on_a_gpu.py`."""

    def config(strategy, *, batch_size=4, compiled=True, recomputed=False):
        launch = {"compile": compiled, "gradient_checkpointing": recomputed}
        packing = {"mode": "aligned"}
        kind = Kind(strategy, {"packing": packing, "launch": launch, "model": HEADS})
        return begin(kind, batch_size)[0]

    plain, whole = tmp_path / "plain", tmp_path / "whole"
    train(config("ddp", compiled=False), dataset, plain)
    train_traced(config("ddp"), dataset, whole)
    expect_same_curves(whole, plain, 5e-5)
    parts = cut_off(whole, 4, tmp_path / "parts")
    train_traced(config("ddp"), dataset, parts)
    expect_same_bits(parts, whole)
    for strategy, recomputed in (("ddp", False), ("fsdp", True)):
        pair = tmp_path / strategy
        divided = config(strategy, batch_size=2, recomputed=recomputed)
        on_two_ranks(train_traced, divided, dataset, pair)
        expect_same_curves(pair, plain, 5e-5)


def train_counting(gather_whole, config, dataset, run_dir):
    """Train, perhaps with matrices gathered in float32; note the bytes that are gathered."""
    gathered, gather = [], torch.distributed.all_gather_single

    def counted(output, *args, **named):
        gathered.append(output.nbytes)
        return gather(output, *args, **named)

    torch.distributed.all_gather_single = counted
    if gather_whole:
        shard = parallel.shard_model
        parallel.shard_model = lambda *args: shard(*args[:-1], None)
    train(config, dataset, run_dir)
    if os.environ["RANK"] == "0":
        (run_dir / "gathered").write_text(json.dumps(gathered))


@pytest.mark.parametrize(("precision", "model"), [("bf16", HEADS), ("fp16", OLMO2)])
def test_matrices_gathered_in_16_bits_give_the_same_bits(
    precision, model, begin, dataset, tmp_path
):
    training = {"precision": precision, "max_steps": 2}
    kind = Kind("fsdp", {"training": training, "model": model, "evaluation": {"max_windows": 2}})
    half, whole = tmp_path / "half", tmp_path / "whole"
    config, _ = begin(kind, 2)
    on_two_ranks(train_counting, False, config, dataset, half)
    on_two_ranks(train_counting, True, config, dataset, whole)
    expect_same_bits(half, whole)
    pairs = zip(
        *(json.loads((each / "gathered").read_text()) for each in (half, whole)), strict=True
    )
    # The layers' matrices, and everything else.
    assert {large / small for small, large in pairs} == {2.0, 1.0}


@pytest.mark.story
def test_shards_of_each_machine_train_as_shards_of_all_and_resume_to_the_same_bits(
    begin, dataset, tmp_path
):
    kind = KINDS["Muon of shards"]._replace(strategy="hsdp")
    config, whole = begin(kind, 8, "whole")
    train(config, dataset, whole)
    config, four = begin(kind, 2, "four")
    on_ranks(4, train, config, dataset, four, machines=2)
    expect_same_curves(four, whole, kind.rounding)
    parts = cut_off(four, 4, tmp_path / "parts")
    on_ranks(4, train, config, dataset, parts, machines=2)
    expect_same_bits(parts, four)
    alone = cut_off(four, 2, tmp_path / "alone")
    train(begin(kind, 8)[0], dataset, alone)
    expect_same_curves(alone, whole, kind.rounding)
