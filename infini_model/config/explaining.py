"""What settings are called and take: errors in one line, the names of others, the list of all."""

from __future__ import annotations

import copy
import difflib
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from infini_model.config.tree import DECIDE_WEIGHTS, Config

# What the user is to give for a key that a preset leaves open.
WHAT_TO_GIVE = {
    "model.initial_weights": "a pretrained Llama: model.initial_weights=FOLDER or "
    "meta-llama/Llama-3.2-1B"
}


def one_line(error: ValidationError) -> str:
    """The first error of a tree that `Config` rejected, as one line."""
    first = error.errors(include_url=False)[0]
    # A discriminated union adds its tag (`files`, `hub`) to the path; the user did not write it.
    key = ".".join(str(part) for part in first["loc"] if part not in ("files", "hub"))
    if first["type"] == "extra_forbidden":
        return _unknown(key, first["input"])
    if first["type"] == "missing":
        return f"{key}: missing"
    if first["type"] == "union_tag_invalid":
        return f"{key}.kind: got {first['ctx']['tag']!r}: takes {first['ctx']['expected_tags']}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and isinstance(first["input"], Mapping):
        return f"{key}: {message}" if key else message
    return f"{key}: got {first['input']!r}: {message[:1].lower()}{message[1:]}"


def left_open(key: str, tree: Mapping[str, Any]) -> str:
    """One line for a key that a tree leaves to the user: what needs it, and what to give."""
    run = tree.get("run")
    preset = run.get("preset") if isinstance(run, Mapping) else None
    needs = "give" if preset is None else f"the preset {preset} needs"
    return f"{key}: missing; {needs} {WHAT_TO_GIVE.get(key, f'a value: {key}=VALUE')}"


def meant_by(name: str, names: Iterable[str]) -> str | None:
    """Which of `names` somebody who typed `name` meant; None if that is a guess.

    That is one nearly of the same letters, or the only one that has all of its words.
    """
    known, words = list(names), set(name.split("_"))
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        return near[0]
    longer = [each for each in known if words <= set(each.split("_"))]
    return longer[0] if len(longer) == 1 else None


@functools.cache
def all_keys() -> tuple[str, ...]:
    """Full name of every setting, such as `training.max_steps`, in tree order."""
    return tuple(dict.fromkeys(_keys_below(Config, "")))


