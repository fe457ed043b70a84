"""The presets, alone and combined, `stable` over any settings, and the runs of a sweep."""

import functools
import json
import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from flows.cli import app
from flows.presets import Invocation, configure, preset_names, remedy_names
from flows.sweep import runs_of
from infini_model.config import Config, dump_config, load_config, merge, parse_override
from infini_model.runtime.errors import ConfigError

PRESETS = Path(__file__).resolve().parents[2] / "deployments" / "presets"
WHOLE = sorted(set(preset_names()) - set(remedy_names()))
# They begin from weights that the user names.
PRETRAINED = ("fine-tune", "uptrain")
WEIGHTS = "model.initial_weights=team/llama"
LORA = (WEIGHTS, "model.segment_length=128")


def complete(*presets: str) -> Config:
    """The settings of presets, with what they leave to the user."""
    return configure(presets, overrides=[WEIGHTS] if presets[0].startswith(PRETRAINED) else [])


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_survives_a_round_trip_through_yaml(preset: str, tmp_path: Path) -> None:
    config = complete(preset)
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(file) == Invocation.of([], file, {}).config == config
    assert config.run.preset == (f"quickstart-{preset}" if preset in remedy_names() else preset)


def test_an_editor_completes_presets_by_the_schema_that_their_first_line_names() -> None:
    schema = json.loads(CliRunner().invoke(app, ["settings", "--json-schema"]).stdout)
    committed = PRESETS.parent / "settings.schema.json"
    assert json.loads(committed.read_text()) == schema, (
        f"infini settings --json-schema > {committed}"
    )
    validator = Draft202012Validator(schema)
    for preset in PRESETS.glob("*.yaml"):
        first, _, text = preset.read_text().partition("\n")
        named = first.removeprefix("# yaml-language-server: $schema=")
        assert (PRESETS / named).resolve() == committed
        validator.validate(yaml.safe_load(text))
    assert not validator.is_valid({"training": {"max_step": 3}})


@pytest.mark.parametrize("preset", WHOLE)
def test_the_remedy_calms_any_preset_and_leaves_its_model_data_and_length(preset: str) -> None:
    base, config = complete(preset), complete(preset, "stable")
    now, before = config.training, base.training
    pretrained = base.model.initial_weights is not None
    assert pretrained or config.model.initializer_range < base.model.initializer_range
    assert now.learning_rate < before.learning_rate or pretrained
    assert now.memory_learning_rate < before.memory_learning_rate
    assert now.max_grad_norm < before.max_grad_norm
    assert now.adam_epsilon > before.adam_epsilon
    assert (now.precision, config.logging.debug) == ("fp32", True)
    assert (config.data, config.packing) == (base.data, base.packing)
    shape = {"initializer_range": base.model.initializer_range}
    assert config.model.model_copy(update=shape) == base.model
    assert now.max_steps == before.max_steps


@pytest.mark.parametrize("presets", [["fine-tune"], ["uptrain", "stable"], ["uptrain", "debug"]])
def test_what_a_preset_leaves_to_the_user_is_asked_for_in_one_line(presets: list[str]) -> None:
    name = "-".join(presets)
    with pytest.raises(ConfigError) as caught:
        configure(presets, overrides=["training.max_steps=3"])
    assert str(caught.value) == (
        f"model.initial_weights: missing; the preset {name} needs a pretrained Llama: "
        "model.initial_weights=FOLDER or meta-llama/Llama-3.2-1B"
    )
    assert configure(presets, overrides=[WEIGHTS]).model.initial_weights == "team/llama"


def test_long_contexts_are_evaluated_of_a_run_or_beside_another_preset() -> None:
    """What `infini evaluate` lays over a run is this task, whatever is below it here."""
    sections = {"evaluation", "tracking", "data"}
    own = configure(["long-context"]).model_dump(exclude_unset=True, include=sections)
    assert own["evaluation"].keys() - {"max_windows"} == {"batch_size", "tasks", "lm_eval"}
    assert own["evaluation"]["tasks"] == ["lm_eval"]
    assert "folder" not in own["data"]
    over = configure(["arxiv", "long-context"])
    assert over.evaluation.lm_eval.tasks == ["ruler", "babilong_longctx", "longbench"]
    assert over.training == configure(["arxiv"]).training


