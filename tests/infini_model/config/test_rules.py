"""What settings may be: a mistake is one line that names the key and, if it can, what was meant."""

import re
from typing import Any, get_args

import pytest

from infini_model.config import ModelConfig, load_config, validate
from infini_model.config.evaluation_tasks import EvaluationTaskName
from infini_model.config.explaining import all_keys
from infini_model.config.model import BESIDE_INITIAL_WEIGHTS
from infini_model.config.moved import MOVED, REMOVED, TASKS
from infini_model.config.names import NAMES
from infini_model.runtime.errors import ConfigError


def refusal_of(*overrides: str | dict[str, Any]) -> str:
    """The line with which settings are refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


# What is refused, and the beginning of the line that says so.
REFUSED = {
    "training": "override 'training' is not of the form section.key=value",
    "training.max_steps=[": "training.max_steps: '[' is not valid YAML",
    "training.max_steps=many": "training.max_steps: got 'many': input should be a valid",
    "training.max_steps=0": "training.max_steps: got 0: input should be greater than 0",
    "training.max_steps=null": "training: takes exactly one of max_steps and epochs",
    "training={epochs: 2, max_steps: 9}": "training: takes exactly one of max_steps and",
    "training.adam_beta1=1.0": "training.adam_beta1: got 1.0: input should be less than 1",
    "training.learning_rate=.nan": "training.learning_rate: got nan: input should be a",
    "training.lora={}": "training.lora: adapts model.initial_weights, which is not set",
    "training.lora.target_modules=[]": "training.lora.target_modules: got []: tuple should",
    "training.lora.target_modules=[wq]": "training.lora.target_modules.0: got 'wq': input should",
    "training.lora.modules_to_save=[x]": "training.lora.modules_to_save.0: got 'x': input should",
    "run.name=a/b": "run.name: got 'a/b': string should match pattern",
    "data.name=../elsewhere": "data.name: got '../elsewhere': string should match pattern",
    "data.cache_dir=s3://b/x": "data.cache_dir: got 's3://b/x': takes a local folder, not",
    "logging.tensorboard_dir=gs://b/x": "logging.tensorboard_dir: got 'gs://b/x': takes a",
    "data.device=gpu": "data.device: got 'gpu': takes auto, cpu, cuda, cuda:N, or mixed",
    "data={engine: ray, device: mixed}": "data: device mixed needs engine=local; Ray takes",
    "data.source.kind=zip": "data.source.kind: got 'zip': takes 'files', 'hub'",
    "data.source={kind: hub}": "data.source.repository: missing",
    "data.source.template=x": "data.source.template: got 'x': takes text with one {content}",
    "data.splits.train=2": "data.splits.train: got 2: input should be less than or equal to",
    "data.splits.train=0.5": "data.splits: train + validation + test must be 1, not 0.6",
    "data.splits={train: 0, validation: 0.5, test: 0.5}": "data.splits: train must be more than 0",
    "data.share=5/4": "data.share: got '5/4': takes I/N with 1 <= I <= N, such as 2/4",
    "data.ray_cpus=1.5": "data.ray_cpus: got 1.5: takes a fraction of 1 or a whole number",
    "data.ray_address=ray://head:1": "data.ray_address: got 'ray://head:1': takes auto or",
    "packing.context_length=100": "packing.context_length 100 is not a multiple of",
    "model.num_attention_heads=3": "model: hidden_size 128 is not a multiple of",
    "model.num_key_value_heads=3": "model: num_attention_heads 4 is not a multiple of",
    "model.head_dim=5": "model: head_dim must be even for the rotary embedding, not 5",
    "model.rope_scaling.factor=8": "model.rope_scaling.low_freq_factor: missing",
    "model.rope_scaling={rope_type: yarn}": "model.rope_scaling.rope_type: got 'yarn':",
    "model={vocab_size: 10, mask_token_id: 10}": "model: mask_token_id 10 is outside the",
    "model.bidirectional=true": "model.bidirectional: needs",
    "model.initial_weights=llama": "model.segment_length: missing; model.initial_weights",
    "model={initial_weights: '', segment_length: 64}": "model.initial_weights: got '': string",
    "model={initial_weights: llama, segment_length: 96}": "packing.context_length 512 is not a",
    "data.tokenizer.spec=model": "data.tokenizer.spec: model is the tokenizer of",
    "launch.gpus=first": "launch.gpus: got 'first': takes auto, all, cpu, or device numbers",
    "launch.node_rank=1": "launch: node_rank 1 must be below num_nodes 1",
    "launch.num_nodes=2": "launch: num_nodes over 1 needs rdzv_endpoint=host:port",
    "launch={num_nodes: 2, rdzv_endpoint: 'first:29500'}": "launch.num_nodes over 1 needs",
    "launch.nodes=2": "launch: nodes needs launcher=ray; elsewhere num_nodes is their number",
    "launch={launcher: ray, nodes: 4-2}": "launch.nodes: got '4-2': takes a number of nodes",
    "launch={launcher: ray, nodes: 0}": "launch.nodes: got 0: takes a number of nodes, or",
    "launch={launcher: ray, gpus: '0,1'}": "launch: gpus 0,1 needs launcher=local; Ray",
    "launch={launcher: ray, num_nodes: 2, rdzv_endpoint: 'first:29500'}": "launch: num_nodes needs",
    "evaluation.sample.top_k=-1": "evaluation.sample.top_k: got -1: input should be greater",
    "tracking={mlflow: false, registered_model: mine}": "tracking: registered_model needs mlflow",
}


@pytest.mark.parametrize("override", REFUSED)
def test_a_wrong_value_is_named_with_its_key(override: str) -> None:
    assert refusal_of(override).startswith(REFUSED[override])


@pytest.mark.parametrize(
    ("objective", "model", "message"),
    [
        ("masked_diffusion", {"memory": "linear"}, "model.memory: linear does not combine with"),
        ("masked_diffusion", {"segment_length": 64}, "model.segment_length: 64 is less than pack"),
        ("block_diffusion", {"memory": "none"}, "model.memory: none, but block_diffusion reads"),
    ],
)
def test_a_model_that_its_objective_cannot_train_is_refused(
    objective: str, model: dict[str, Any], message: str
) -> None:
    tree = {"training": {"objective": objective}, "model": model}
    assert refusal_of(tree).startswith(message)


def test_an_unknown_evaluation_task_is_told_all_there_are() -> None:
    message = refusal_of("evaluation.tasks=[sample, heat]")
    assert message.startswith("evaluation.tasks.1: got 'heat': ")
    assert all(f"'{name}'" in message for name in get_args(EvaluationTaskName))


def test_every_field_of_the_shape_is_refused_beside_initial_weights() -> None:
    weights = {"initial_weights": "team/llama@main", "segment_length": 64}
    shape = ModelConfig().model_dump() | {"head_dim": 32}
    for name in shape.keys() - BESIDE_INITIAL_WEIGHTS:
        message = f"model.{name}: comes from model.initial_weights; leave it out"
        assert refusal_of({"model": weights | {name: shape[name]}}) == message
    assert validate({"model": weights}).model.beside_initial_weights == {"segment_length": 64}


@pytest.mark.parametrize(
    ("override", "key", "meant"),
    [
        ("training.max_stepz=3", "training.max_stepz", "; did you mean training.max_steps?"),
        ("trainning.max_steps=3", "trainning", "; did you mean training?"),
        ("model.learning_rats=1", "model.learning_rats", "; did you mean training.learning_rate?"),
        ("training.context_length=64", None, "; it is packing.context_length"),
        (
            "batch_size=4",
            None,
            "; it is data.batch_size, training.batch_size or evaluation.batch_size",
        ),
        ("training.grad_accum_nums=8", None, "; it is training.gradient_accumulation_steps"),
        (
            "training.use_amp=false",
            None,
            "; use training.precision instead: fp32 for off, bf16 or fp16 for on",
        ),
        ("system={device_id: 3}", "system.device_id", "; it is launch.gpus"),
        ("data.source.limit=5", None, " for this kind of source"),
        ("training.zzzz=1", None, ""),
        ("zzzz={}", None, ""),
    ],
)
def test_an_unknown_key_is_told_what_was_probably_meant(
    override: str, key: str | None, meant: str
) -> None:
    named = key or override.partition("=")[0]
    assert refusal_of(override) == f"{named}: unknown key{meant}"


def test_what_an_error_points_to_exists_and_what_it_replaces_does_not() -> None:
    keys = set(all_keys())
    sections = {key.rpartition(".")[0] for key in keys}
    leaves = {key.rpartition(".")[2] for key in keys}
    assert set(MOVED.values()) <= keys
    assert set(TASKS.values()) <= set(get_args(EvaluationTaskName))
    assert not {*MOVED, *REMOVED} & keys
    assert not NAMES.keys() & (keys | leaves)
    for name, meant in NAMES.items():
        named = set(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", meant))
        assert named <= keys | sections, f"{name} points to {meant}"
