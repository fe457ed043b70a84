"""Settings: how files and overrides are read, and what is refused.

A mistake is one line that names the key and, if it can, what was meant.
"""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from infini_model.config import (
    Config,
    ModelConfig,
    dump_config,
    load_config,
    merge_typed,
    nested,
    parse_override,
    validate,
)
from infini_model.config.data import FilesSource, HubSource
from infini_model.config.explaining import NAMES, all_keys
from infini_model.config.locations import shareable_location
from infini_model.config.model import BESIDE_INITIAL_WEIGHTS
from infini_model.runtime.errors import ConfigError

TWO_SOURCES = "data.sources={web: {paths: [a]}, code: {repository: b}}"
WEIGHTS = {"initial_weights": "team/llama@main", "segment_length": 64}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.yaml", None, "cannot be read: No such file"),
        ("binary.yaml", b"\xff\xfe\x00", "is not UTF-8"),
        ("list.json", b"[1, 2]", "holds list, needs a mapping"),
        ("torn.json", b'{\n  /* two\n  lines */ "training": {"max_steps": }\n}', ".*line 3"),
        ("open.json", b"{\n\n  /* never closed\n}", ".*line 3"),
        ("twice.yaml", b"data: {name: a}\ntraining: {}\ndata: {}\n", "data stands twice"),
        ("twice.json", b'{"data": {"name": "a", "name": "b"}}', "name stands twice"),
        ("torn.yaml", b"# one\ntraining:\n  max_steps: [\n", ".*line 4"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_a_file_that_cannot_be_read_is_named_with_the_line(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name}: {message}\b") as caught:
        load_config(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_key_that_a_file_leaves_open_has_to_be_given(tmp_path: Path) -> None:
    file = tmp_path / "shared.yaml"
    file.write_text('training: {max_steps: "???"}\ndata: {source: {paths: ["???"]}}')
    message = r"^training\.max_steps: missing; give a value: training\.max_steps=VALUE$"
    with pytest.raises(ConfigError, match=message):
        load_config(file)
    config = load_config(file, ["training.max_steps=3"])
    assert config.training.max_steps == 3
    assert config.data.source.paths == ["???"]  # a glob


def test_json_may_have_comments(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(
        """{
    // one line
    "training": {"max_steps": /* inside */ 7},  // beside a value
    /* several
       lines, "quoted" */
    "tracking": {"tracking_uri": "http://host:5000/*/", "experiment_name": "a \\"//\\" b"}
}"""
    )
    config = load_config(file)
    assert config.training.max_steps == 7
    assert config.tracking.tracking_uri == "http://host:5000/*/"
    assert config.tracking.experiment_name == 'a "//" b'


def test_overrides_beat_the_file_and_the_later_one_wins(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("training: {max_steps: 2, batch_size: 4}")
    config = load_config(file, ["training.max_steps=3", "training.max_steps=4"])
    assert (config.training.max_steps, config.training.batch_size) == (4, 4)
    # A schedule is one value, of which nothing stays.
    schedules = [{"packing": {"context_schedule": {0: 1, at: 4}}} for at in (0.5, 0.75)]
    assert load_config(file, schedules).packing.context_schedule == {0.0: 1, 0.75: 4}
    # To YAML 1.1 a number without a point is text.
    assert load_config(overrides=["training.learning_rate=1e-5"]).training.learning_rate == 1e-5


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("paths=*.txt", ["*.txt"]),
        ("paths=x #1.txt", ["x #1.txt"]),
        ("paths=[2024]/a: b.txt", ["[2024]/a: b.txt"]),
        ("paths=[a, 012, no, 'b, c']", ["a", "012", "no", "b, c"]),
        ("paths='a, b'", ["a, b"]),
        ("separator=---", "---"),
        ("separator=\n\n", "\n\n"),
        (r"separator=\n\n", "\n\n"),
        (r"separator='\n'", r"\n"),
        (r'separator="\t\n"', "\t\n"),
        ("separator=null", None),
        (r"template={{messages}}\n", "{{messages}}\n"),
        (r"column=a\nb", r"a\nb"),
        ("configuration=no", "no"),
        ("revision=0123456", "0123456"),
        ('repository="a" b', '"a" b'),
        ("limit=0x10", 16),
    ],
)
def test_text_that_is_typed_for_a_text_setting_stays_text(typed: str, value: Any) -> None:
    assert parse_override(f"data.source.{typed}") == nested(
        f"data.source.{typed.partition('=')[0]}", value
    )


def test_what_is_no_list_and_no_number_is_refused_and_an_unknown_key_told_first() -> None:
    assert refusal_of("data.source.paths=[*.txt]").endswith("'[*.txt]' is not valid YAML")
    assert refusal_of("data.source.path=*.txt").endswith("did you mean data.source.paths?")


def test_the_keys_of_a_source_say_its_kind_and_another_kind_replaces_the_previous_one() -> None:
    def source(*overrides: str) -> object:
        return load_config(overrides=overrides).data.source

    hub, typed = HubSource(repository="ag_news"), "data.source.repository=ag_news"
    assert source(typed) == source("data.source.kind=hub", typed) == hub
    assert source("data.source={kind: hub, repository: ag_news}") == hub
    limited = (typed, "data.source.limit=5")
    assert source(*limited) == HubSource(repository="ag_news", limit=5)
    paths = "data.source.paths=texts/*.txt"
    assert source(*limited, paths) == FilesSource(paths=["texts/*.txt"])
    assert source(typed, "data.source={kind: files, column: body}") == FilesSource(column="body")


def test_named_sources_and_the_one_source_replace_each_other(tmp_path: Path) -> None:
    separated = r"data.sources.web.separator=\n\n"
    config = load_config(overrides=["data.source.column=body", TWO_SOURCES, separated])
    assert config.data.source is None
    assert config.data.named_sources == {
        "code": HubSource(repository="b"),
        "web": FilesSource(paths=["a"], separator="\n\n"),
    }
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config
    assert load_config(tmp_path / "config.yaml", ["data.source.paths=c"]).data.named_sources == {
        "": FilesSource(paths=["c"])
    }
    with pytest.raises(ConfigError, match=r"^data\.source: cannot be combined with data\.sources$"):
        merge_typed(map(parse_override, (TWO_SOURCES, "data.source.paths=c")))


def test_weights_decide_a_run_and_a_limit_of_epochs_does_not() -> None:
    def identity(*overrides: str) -> object:
        return load_config(overrides=[TWO_SOURCES, *overrides]).identity

    weighed = "packing.weights={web: 7, code: 3}"
    assert identity() != identity(weighed) != identity("packing.weights={web: 3, code: 7}")
    assert identity(weighed) == identity(weighed, "packing.max_epochs.code=4")
    assert identity(weighed) == identity("packing.weights={code: [3], web: [7.0]}")


def test_a_file_of_the_guides_loads_with_its_names(tmp_path: Path) -> None:
    file = tmp_path / "single_gpu.json"
    training = '"training": {"batch_size": 8, "grad_accum_nums": 4, "num_workers": 8}'
    file.write_text(f'{{"system": {{"device": "cuda", "device_id": 3}}, {training}}}')
    config = load_config(file)
    assert config.launch.gpus == "3"
    assert (config.training.batch_size, config.training.gradient_accumulation_steps) == (8, 4)
    file.write_text('{"system": {"device": "cpu"}}')
    assert load_config(file).launch.gpus == "cpu"
    file.write_text('{"system": {"device": "cpu"}, "launch": "abc"}')
    with pytest.raises(ConfigError, match=r"^launch: got 'abc': input should be a valid dict"):
        load_config(file)


def test_epochs_and_max_steps_replace_each_other() -> None:
    asked = load_config(overrides=["training.max_steps=9", "training.epochs=2.5"]).training
    assert (asked.epochs, asked.max_steps) == (2.5, None)
    written = load_config(overrides=["training.epochs=2"]).model_dump(mode="json")
    back = load_config(overrides=[written, "training.max_steps=9"]).training
    assert (back.epochs, back.max_steps, back.total_steps) == (None, 9, 9)


def test_initial_weights_replace_the_shape_that_they_are_laid_over(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(load_config(overrides=["model.hidden_size=64"])))
    weights = "model.initial_weights=team/llama"
    model = load_config(file, [weights]).model
    assert (model.initial_weights, model.segment_length) == ("team/llama", 128)
    with pytest.raises(ConfigError, match=r"^model\.hidden_size: comes from"):
        load_config(file, [weights, "model.hidden_size=64"])


def test_head_dim_is_derived_unless_it_is_set(tmp_path: Path) -> None:
    """Also when a field that it is derived from is overridden in a tree that was dumped before."""
    file = tmp_path / "config.yaml"
    for override, width in (("model.num_attention_heads=4", 64), ("model.head_dim=16", 16)):
        file.write_text(dump_config(load_config(overrides=[override])))
        assert load_config(file=file, overrides=["model.hidden_size=256"]).model.head_dim == width


def test_the_tokenizer_of_the_model_is_that_of_its_weights() -> None:
    config = validate({"model": WEIGHTS, "data": {"tokenizer": {"spec": "model"}}})
    assert config.data_to_tokenize.tokenizer.spec == "team/llama@main"
    assert load_config().data_to_tokenize == load_config().data


DIFFUSION = {"training": {"objective": "block_diffusion"}}


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ({}, -2.0),
        (DIFFUSION, -2.0),
        (DIFFUSION | {"model": {"memory": "linear"}}, 0.0),
        (DIFFUSION | {"model": {"memory": "delta", "read_weight_start": -1.0}}, -1.0),
        (DIFFUSION | {"model": WEIGHTS | {"memory": "linear"}}, -2.0),
    ],
)
def test_read_weights_start_large_where_only_memory_shows_the_past(
    given: dict[str, Any], start: float
) -> None:
    assert load_config(overrides=[given]).model.read_weight_start == start