@pytest.mark.parametrize("preset", WHOLE)
def test_a_preset_says_what_it_costs_below_its_schema(preset: str) -> None:
    cost = (PRESETS / f"{preset}.yaml").read_text(encoding="utf-8").splitlines()[1]
    assert re.search(r"\b(minutes?|hours?|days)\b.*\b(GB|GiB)\b.*\bdisk\b", cost)
    assert re.search(r"\((measured|estimated)\)", cost)


def test_uptrain_gives_a_memory_to_weights_of_a_run_that_had_none(tmp_path: Path) -> None:
    plain = tmp_path / "model"
    plain.mkdir()
    (plain / "config.json").write_text('{"model_type": "infini_llama", "memory": "none"}')
    model = configure(["uptrain"], overrides=[f"model.initial_weights={plain}"]).model
    assert model.memory == "residual"
    assert "memory" in model.model_fields_set


def test_later_presets_lie_over_earlier_ones_and_a_remedy_over_the_default(tmp_path: Path) -> None:
    config = configure(["quickstart", "arxiv"])
    assert config.data.source == configure(["arxiv"]).data.source  # of another kind
    assert config.training.max_steps == 300
    assert config.training.learning_rate == 3e-3  # the quickstart's; arxiv names none
    assert config.run.preset == "quickstart-arxiv"
    assert configure(["stable"]) == configure(["quickstart", "stable"])
    file = tmp_path / "recorded.yaml"
    file.write_text(dump_config(configure(["arxiv"])))
    assert Invocation.of(["stable"], file, {}).config == configure(["arxiv", "stable"])
    file.write_text("training: {max_steps: 9}")
    over_both = Invocation.of(["stable"], file, {"training": {"max_grad_norm": 0.25}}).config
    assert over_both.run.preset == "stable"
    assert over_both.training.max_grad_norm == 0.25


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("paths=[/texts/**/*.txt]", r"texts-\w{6}"),
        ("paths=[/a/b/x.txt, /a/c/*.md]", r"a-\w{6}"),
        ("paths=['{stdlib}/json/*.py']", r"json-\w{6}"),
        ("paths=['https://example.org/more.jsonl.gz']", r"example\.org-\w{6}"),
        ("paths=[/a/b.txt, 's3://bucket/c.txt']", r"documents-\w{6}"),
        ("repository=ccdv/pubmed", r"pubmed-\w{6}"),
        ("column=article", "arxiv"),
    ],
)
def test_documents_of_ones_own_do_not_share_the_name_of_a_preset(source: str, name: str) -> None:
    preset = "quickstart" if source.startswith("paths") else "arxiv"
    given = configure([preset], overrides=[f"data.source.{source}"]).data.name
    assert re.fullmatch(name, given)
    assert configure([preset], overrides=[f"data.source.{source}"]).data.name == given
    named = configure([preset], overrides=["data.name=mine", f"data.source.{source}"])
    assert named.data.name == "mine"


def test_documents_have_one_name_in_a_file_and_typed_whatever_the_folder_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("data: {source: {paths: [texts/*.txt]}}")
    monkeypatch.chdir(tmp_path)
    absolute = [f"data.source.paths=[{tmp_path}/texts/*.txt]"]
    given = configure(["debug"], overrides=absolute)
    assert Invocation.of(["quickstart"], file, {}).config.data.name == given.data.name


@pytest.mark.parametrize("unknown", ["fast", "arxiv+stable", ""])
def test_a_preset_that_is_unknown_is_told_those_there_are(unknown: str) -> None:
    with pytest.raises(ConfigError, match=r"is unknown; available: .*quickstart"):
        configure([unknown])


def swept(*texts: str, overrides: tuple[str, ...] = (), preset: str = "debug") -> list[Config]:
    sweep = {"comparison": {"sweep": [*texts]}}
    typed = functools.reduce(merge, [*map(parse_override, overrides), sweep])
    return runs_of(Invocation.of([preset], None, typed))


