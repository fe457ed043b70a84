"""What settings are called and take: errors in one line, the names of others, the list of all."""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from infini_model.config.tree import DECIDE_WEIGHTS, Config

SOURCE = "data.source."


def one_line(error: ValidationError) -> str:
    """The first error of a tree that `Config` rejected, as one line."""
    first = error.errors(include_url=False)[0]
    key = key_of(first["loc"])
    if first["type"] == "extra_forbidden":
        described = described_by(key)
        own = key.removesuffix(described.removeprefix(SOURCE))
        message = _unknown(described, first["input"])
        return message if described == key else message.replace(SOURCE, own)
    if first["type"] == "missing":
        return f"{key}: missing"
    if first["type"] == "union_tag_invalid":
        return f"{key}.kind: got {first['ctx']['tag']!r}: takes {first['ctx']['expected_tags']}"
    if first["type"] == "union_tag_not_found":
        return f"{key}: got {first['input']!r}: takes a section with paths or repository"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and isinstance(first["input"], Mapping):
        return f"{key}: {message}" if key else message
    return f"{key}: got {first['input']!r}: {message[:1].lower()}{message[1:]}"


def key_of(place: Iterable[int | str]) -> str:
    """The key of a place that Pydantic names, which may hold the kind of a source."""
    return ".".join(str(part) for part in place if part not in ("files", "hub", "[key]"))


def described_by(key: str) -> str:
    """The key that describes this one: a key of a named source is one of `data.source`."""
    return re.sub(r"^data\.sources\.[^.]+\.", SOURCE, key)


def left_open(key: str, tree: Mapping[str, Any]) -> str:
    """One line for a key that a tree leaves to the user: what needs it, and what to give."""
    run = tree.get("run")
    preset = run.get("preset") if isinstance(run, Mapping) else None
    needs = "give" if preset is None else f"the preset {preset} needs"
    value = f"a value: {key}=VALUE"
    if key == "model.initial_weights":
        value = f"a pretrained Llama: {key}=FOLDER or meta-llama/Llama-3.2-1B"
    return f"{key}: missing; {needs} {value}"


def meant_by(name: str, names: Iterable[str]) -> str | None:
    """Which of `names` somebody who typed `name` meant; None if that is a guess.

    That is one nearly of the same letters, or the only one that has all of its words.
    """
    known, words = list(names), set(name.split("_"))
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        return near[0]
    longer = [each for each in known if words <= set(each.split("_"))]
    return longer[0] if len(longer) == 1 else None


def _unknown(key: str, value: Any) -> str:
    """Message for an unknown key, or for the first key in an unknown section."""
    keys = all_keys()
    if key in keys:
        return f"{key}: unknown key for this kind of source"
    section, _, name = key.rpartition(".")
    inside = f"{section}." if section else ""
    below = [known for known in keys if known.startswith(inside)]
    near = meant_by(name, dict.fromkeys(known[len(inside) :].split(".")[0] for known in below))
    if isinstance(value, Mapping) and value and not near:
        inner = next(iter(value))
        return _unknown(f"{key}.{inner}", value[inner])
    if meant := NAMES.get(key, NAMES.get(name)):
        return f"{key}: unknown key; {f'it is {meant}' if meant in keys else meant}"
    # Who knows the section of a setting does not mean one far below another.
    depth = key.count(".")
    others = [known for known in keys if not below or known in below or known.count(".") == depth]
    if namesakes := [known for known in others if known.rpartition(".")[2] == name]:
        return f"{key}: unknown key; it is {' or '.join(namesakes)}"
    if near:
        return f"{key}: unknown key; did you mean {inside}{near}?"
    leaves = {known.rpartition(".")[2]: known for known in reversed(others)}
    if near := meant_by(name, leaves):
        return f"{key}: unknown key; did you mean {leaves[near]}?"
    return f"{key}: unknown key"


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
    "lr_scheduler_type": "training.schedule",
    "clip_grad": "training.max_grad_norm",
    "max_position_embeddings": "packing.context_length",
    "attn_implementation": "launch.attention_backend",
    "torch_dtype": "training.precision",
    "torch_compile": "launch.compile",
    "n_layers": "model.num_hidden_layers",
    "n_heads": "model.num_attention_heads",
    "max_eval_samples": "evaluation.max_windows",
    "eval_batches": _COUNTED_IN_WINDOWS,
    "max_batches": _COUNTED_IN_WINDOWS,
    # peft
    "lora_r": "training.lora.r",
    "lora_rank": "training.lora.r",
    # nanotron
    "micro_batch_size": "training.batch_size",
    "sequence_length": "packing.context_length",
    "train_steps": "training.max_steps",
    "training.steps": "training.max_steps",
}