def test_a_residual_memory_has_no_start_to_set() -> None:
    config = load_config(overrides=["model.memory=residual"])
    assert load_config(overrides=[config.model_dump(mode="json")]) == config
    with pytest.raises(ConfigError, match=r"model: read_weight_start: memory=residual starts at 0"):
        load_config(overrides=["model.memory=residual", "model.read_weight_start=-1"])


@pytest.mark.parametrize("output_dir", ["s3://bucket/team", "here", None])
def test_another_process_is_told_the_same_output_folder_and_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_dir: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / "cache"))
    chosen = [] if output_dir is None else [{"run": {"output_dir": output_dir}}]
    run = load_config(overrides=chosen).run
    monkeypatch.setenv("INFINI_OUTPUT_DIR", shareable_location(run.output_dir, run.store))
    for settings in ([], [{"run": {"seed": 1}}]):
        told = load_config(overrides=settings).run
        assert told.store == run.store
        assert told.output_dir.resolve() == run.output_dir.resolve()


def test_a_tilde_is_the_home_folder_in_every_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = ("run.output_dir", "run.data_dir", "data.folder", "logging.tensorboard_dir")
    for key in (*keys, "evaluation.lm_eval.include_path"):
        value: Any = load_config(overrides=[f"{key}=~/a"])
        for name in key.split("."):
            value = getattr(value, name)
        assert value == tmp_path / "a"
    assert load_config(overrides=["run.output_dir=~nobody-of-this-name/a"]).run.output_dir
    (tmp_path / "settings.yaml").write_text("training: {max_steps: 7}")
    assert load_config(Path("~/settings.yaml")).training.max_steps == 7