def test_a_sweep_runs_all_combinations_and_the_first_key_varies_slowest() -> None:
    runs = swept("model.memory=residual,none", "run.seed=0,1", overrides=("training.max_steps=7",))
    assert [(run.model.memory, run.run.seed, run.run.name) for run in runs] == [
        ("residual", 0, "debug-memory-residual-seed-0"),
        ("residual", 1, "debug-memory-residual-seed-1"),
        ("none", 0, "debug-memory-none-seed-0"),
        ("none", 1, "debug-memory-none-seed-1"),
    ]
    alone = configure(["debug"], overrides=["training.max_steps=7", "run.seed=1"])
    named = alone.run.model_copy(update={"name": "debug-memory-residual-seed-1"})
    assert runs[1] == alone.model_copy(update={"run": named})
    assert [run.training.max_steps for run in swept("training.epochs=1,2")] == [None, None]


def test_a_run_of_a_sweep_is_what_the_command_run_makes_of_the_same_settings() -> None:
    """With the defaults that an objective has of its own, which a preset or a value brings."""
    overrides = ("model.memory=linear", "packing.context_length=256")
    for preset, typed, sweep in (
        ("debug", overrides, "training.objective=causal,block_diffusion"),
        ("diffusion-quickstart", (), "training.objective=masked_diffusion,causal"),
        ("diffusion-quickstart", (), "packing.context_length=128,512"),
    ):
        runs = swept(sweep, overrides=typed, preset=preset)
        key, _, values = sweep.partition("=")
        for run, value in zip(runs, values.split(","), strict=True):
            alone = configure([preset], overrides=[*typed, f"{key}={value}"])
            assert run.updated(run={"name": None}) == alone


def test_runs_of_the_same_settings_are_one() -> None:
    runs = swept("training.learning_rate=1e-3,0.001,2e-3", "run.seed=0,1,0")
    assert [run.run.name for run in runs] == [
        f"debug-learning_rate-{rate}-seed-{seed}" for rate in ("1e-3", "2e-3") for seed in (0, 1)
    ]


def test_values_of_a_text_setting_stay_as_they_were_typed() -> None:
    runs = swept("data.source.separator=---,'a,b',no", "data.source.paths=*.txt,*.md")
    sources = [run.data.source for run in runs[::2]]
    assert [source.separator for source in sources] == ["---", "a,b", "no"]
    assert [run.data.source.paths for run in runs[:2]] == [["*.txt"], ["*.md"]]


def test_runs_of_a_sweep_that_differ_in_what_a_name_cannot_contain_are_numbered() -> None:
    specs = swept("data.tokenizer.spec=team/a,team-a", overrides=("run.name=specs",))
    assert [run.run.name for run in specs] == ["specs-spec-team-a-1", "specs-spec-team-a-2"]


def test_brackets_and_quotes_keep_a_value_with_commas_together() -> None:
    runs = swept("evaluation.tasks=[loss,sample]", 'launch.gpus="0,3",1')
    values = [(run.evaluation.tasks, run.launch.gpus) for run in runs]
    assert values == [(["loss", "sample"], "0,3"), (["loss", "sample"], "1")]
    maps = swept("training.lora=null,{r: 8, lora_alpha: 16}", overrides=LORA)
    assert [run.training.lora is None for run in maps] == [True, False]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["model.memory"], "is not of the form section.key=value"),
        (["run.seed="], "run.seed: got ''"),
        (["training.warmup_step=1,2"], "training.warmup_step: unknown key; did you mean"),
        (["comparison.runs=[a],[b]"], "comparison.runs: cannot be swept"),
        (["run.name=a,b"], "run.name: cannot be swept"),
        (["run.seed=1,2", "run.seed=3"], "run.seed: is given twice"),
    ],
)
def test_a_mistake_in_a_sweep_names_the_key(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        swept(*texts)
    assert "\n" not in str(caught.value)


def test_a_sweep_runs_on_one_machine() -> None:
    machines = ("launch.num_nodes=2", "launch.rdzv_endpoint=host:29500", "run.name=shared")
    with pytest.raises(ConfigError, match=r"launch.num_nodes: a sweep runs on one machine"):
        swept("run.seed=0,1", overrides=machines)