def _keys_below(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        below = list(_sections(field.annotation))
        for inner in below:
            yield from _keys_below(inner, f"{prefix}{name}.")
        if not below:
            yield f"{prefix}{name}"


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Sections that a field may hold: none for a plain value, two for a source."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)


def _unknown(key: str, value: Any) -> str:
    """Message for an unknown key, or for the first key in an unknown section."""
    if key in all_keys():
        return f"{key}: unknown key for this kind of source"
    section, _, name = key.rpartition(".")
    near = meant_by(name, _names_in(section))
    if isinstance(value, Mapping) and value and not near:
        inner = next(iter(value))
        return _unknown(f"{key}.{inner}", value[inner])
    if meant := NAMES.get(key, NAMES.get(name)):
        return f"{key}: unknown key; {f'it is {meant}' if meant in all_keys() else meant}"
    others = _keys_like(key)
    if namesakes := [known for known in others if known.rpartition(".")[2] == name]:
        return f"{key}: unknown key; it is {_either(namesakes)}"
    if near:
        return f"{key}: unknown key; did you mean {section and section + '.'}{near}?"
    leaves = {known.rpartition(".")[2]: known for known in reversed(others)}
    if near := meant_by(name, leaves):
        return f"{key}: unknown key; did you mean {leaves[near]}?"
    return f"{key}: unknown key"


def _keys_like(key: str) -> list[str]:
    """The keys below the section of a key and as deep elsewhere; all if there is no such section.

    Who knows the section of a setting does not mean one far below another.
    """
    section, depth = key.rpartition(".")[0], key.count(".")
    below = [known for known in all_keys() if known.startswith(f"{section}.")]
    return [
        known for known in all_keys() if not below or known in below or known.count(".") == depth
    ]


def _either(names: list[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def _names_in(section: str) -> list[str]:
    """Keys and subsections directly in a section; empty if the section does not exist."""
    prefix = f"{section}." if section else ""
    below = (key[len(prefix) :] for key in all_keys() if key.startswith(prefix))
    return list(dict.fromkeys(name.partition(".")[0] for name in below))


_COUNTED_IN_WINDOWS = "use evaluation.max_windows instead, which counts windows, not batches"
NAMES: dict[str, str] = {
    # tutorials
    "grad_accum_nums": "training.gradient_accumulation_steps",
    "init_std": "model.initializer_range",
    "use_amp": "use training.precision instead: fp32 for off, bf16 or fp16 for on",
    "fp16": "use training.precision=fp16 instead",
    "no_fp16": "use training.precision=fp32 instead",
    "num_workers": "training needs no loader workers; data.workers sets the tokenising threads",
    "chunk_size": "packing.context_length",
    "save_dir": "run.output_dir",
    "model_name": "the section model sets the shape, data.tokenizer.spec the tokenizer",
    "model_name_or_path": "model.initial_weights",
    "pretrained_model_name_or_path": "model.initial_weights",
    "system.device": "use launch.gpus instead: auto, all, cpu, or numbers such as 0,3",
    "system.device_id": "launch.gpus",
    "device_id": "launch.gpus",
    "gpu_id": "launch.gpus",
    # torchrun
    "nproc_per_node": "launch.processes",
    "nnodes": "launch.num_nodes",
    "master_addr": "use launch.rdzv_endpoint=host:port instead",
    "master_port": "use launch.rdzv_endpoint=host:port instead",
    # transformers
    "per_device_train_batch_size": "training.batch_size",
    "per_device_eval_batch_size": "evaluation.batch_size",
    "num_train_epochs": "training.epochs",
    "bf16": "use training.precision=bf16 instead",
    "lr": "training.learning_rate",
    "clip_grad": "training.max_grad_norm",
    "max_position_embeddings": "packing.context_length",
    "attn_implementation": "launch.attention_backend",
    "torch_dtype": "training.precision",
    "torch_compile": "launch.compile",
    "layers": "model.num_hidden_layers",
    "num_layers": "model.num_hidden_layers",
    "n_layers": "model.num_hidden_layers",
    "n_heads": "model.num_attention_heads",
    "max_eval_samples": "evaluation.max_windows",
    "eval_batches": _COUNTED_IN_WINDOWS,
    "max_batches": _COUNTED_IN_WINDOWS,
    # peft
    "lora_r": "training.lora.r",
    "lora_rank": "training.lora.r",
    "lora_dropout": "no layer draws random numbers; training.weight_decay regularises instead",
    # nanotron
    "micro_batch_size": "training.batch_size",
    "batch_accumulation_per_replica": "training.gradient_accumulation_steps",
    "sequence_length": "packing.context_length",
    "train_steps": "training.max_steps",
    "training.steps": "training.max_steps",
    "checkpoint_interval": "checkpoint.save_steps",
    "hf_dataset_or_datasets": "data.source.repository",
    "text_column_name": "data.source.column",
    "tokenizer_name_or_path": "data.tokenizer.spec",
}


def renamed(tree: dict[str, Any]) -> dict[str, Any]:
    """A file's tree, in which the names of the guides' own files stand for the keys here.

    `training.num_workers` has no key: finished shards need no loader workers.
    """
    tree = copy.deepcopy(tree)
    training, system = tree.get("training"), tree.get("system")
    if isinstance(training, dict):
        training.pop("num_workers", None)
        if "grad_accum_nums" in training:
            training["gradient_accumulation_steps"] = training.pop("grad_accum_nums")
    if isinstance(system, dict) and system.keys() <= {"device", "device_id"}:
        del tree["system"]
        device = str(system.get("device", "cuda"))
        gpus = str(system.get("device_id", "auto")) if device == "cuda" else device
        tree["launch"] = {"gpus": gpus} | dict(tree.get("launch") or {})
    return tree


HEADING = """# Settings

Every setting with the values it takes, its default and what it decides. Those with a star decide
the weights: a run cannot be resumed with another value. [Presets, files and
overrides](train.md#presets-files-and-overrides) says where they are set.
"""
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
TYPES = {"string": "text", "boolean": "true or false"}

Schema = dict[str, Any]


def reference(prefix: str = "") -> str:
    """The settings at and below `prefix`, all of them by default, with their sections.

    Raises `LookupError` if there are none.
    """
    schema = Config.model_json_schema()
    definitions: dict[str, Schema] = schema["$defs"]
    lines = [] if prefix else [HEADING]
    for name, section in schema["properties"].items():
        found: dict[str, Schema] = {}
        for key, leaf in _leaves(name, section, definitions):
            if f"{key}.".startswith(f"{prefix}." if prefix else ""):
                # The kinds of a source have keys in common.
                found.setdefault(key, leaf)
        listed = [_line(key, leaf, definitions) for key, leaf in found.items()]
        if listed:
            about = definitions[_names(section)[0]]["description"]
            lines += [f"## {name}\n", f"{about.splitlines()[0]}\n", *listed, ""]
    if not lines:
        raise LookupError(f"{prefix}: no such setting or section")
    return "\n".join(lines).rstrip()


def _names(schema: Schema) -> list[str]:
    """The definitions of the sections that a value may be."""
    options = [schema, *schema.get("anyOf", []), *schema.get("oneOf", [])]
    return [each["$ref"].rpartition("/")[2] for each in options if "$ref" in each]


def _leaves(
    key: str, schema: Schema, definitions: dict[str, Schema]
) -> Iterator[tuple[str, Schema]]:
    """The values below a key, and what may be null or a section."""
    sections = _names(schema)
    if not sections or {"type": "null"} in schema.get("anyOf", []):
        yield key, schema
    for section in sections:
        for name, inner in definitions[section]["properties"].items():
            yield from _leaves(f"{key}.{name}", inner, definitions)


def _line(key: str, schema: Schema, definitions: dict[str, Schema]) -> str:
    section, name = key.split(".")[:2]
    star = "\\*" if name in DECIDE_WEIGHTS.get(section, ()) else ""
    default = ""
    if "default" in schema:
        default = f", default `{json.dumps(schema['default'], ensure_ascii=False)}`"
    return f"- `{key}`{star} ({_type(schema, definitions)}{default}): {schema['description']}"


def _type(schema: Schema, definitions: dict[str, Schema]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(each, definitions) for each in schema["anyOf"])
    if "$ref" in schema:
        return "section"
    if "const" in schema:  # of one of several kinds
        return "text"
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    kind = schema["type"]
    if kind == "array":
        return f"list of {_type(schema['items'], definitions)}"
    if kind == "object":
        return f"mapping to {_type(schema['additionalProperties'], definitions)}"
    bounds = [f"{sign} {schema[name]:,}" for name, sign in BOUNDS.items() if name in schema]
    if schema.get("format") == "path":
        return "path"
    return " ".join([TYPES.get(kind, str(kind)), *bounds])