def test_an_address_that_a_path_has_damaged_is_refused() -> None:
    for key in ("run.output_dir", "data.folder", "logging.tensorboard_dir"):
        told = refusal_of(nested(key, Path("s3://bucket/team")))
        assert told.startswith(f"{key}: got PosixPath('s3:/bucket/team'): takes a ")


def refusal_of(*overrides: str | dict[str, Any]) -> str:
    """The line with which settings are refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Overrides that are refused, separated by a semicolon, and the beginning of the line that says so.
REFUSED = {
    "training": "override 'training' is not of the form section.key=value",
    "training.max_steps=[": "training.max_steps: '[' is not valid YAML",
    "training.max_steps=many": "training.max_steps: got 'many': input should be a valid",
    "training.max_steps=100000000000000000000": "training.max_steps: got 100000000000000000000",
    "run.seed=18446744073709551616": "run.seed: got 18446744073709551616: input should be less",
    "stages.retries=51": "stages.retries: got 51: input should be less than or equal",
    "training.max_steps=0": "training.max_steps: got 0: input should be greater than 0",
    "training.max_steps=null": "training: takes exactly one of max_steps and epochs",
    "training={epochs: 2, max_steps: 9}": "training: takes exactly one of max_steps and",
    "training.learning_rate=.nan": "training.learning_rate: got nan: input should be a",
    "training.lora={}": "training.lora: adapts model.initial_weights, which is not set",
    "training.lora.target_modules=[]; model={initial_weights: a, segment_length: 8,memory: none}": (
        "training.lora: target_modules=[] trains the memory alone, and there is none"
    ),
    "training.lora.target_modules=[wq]": "training.lora.target_modules.0: got 'wq': input should",
    "run.name=a/b": "run.name: got 'a/b': takes letters and digits",
    "data.name=../elsewhere": "data.name: got '../elsewhere': takes letters and",
    "run.output_dir=": "run.output_dir: got '': takes a folder, or an address",
    "run.output_dir=ftp://h/x": "run.output_dir: got 'ftp://h/x': takes a folder, or an address",
    "run.data_dir=http://h/x": "run.data_dir: got 'http://h/x': takes a folder, or an address",
    "run.store=team": "run.store: got 'team': takes an address",
    "logging.tensorboard_dir=gs://b/x": "logging.tensorboard_dir: got 'gs://b/x': takes a",
    "data.device=gpu": "data.device: got 'gpu': takes auto, cpu, cuda or cuda:N",
    "data={engine: ray, device: cuda:1}": "data: device cuda:1 needs engine=local; Ray takes",
    "data.source.kind=zip": "data.source.kind: got 'zip': takes 'files', 'hub'",
    "data.source={kind: hub}": "data.source.repository: missing",
    "data.source.template=x": "data.source.template: got 'x': takes a Jinja template",
    "data.splits.train=0.5": "data.splits: train + validation + test must be 1, not 0.6",
    "data.splits={train: 0, validation: 0.5, test: 0.5}": "data.splits: train must be more than 0",
    "data.ray_cpus=1.5": "data.ray_cpus: got 1.5: takes a fraction of 1 or a whole number",
    "packing.context_length=100": "packing.context_length 100 is not a multiple of",
    "packing.context_schedule={0.5: 4}": "packing.context_schedule: the first fraction must be 0",
    "packing.context_schedule={0: 3, 0.5: 4}": (
        "packing.context_schedule: 4 segments are not a multiple of the 3 before"
    ),
    "packing.context_schedule={0: 1, 0.5: 2}": "packing.context_schedule: ends with windows of",
    "model.num_attention_heads=3": "model: hidden_size 128 is not a multiple of",
    "model.head_dim=5": "model: head_dim must be even for the rotary embedding, not 5",
    "model.rope_scaling.factor=8": "model.rope_scaling: low_freq_factor: missing, and rope_type=ll",
    "model.rope_scaling={rope_type: yarn}": "model.rope_scaling.factor: missing",
    "model.rope_scaling={rope_type: linear, factor: 2, beta_fast: 3}": (
        "model.rope_scaling: beta_fast: not with rope_type=linear"
    ),
    "model.qkv_bias=true; model.attention_bias=true": "model: qkv_bias: attention_bias includes it",
    "model={vocab_size: 10, mask_token_id: 10}": "model: mask_token_id 10 is outside the",
    "model.bidirectional=true": "model.bidirectional: needs",
    "training.objective=masked_diffusion; model.memory=linear": (
        "model.memory: linear does not combine with"
    ),
    "training.objective=masked_diffusion; model.segment_length=64": (
        "model.segment_length: 64 is less than pack"
    ),
    "training.objective=block_diffusion; model.memory=none": (
        "model.memory: none, but block_diffusion needs it or a window of earlier"
    ),
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
    "model={segment_length: 32, window_sinks: 33}": (
        "model: window_sinks 33 is more than segment_length 32"
    ),
    "training.objective=masked_diffusion; model.window_segments=1": (
        "model.window_segments: masked_diffusion sees whole windows; leave it out"
    ),
    "training.objective=masked_diffusion; model.window_sinks=1": "model.window_sinks: masked_diff",
    "evaluation.tasks=[sample, heat]": "evaluation.tasks.1: got 'heat': ",
    "tracking={mlflow: false, registered_model: mine}": "tracking: registered_model needs mlflow",
    "data.sources={}": "data: sources is empty; name a source, or set data.source",
    "data.sources={hub: {paths: a.txt}}": "data: sources.hub is a reserved name; choose another",
    "data.sources={a: {paths: [x], colum: y}}": (
        "data.sources.a.colum: unknown key; did you mean data.sources.a.column?"
    ),
    "data.sources={a: 5}": "data.sources.a: got 5: takes a section with paths or repository",
    "data.sources={a b: {paths: [x]}}": "data.sources.a b: got 'a b': takes letters and digits",
    "data={source: {paths: [x]}, sources: {a: {paths: [x]}}}": (
        "data: sources is given beside data.source; leave one of them out"
    ),
    f"{TWO_SOURCES}; packing.weights.web=1": "packing.weights: has no weight for code",
    f"{TWO_SOURCES}; packing.weights.book=1": "packing.weights.book: is not a source in ",
    f"{TWO_SOURCES}; packing.max_epochs.x=1": "packing.max_epochs.x: is not a source in ",
    f"{TWO_SOURCES}; packing.weights={{web: 1, code: [1, 2]}}": (
        "packing.weights.code: has 2 weights; takes one, or one for each phase of "
        "packing.context_schedule (1)"
    ),
    "data.sources={a: {paths: [x], pairs: true}, b: {paths: [x], pairs: true, "
    "template: '{{messages}}'}}": "data: the conversations of all sources take one form",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_a_wrong_value_is_named_with_its_key(overrides: str) -> None:
    assert refusal_of(*overrides.split("; ")).startswith(REFUSED[overrides])


def test_every_whole_number_has_a_largest_value() -> None:
    def integers(schema: Any) -> list[dict[str, Any]]:
        below = schema.values() if isinstance(schema, dict) else schema
        found = [schema] if isinstance(schema, dict) and schema.get("type") == "integer" else []
        parts = (integers(each) for each in below if isinstance(each, dict | list))
        return [*found, *itertools.chain.from_iterable(parts)]

    found = integers(Config.model_json_schema())
    assert len(found) > 50
    assert [each for each in found if "maximum" not in each] == []


def test_every_field_of_the_shape_is_refused_beside_initial_weights() -> None:
    shape = ModelConfig().model_dump() | {"head_dim": 32}
    for name in shape.keys() - BESIDE_INITIAL_WEIGHTS:
        message = f"model.{name}: comes from model.initial_weights; leave it out"
        assert refusal_of({"model": WEIGHTS | {name: shape[name]}}) == message


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
            "; it is training.batch_size or evaluation.batch_size",
        ),
        ("training.grad_accum_nums=8", None, "; it is training.gradient_accumulation_steps"),
        (
            "training.use_amp=false",
            None,
            "; use training.precision instead: fp32 for off, bf16 or fp16 for on",
        ),
        ("system={device_id: 3}", "system.device_id", "; it is launch.gpus"),
        ("data.source.limit=5", None, " for this kind of source"),
        ("training.batchsize=3", None, "; did you mean training.batch_size?"),
        ("run.resume=true", None, ""),  # like run.preset in most of its letters
        ("training.steps=3", None, "; it is training.max_steps"),
        ("training.stepz=3", None, ""),  # neither evaluation.sample.unmasking.steps
        ("data.repository=a/b", None, "; it is data.source.repository"),
        ("sample={temperature: 1}", "sample.temperature", "; it is evaluation.sample.temperature"),
        ("training.zzzz=1", None, ""),
        ("zzzz={}", None, ""),
    ],
)
def test_an_unknown_key_is_told_what_was_meant(override: str, key: str | None, meant: str) -> None:
    named = key or override.partition("=")[0]
    assert refusal_of(override) == f"{named}: unknown key{meant}"


def test_what_an_error_points_to_exists_and_what_it_replaces_does_not() -> None:
    keys = set(all_keys())
    sections = {key.rpartition(".")[0] for key in keys}
    leaves = {key.rpartition(".")[2] for key in keys}
    assert not NAMES.keys() & (keys | leaves)
    for name, meant in NAMES.items():
        named = set(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", meant))
        assert named <= keys | sections, f"{name} points to {meant}"


def test_an_update_changes_the_named_settings_of_the_sections_below() -> None:
    config = load_config(overrides=["data.name=texts", "data.tokenizer.vocab_size=512"])
    changed = config.updated(data={"folder": "there", "tokenizer": {"spec": "train"}})
    expected = config.model_dump()
    expected["data"] |= {"folder": "there"}
    expected["data"]["tokenizer"] |= {"spec": "train"}
    assert changed.model_dump() == expected
    assert changed.updated(data=config.data) == config
