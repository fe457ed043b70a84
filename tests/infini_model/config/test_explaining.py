"""An error is one line that names the key and, for an unknown key, suggests another."""

import pytest

from infini_model.config import load_config
from infini_model.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("training.max_stepz=3", ["training.max_stepz", "unknown key"]),
        ("trainning.max_steps=3", ["trainning", "unknown key"]),
        ("training.max_steps=many", ["training.max_steps", "'many'", "integer"]),
        ("training.max_steps=0", ["training.max_steps", "0", "greater than 0"]),
        ("training.adam_beta1=1.0", ["training.adam_beta1", "less than 1"]),
        ("training.learning_rate=.nan", ["training.learning_rate", "finite"]),
        ("launch.gpus=first", ["launch.gpus", "'first'", "auto, all, cpu"]),
        ("data.device=gpu", ["data.device", "'gpu'", "cuda:N"]),
        (
            "data.cache_dir=s3://bucket/x",
            ["data.cache_dir", "takes a local folder, not an address"],
        ),
        ("logging.tensorboard_dir=gs://bucket/x", ["logging.tensorboard_dir", "a local folder"]),
        ("data.source.kind=zip", ["data.source.kind", "'zip'", "'files', 'hub'"]),
        ("data.source.pathz=[a]", ["data.source.pathz", "unknown key"]),
        ("data.source={kind: hub}", ["data.source.repository", "missing"]),
        ("data.splits.train=0.5", ["data.splits", "must be 1, not 0.6"]),
        ("data.name=../elsewhere", ["data.name"]),
        ("run.name=a/b", ["run.name"]),
        ("model.num_attention_heads=3", ["model", "hidden_size 128", "num_attention_heads 3"]),
        ("model.num_key_value_heads=3", ["model", "num_key_value_heads 3"]),
        ("model.head_dim=5", ["model", "head_dim must be even", "not 5"]),
        ("model.rope_scaling.factor=8", ["model.rope_scaling.low_freq_factor", "missing"]),
        ("model.rope_scaling={rope_type: yarn}", ["model.rope_scaling.rope_type", "'llama3'"]),
        (
            "training.lora.target_modules=[wq]",
            ["training.lora.target_modules.0", "'wq'", "'q_proj'"],
        ),
        ("training.lora.target_modules=[]", ["training.lora.target_modules", "at least 1"]),
        ("training.lora.modules_to_save=[x]", ["training.lora.modules_to_save.0", "embed_tokens"]),
        ("training.lora.lora_dropout=0.1", ["training.lora.lora_dropout", "training.weight_decay"]),
        ("training.lora={}", ["training.lora: adapts model.initial_weights, which is not set"]),
        ("packing.context_length=100", ["packing.context_length 100", "model.segment_length 128"]),
        ("launch.num_nodes=2", ["launch", "rdzv_endpoint"]),
        (
            "launch={num_nodes: 2, rdzv_endpoint: 'first:29500'}",
            ["launch.num_nodes over 1 needs run.name"],
        ),
        ("training", ["'training'", "section.key=value"]),
        ("training.max_steps=[", ["training.max_steps", "YAML"]),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_key(override: str, names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[override])
    message = str(caught.value)
    assert "\n" not in message
    for name in names:
        assert name in message


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("training.max_stepz=3", "did you mean training.max_steps?"),
        ("trainning.max_steps=3", "did you mean training?"),
        ("data.source.pathz=[a]", "did you mean data.source.paths?"),
        ("model.learning_rats=1", "did you mean training.learning_rate?"),
        ("training.context_length=64", "it is packing.context_length"),
        ("batch_size=4", "it is data.batch_size, training.batch_size or evaluation.batch_size"),
        ("training.grad_accum_nums=8", "it is training.gradient_accumulation_steps"),
        ("training.init_std=0.01", "it is model.initializer_range"),
        ("training.num_workers=8", "data.workers"),
        ("training.use_amp=false", "training.precision"),
        ("epochs=3", "it is training.epochs"),
        ("system.device=cuda", "launch.gpus"),
        ("system={device_id: 3}", "it is launch.gpus"),
        ("data.source.limit=5", "unknown key for this kind of source"),
    ],
)
def test_an_unknown_key_gets_a_suggestion(override: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[override])
    assert str(caught.value).endswith(meant) or meant in str(caught.value).partition("; ")[2]


def test_a_key_that_resembles_none_gets_no_suggestion() -> None:
    for override in ("training.zzzz=1", "zzzz={}", "system={}"):
        key = override.partition("=")[0]
        with pytest.raises(ConfigError, match=rf"^{key}: unknown key$"):
            load_config(overrides=[override])