HEADING = """# Settings

Every setting with the values it takes, its default and what it decides. Those with a star decide
the weights: a run cannot be resumed with another value. [Presets, files and
overrides](train.md#presets-files-and-overrides) says where they are set.
"""
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
TYPES = {"string": "text", "boolean": "true or false"}

Schema = dict[str, Any]


@functools.cache
def schemas() -> dict[str, Schema]:
    """JSON schema of every setting by its key, in tree order, and of sections that may be null.

    The kinds of a source have keys in common: the first kind counts.
    """
    whole = Config.model_json_schema()
    found: dict[str, Schema] = {}

    def gather(prefix: str, section: Schema) -> None:
        for name, schema in section["properties"].items():
            below = _sections(schema)
            if not below or {"type": "null"} in schema.get("anyOf", []):
                found.setdefault(f"{prefix}{name}", schema)
            for inner in below:
                gather(f"{prefix}{name}.", whole["$defs"][inner])

    gather("", whole)
    return found


def _sections(schema: Schema) -> list[str]:
    """The definitions of the sections that a value may be."""
    own = [schema["$ref"].rpartition("/")[2]] if "$ref" in schema else []
    choices = [*schema.get("anyOf", []), *schema.get("oneOf", [])]
    return own + [name for choice in choices for name in _sections(choice)]


@functools.cache
def all_keys() -> tuple[str, ...]:
    """Full name of every setting, such as `training.max_steps`, in tree order."""
    return tuple(key for key, schema in schemas().items() if not _sections(schema))


def types_of(key: str) -> set[str]:
    """The types in JSON schema that a setting may have, such as `list of string`.

    Empty for a section that is never null, and for an unknown key.
    """
    schema = schemas().get(described_by(key), {})
    return {
        f"list of {each['items'].get('type')}" if "items" in each else each["type"]
        for each in (schema, *schema.get("anyOf", []))
        if "type" in each
    }


def reference(prefix: str = "") -> str:
    """The settings at and below `prefix`, all of them by default, with their sections.

    Raises `LookupError` if there are none.
    """
    found = {
        key: schema
        for key, schema in schemas().items()
        if f"{key}.".startswith(prefix and f"{prefix}.")
    }
    if not found:
        raise LookupError(f"{prefix}: no such setting or section")
    lines = [] if prefix else [HEADING]
    for name, keys in itertools.groupby(found, lambda key: key.partition(".")[0]):
        about = str(Config.model_fields[name].annotation.__doc__).splitlines()[0]
        lines += [f"## {name}\n", f"{about}\n", *(_line(key, found[key]) for key in keys), ""]
    return "\n".join(lines).rstrip()


def _line(key: str, schema: Schema) -> str:
    section, name = key.split(".")[:2]
    star = "\\*" if name in DECIDE_WEIGHTS.get(section, ()) else ""
    default = ""
    if "default" in schema:
        default = f", default `{json.dumps(schema['default'], ensure_ascii=False)}`"
    description = " ".join(schema["description"].split())
    return f"- `{key}`{star} ({_type(schema)}{default}): {description}"


def _type(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(each.get("const") or _type(each) for each in schema["anyOf"])
    if "$ref" in schema or "oneOf" in schema:
        return "section"
    if "const" in schema:  # of one of several kinds
        return "text"
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if schema.get("format") == "path":
        return "path"
    kind = schema["type"]
    if kind == "array":
        return f"list of {_type(schema['items'])}"
    if kind == "object":
        return f"mapping to {_type(schema['additionalProperties'])}"
    bounds = [f"{sign} {schema[name]:,}" for name, sign in BOUNDS.items() if name in schema]
    return " ".join([TYPES.get(kind, str(kind)), *bounds])
